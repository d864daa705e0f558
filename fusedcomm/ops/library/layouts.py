"""Changes between layouts as torch custom ops: shards, partial sums, replicated tensors.

The public functions, with argument checks, are in ``fusedcomm.ops.layouts``. These differ from the
plain collectives by their gradients, which follow DTensor: what all ranks have is one value, whose
gradient is equal on all of them and counts once. Each op is the gradient of another:

============== ============================= =================
op             forward                       backward
============== ============================= =================
join_shards    all ranks' shards             own shard
own_shard      own shard                     all ranks' shards
scatter_sum    own shard of the ranks' sum   all ranks' shards
sum_partials   the ranks' sum                the gradient as is
sum_gradient   the tensor as is              the ranks' sum
============== ============================= =================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.ops.library.collectives import (
    fill_all_gather,
    fill_all_reduce,
    fill_reduce_scatter,
    gathered_shape,
    scattered_shape,
)
from fusedcomm.ops.library.effects import communicates
from fusedcomm.schedule import shard_bounds


def _own_shape(x: Tensor, dim: int, group: str, channel: str) -> list[int]:
    comm = Communicator.named(group, channel)
    return scattered_shape(x.shape, dim, comm.rank, comm.world_size)


@communicates
@torch.library.custom_op("fusedcomm::join_shards", mutates_args=())
def join_shards(x: Tensor, dim: int, size: int, group: str, channel: str) -> Tensor:
    """All ranks' shards along ``dim``, which then is ``size`` long."""
    out = x.new_empty(gathered_shape(x.shape, dim, size))
    fill_all_gather(Communicator.named(group, channel), x, dim, size, "auto")(x.contiguous(), out)
    return out


@join_shards.register_fake
def _(x, dim, size, group, channel):
    return x.new_empty(gathered_shape(x.shape, dim, size))


@torch.library.custom_op("fusedcomm::own_shard", mutates_args=())
def own_shard(x: Tensor, dim: int, group: str, channel: str) -> Tensor:
    """This rank's shard along ``dim`` of a replicated tensor."""
    comm = Communicator.named(group, channel)
    start, stop = shard_bounds(x.shape[dim], comm.world_size)[comm.rank]
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


@own_shard.register_fake
def _(x, dim, group, channel):
    return x.new_empty(_own_shape(x, dim, group, channel))


@communicates
@torch.library.custom_op("fusedcomm::scatter_sum", mutates_args=())
def scatter_sum(x: Tensor, dim: int, group: str, channel: str) -> Tensor:
    """This rank's shard along ``dim`` of the sum over ranks."""
    out = x.new_empty(_own_shape(x, dim, group, channel))
    comm = Communicator.named(group, channel)
    fill_reduce_scatter(comm, x, dim, "sum", "auto")(x.contiguous(), out)
    return out


@scatter_sum.register_fake
def _(x, dim, group, channel):
    return x.new_empty(_own_shape(x, dim, group, channel))


@communicates
@torch.library.custom_op("fusedcomm::sum_partials", mutates_args=())
def sum_partials(x: Tensor, what: str, group: str, channel: str) -> Tensor:
    """The sum over ranks of a tensor; ``what`` names it in messages."""
    out = x.new_empty(x.shape)
    comm = Communicator.named(group, channel)
    fill_all_reduce(comm, x, "sum", "auto", "auto", (f"of {what}",))(x.contiguous(), out)
    return out


@sum_partials.register_fake
def _(x, what, group, channel):
    return x.new_empty(x.shape)


@torch.library.custom_op("fusedcomm::sum_gradient", mutates_args=())
def sum_gradient(x: Tensor, what: str, group: str, channel: str) -> Tensor:
    """A copy of a tensor, whose gradient will be summed over the ranks."""
    return x.clone(memory_format=torch.contiguous_format)


@sum_gradient.register_fake
def _(x, what, group, channel):
    return x.new_empty(x.shape)


def _keep_arguments(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, *ctx.arguments = inputs
    ctx.shape = x.shape


def _join_shards_backward(ctx: Any, dy: Tensor) -> tuple:
    dim, _, *where = ctx.arguments
    return own_shard(dy, dim, *where), None, None, None, None


def _own_shard_backward(ctx: Any, dy: Tensor) -> tuple:
    dim, *where = ctx.arguments
    return join_shards(dy, dim, ctx.shape[dim], *where), None, None, None


def _sum_partials_backward(ctx: Any, dy: Tensor) -> tuple:
    return dy, None, None, None


def _sum_gradient_backward(ctx: Any, dy: Tensor) -> tuple:
    what, *where = ctx.arguments
    return sum_partials(dy, f"the gradient of {what}", *where), None, None, None


join_shards.register_autograd(_join_shards_backward, setup_context=_keep_arguments)
own_shard.register_autograd(_own_shard_backward, setup_context=_keep_arguments)
scatter_sum.register_autograd(_own_shard_backward, setup_context=_keep_arguments)
sum_partials.register_autograd(_sum_partials_backward, setup_context=_keep_arguments)
sum_gradient.register_autograd(_sum_gradient_backward, setup_context=_keep_arguments)
