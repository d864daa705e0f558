"""Modules that every rank holds whole and calls on its own tokens, inside a layer of this library.

The gradient of such a module's parameter is a sum over the ranks. It is taken in the graph, where
the parameter is used, rather than by a hook on it, which a copy of the module would not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fusedcomm.communicator import Communicator
from fusedcomm.nn.sharded import ShardedModule
from fusedcomm.ops.library.layouts import sum_partials


def calls_on_shard(comm: Communicator, modules: Iterable[nn.Module | None]) -> Callable[..., Any]:
    """How to call modules on this rank's tokens: ``call(module, *args)`` is ``module(*args)``.

    The gradients of the modules' parameters are summed over the ranks, all in one exchange per
    dtype, when the backward pass has come to the first call. Parallel layers inside complete theirs
    themselves.

    Args:
        comm: the ranks over which tokens are cut.
        modules: those that will be called; the same on every rank. None is left out.
    """
    if comm.world_size == 1 or not torch.is_grad_enabled():
        return lambda module, *args: module(*args)
    present = [module for module in modules if module is not None]
    summed: dict[int, Tensor] = {
        id(parameter): parameter for module in present for parameter in _incomplete(module).values()
    }
    if summed:
        used = _SumGradients.apply(comm.group.group_name, comm.channel, *summed.values())
        summed = dict(zip(summed, used, strict=True))

    def call(module: nn.Module, *args: Any) -> Any:
        instead = {name: summed[id(old)] for name, old in _incomplete(module).items()}
        return functional_call(module, instead, args) if instead else module(*args)

    return call


def _incomplete(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients the module's own layers do not complete."""
    sharded = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, ShardedModule)
        for parameter in layer.parameters(recurse=False)
    }
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in sharded
    }


class _SumGradients(torch.autograd.Function):
    """Tensors as they are; their gradients are summed over the ranks, all at once."""

    @staticmethod
    def forward(ctx: Any, group: str, channel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.where = group, channel
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: list[Any] = [None] * len(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            chosen = [i for i, grad in enumerate(grads) if grad.dtype == dtype]
            flat = torch.cat([grads[i].reshape(-1) for i in chosen])
            total = sum_partials(flat, "the gradients of replicated parameters", *ctx.where)
            parts = total.split([grads[i].numel() for i in chosen])
            for i, part in zip(chosen, parts, strict=True):
                found[i] = part.view_as(grads[i])
        return None, None, *found
