"""Complete gradients for replicated parameters that see only a part of the tokens.

Between the parallel layers of a sequence-sharded model, activations are token shards. A norm's
weight, a router, an embedding or any other replicated parameter there sees only its rank's tokens,
so its gradient is only this rank's part, and must be summed over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fusedcomm.communicator import Communicator
from fusedcomm.engines.plain.collectives import all_reduce_in_place
from fusedcomm.nn.moe import MoE
from fusedcomm.nn.sharded import ShardedModule
from fusedcomm.ops.dispatch import communicator_of


class Summing:
    """The sums that ``sync_replicated`` set up; ``remove()`` undoes them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._modules: list[RemovableHandle] = []
        self._hooked = WeakIdKeyDictionary()  # parameter -> its hook's handle

    def add(self, parameter: Tensor, name: str) -> None:
        """Sum the gradients of a parameter, if it is not done already."""
        if parameter.requires_grad and parameter not in self._hooked:
            self._hooked[parameter] = parameter.register_hook(_sum_over(self.comm, name))

    def follow(self, module: nn.Module, names: dict[str, str]) -> None:
        """Before each forward, look whether a module has other parameters than before.

        Args:
            names: of its parameters that are to be summed; to those by which messages name them.
        """
        self._modules.append(module.register_forward_pre_hook(_Following(self, names)))

    def remove(self) -> None:
        for handle in (*self._modules, *self._hooked.values()):
            handle.remove()
        self._modules.clear()
        self._hooked = WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters have no hooks yet; it gets them at its first forward.
        return {"comm": self.comm, "_modules": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hooked = WeakIdKeyDictionary()


class _Following:
    """The hook of a module by which parameters that took others' place are found."""

    def __init__(self, summing: Summing, names: dict[str, str]) -> None:
        self.summing = summing
        self.names = names

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for short, name in self.names.items():
            parameter = module._parameters.get(short)
            if parameter is not None:
                self.summing.add(parameter, name)


def sync_replicated(module: nn.Module, group: Any = None) -> Summing:
    """From now on, sum the gradients of ``module``'s replicated parameters over ``group``.

    The parameters of this library's parallel layers are left out: their gradients are complete
    (of a mixture of experts, those of its router and shared expert, too).
    Everything else in ``module`` must see token shards; call it on the submodules that do (norms,
    say), not on parts that work on all tokens, whose gradients would be counted W times. The sum
    takes place in each backward pass before the gradient is accumulated, so it is right under
    gradient accumulation, activation checkpointing and ``torch.autograd.grad``. Copies of the
    module sum, too, and parameters that take others' place, as FSDP2's do (if the module whose own
    they are is called, in eager mode, before they are used).

    Args:
        module: holds the parameters.
        group: the ranks over which tokens are cut; see ``fusedcomm.ops.tensor_parallel``.

    Returns:
        ``remove()`` undoes it.
    """
    summing = Summing(communicator_of(group))
    complete = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, (ShardedModule, MoE))
        for parameter in layer.parameters(recurse=isinstance(layer, MoE))
    }
    for prefix, part in module.named_modules():
        own = {
            short: f"{prefix}.{short}" if prefix else short
            for short, parameter in part.named_parameters(recurse=False)
            if id(parameter) not in complete
        }
        for short, name in own.items():
            summing.add(part.get_parameter(short), name)
        if own:
            summing.follow(part, own)
    return summing


def _sum_over(comm: Communicator, name: str) -> Callable[[Tensor], Tensor]:
    def hook(grad: Tensor) -> Tensor:
        if comm.world_size == 1:
            return grad
        total = grad.contiguous().clone()
        with comm.collective(f"sum of the gradient of {name} {grad.dtype} {list(grad.shape)}"):
            all_reduce_in_place(comm, "sync_replicated", total)
        return total

    return hook
