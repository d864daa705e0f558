"""Complete gradients for replicated parameters that see only a part of the tokens.

Between the parallel layers of a sequence-sharded model, activations are token shards. A norm's
weight, a router, an embedding or any other replicated parameter there sees only its rank's tokens,
so its gradient is only this rank's part, and must be summed over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusedcomm.communicator import Communicator
from fusedcomm.engines.plain.collectives import all_reduce_in_place
from fusedcomm.nn.moe import MoE
from fusedcomm.nn.sharded import ShardedModule


def sync_replicated(module: nn.Module, group: Any = None) -> list[RemovableHandle]:
    """From now on, sum the gradients of ``module``'s replicated parameters over ``group``.

    The parameters of this library's parallel layers are left out: their gradients are complete
    (of a mixture of experts, those of its router and shared expert, too).
    Everything else in ``module`` must see token shards; call it on the submodules that do (norms,
    say), not on parts that work on all tokens, whose gradients would be counted W times. The sum
    takes place in each backward pass before the gradient is accumulated, so it is right under
    gradient accumulation, activation checkpointing and ``torch.autograd.grad``.

    Args:
        module: holds the parameters.
        group: the ranks over which tokens are cut; see ``fusedcomm.ops.tensor_parallel``.

    Returns:
        Handles of the hooks; ``remove()`` undoes it.
    """
    comm = group if isinstance(group, Communicator) else Communicator.of(group)
    complete = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, (ShardedModule, MoE))
        for parameter in layer.parameters(recurse=isinstance(layer, MoE))
    }
    return [
        parameter.register_hook(_sum_over(comm, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in complete
    ]


def _sum_over(comm: Communicator, name: str) -> Callable[[Tensor], Tensor]:
    def hook(grad: Tensor) -> Tensor:
        if comm.world_size == 1:
            return grad
        total = grad.contiguous().clone()
        with comm.collective(f"sum of the gradient of {name} {grad.dtype} {list(grad.shape)}"):
            all_reduce_in_place(comm, "sync_replicated", total)
        return total

    return hook
