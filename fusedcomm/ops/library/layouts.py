"""Changes between layouts as torch custom ops: token shards, partial sums, replicated tensors.

These are the 2-D forms: rows are ``size`` tokens times ``inner``, as in
``fusedcomm.ops.library.tensor_parallel``. The public functions, with argument checks, are in
``fusedcomm.ops.layouts``. Each op is the gradient of another:

================= ============================= =================
op                forward                       backward
================= ============================= =================
gather_rows       all ranks' rows               own rows
own_rows          own rows                      all ranks' rows
reduce_scatter    own rows of the ranks' sum    all ranks' rows
sum_partials      the ranks' sum                the gradient as is
sum_gradient      the tensor as is              the ranks' sum
================= ============================= =================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.plain.collectives import (
    all_gather_rows,
    all_reduce_in_place,
    reduce_scatter_rows,
)
from fusedcomm.ops.library.effects import communicates
from fusedcomm.schedule import scaled_bounds
from fusedcomm.trace import span


def _bounds(comm: Communicator, size: int, inner: int) -> list[tuple[int, int]]:
    return scaled_bounds(size, comm.world_size, inner)


def _own(group: str, channel: str, size: int, inner: int) -> tuple[int, int]:
    comm = Communicator.named(group, channel)
    return _bounds(comm, size, inner)[comm.rank]


@communicates
@torch.library.custom_op("fusedcomm::gather_rows", mutates_args=())
def gather_rows(x: Tensor, size: int, inner: int, group: str, channel: str) -> Tensor:
    """All ranks' rows of a shard ``[rows, features]``."""
    comm = Communicator.named(group, channel)
    if comm.world_size == 1:
        return x.clone()
    text = f"gather_rows {size}x{inner}x{x.shape[1]} {x.dtype}"
    with comm.collective(text), span("copy", "all-gather", rank=comm.rank):
        gathered = all_gather_rows(comm, "gather_rows", x, _bounds(comm, size, inner))
    return gathered.contiguous()


@gather_rows.register_fake
def _(x, size, inner, group, channel):
    return x.new_empty(size * inner, x.shape[1])


@torch.library.custom_op("fusedcomm::own_rows", mutates_args=())
def own_rows(x: Tensor, size: int, inner: int, group: str, channel: str) -> Tensor:
    """This rank's rows of a replicated ``[rows, features]``."""
    start, stop = _own(group, channel, size, inner)
    return x[start:stop].clone()


@own_rows.register_fake
def _(x, size, inner, group, channel):
    start, stop = _own(group, channel, size, inner)
    return x.new_empty(stop - start, x.shape[1])


@communicates
@torch.library.custom_op("fusedcomm::reduce_scatter_rows", mutates_args=())
def reduce_scatter(x: Tensor, size: int, inner: int, group: str, channel: str) -> Tensor:
    """This rank's rows of the sum over ranks of ``[rows, features]``."""
    comm = Communicator.named(group, channel)
    if comm.world_size == 1:
        return x.clone()
    text = f"reduce_scatter_rows {size}x{inner}x{x.shape[1]} {x.dtype}"
    total = x.clone(memory_format=torch.contiguous_format)
    with comm.collective(text), span("copy", "reduce-scatter", rank=comm.rank):
        return reduce_scatter_rows(comm, "reduce_scatter_rows", total, _bounds(comm, size, inner))


@reduce_scatter.register_fake
def _(x, size, inner, group, channel):
    start, stop = _own(group, channel, size, inner)
    return x.new_empty(stop - start, x.shape[1])


@communicates
@torch.library.custom_op("fusedcomm::sum_partials", mutates_args=())
def sum_partials(x: Tensor, what: str, group: str, channel: str) -> Tensor:
    """The sum over ranks of a tensor; ``what`` names it in messages."""
    comm = Communicator.named(group, channel)
    total = x.clone(memory_format=torch.contiguous_format)
    if comm.world_size == 1:
        return total
    text = f"sum of {what} {list(x.shape)} {x.dtype}"
    with comm.collective(text), span("copy", "all-reduce", rank=comm.rank):
        all_reduce_in_place(comm, f"sum of {what}", total)
    return total


@sum_partials.register_fake
def _(x, what, group, channel):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("fusedcomm::sum_gradient", mutates_args=())
def sum_gradient(x: Tensor, what: str, group: str, channel: str) -> Tensor:
    """A copy of a tensor, whose gradient will be summed over the ranks."""
    return x.clone(memory_format=torch.contiguous_format)


@sum_gradient.register_fake
def _(x, what, group, channel):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_arguments(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.arguments = inputs[1:]


gather_rows.register_autograd(
    lambda ctx, dy: (own_rows(dy, *ctx.arguments), None, None, None, None),
    setup_context=_keep_arguments,
)
own_rows.register_autograd(
    lambda ctx, dy: (gather_rows(dy, *ctx.arguments), None, None, None, None),
    setup_context=_keep_arguments,
)
reduce_scatter.register_autograd(
    lambda ctx, dy: (gather_rows(dy, *ctx.arguments), None, None, None, None),
    setup_context=_keep_arguments,
)
sum_partials.register_autograd(
    lambda ctx, dy: (dy, None, None, None), setup_context=_keep_arguments
)


def _sum_gradient_backward(ctx: Any, dy: Tensor) -> tuple:
    what, *where = ctx.arguments
    return sum_partials(dy, f"the gradient of {what}", *where), None, None, None


sum_gradient.register_autograd(_sum_gradient_backward, setup_context=_keep_arguments)
