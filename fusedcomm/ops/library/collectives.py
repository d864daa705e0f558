"""The collectives as torch custom ops: shapes for tracing, and torch's derivatives.

Each op makes its result and has it filled by what the function of the same name with ``fill_`` has
planned, which serves all calls on tensors of the same shape. ``group`` and ``channel`` name a
communicator. The public functions, with argument checks, are in ``fusedcomm.ops.collectives``.

============== ======================================================
op             gradient of the input, from dy
============== ======================================================
all_reduce     all-reduce of dy (sum, avg; max and min have none)
all_gather     reduce-scatter of dy
reduce_scatter all-gather of dy (divided by the world size for avg)
all_to_all     all-to-all of dy with counts exchanged
broadcast      on src the sum of all ranks' dy, elsewhere zero
============== ======================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.ops.library.effects import communicates
from fusedcomm.planning.collectives import Plan, plan
from fusedcomm.schedule import scaled_bounds, shard_bounds
from fusedcomm.trace import record_plan

Bounds = list[tuple[int, int]]
#: Fills its second argument from its first one, both contiguous, and of the shapes it is made for.
Fill = Callable[[Tensor, Tensor], None]


def gathered_shape(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """``shape`` with ``size`` in dimension ``dim``."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def scattered_shape(shape: Sequence[int], dim: int, rank: int, world_size: int) -> list[int]:
    """The shape of a rank's shard along ``dim``."""
    start, stop = shard_bounds(shape[dim], world_size)[rank]
    return gathered_shape(shape, dim, stop - start)


def fill_all_reduce(
    comm: Communicator,
    x: Tensor,
    op: str,
    algorithm: str,
    engine: str,
    purpose: tuple[Any, ...] = (),
) -> Fill:
    """``out = x reduced over the ranks``, for tensors like x; out may be x.

    ``purpose``: what else must be equal on all ranks, and is named where it is not.
    """
    details = (tuple(x.shape), op, *purpose)
    chosen, ops = _decide(comm, "all_reduce", x, x.numel(), engine, details, algorithm)
    run = ops.all_reduce

    def fill(x: Tensor, out: Tensor) -> None:
        record_plan("all_reduce", chosen.engine, chosen.algorithm, chosen.reason)
        run(comm, chosen, _flat(x), _flat(out), op)

    return fill


def fill_all_gather(
    comm: Communicator,
    x: Tensor,
    dim: int,
    size: int,
    engine: str,
    purpose: tuple[Any, ...] = (),
) -> Fill:
    """``out = the ranks' x, joined along dim``, ``size`` long there. ``purpose``: as above."""
    shape = gathered_shape(x.shape, dim, size)
    details = (tuple(shape), f"dim {dim}", *purpose)
    chosen, ops = _decide(comm, "all_gather", x, math.prod(shape), engine, details)
    run = ops.all_gather
    outer, bounds = _columns(x.shape, dim, size, comm.world_size)
    first, last = bounds[comm.rank]
    columns = bounds[-1][1]

    def fill(x: Tensor, out: Tensor) -> None:
        record_plan("all_gather", chosen.engine, chosen.algorithm, chosen.reason)
        run(comm, chosen, x.view(outer, last - first), out.view(outer, columns), bounds)

    return fill


def fill_reduce_scatter(comm: Communicator, x: Tensor, dim: int, op: str, engine: str) -> Fill:
    """``out = this rank's shard along dim of x reduced over the ranks``."""
    details = (tuple(x.shape), f"dim {dim}", op)
    chosen, ops = _decide(comm, "reduce_scatter", x, x.numel(), engine, details)
    run = ops.reduce_scatter
    outer, bounds = _columns(x.shape, dim, x.shape[dim], comm.world_size)
    first, last = bounds[comm.rank]
    columns = bounds[-1][1]

    def fill(x: Tensor, out: Tensor) -> None:
        record_plan("reduce_scatter", chosen.engine, chosen.algorithm, chosen.reason)
        run(comm, chosen, x.view(outer, columns), out.view(outer, last - first), bounds, op)

    return fill


def fill_all_to_all(
    comm: Communicator,
    x: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    engine: str,
) -> Fill:
    """``out = what each rank's x has for this rank``, in the order of ranks."""
    if send_counts is None or recv_counts is None:
        details: tuple[Any, ...] = (tuple(x.shape),)
        size, rows = x.numel(), x.shape[0]
    else:
        details = ("rows of", tuple(x.shape[1:]))
        size, rows = 0, sum(recv_counts)
    chosen, ops = _decide(comm, "all_to_all", x, size, engine, details)
    run = ops.all_to_all
    sent, inner = x.shape[0], math.prod(x.shape[1:])

    def fill(x: Tensor, out: Tensor) -> None:
        record_plan("all_to_all", chosen.engine, chosen.algorithm, chosen.reason)
        run(comm, chosen, x.view(sent, inner), out.view(rows, inner), send_counts, recv_counts)

    return fill


def fill_broadcast(comm: Communicator, x: Tensor, src: int, engine: str) -> Fill:
    """``out = x of src``; out may be x."""
    details = (tuple(x.shape), f"src {src}")
    chosen, ops = _decide(comm, "broadcast", x, x.numel(), engine, details)
    run = ops.broadcast

    def fill(x: Tensor, out: Tensor) -> None:
        record_plan("broadcast", chosen.engine, chosen.algorithm, chosen.reason)
        run(comm, chosen, _flat(x), _flat(out), src)

    return fill


def _decide(
    comm: Communicator,
    op: str,
    x: Tensor,
    size: int,
    engine: str,
    details: tuple[Any, ...],
    algorithm: str = "direct",
) -> tuple[Plan, ModuleType]:
    chosen = plan(comm, op, size, x.dtype, x.device, engine, details, algorithm)
    several = comm.inside is not None and chosen.engine != "plain"
    return chosen, operations_of("across" if several else chosen.engine, "collectives")


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor as a vector; a view takes a tenth of a small call out of cache."""
    return x if x.dim() == 1 else x.view(-1)


def _columns(shape: Sequence[int], dim: int, size: int, parts: int) -> tuple[int, Bounds]:
    """A tensor as ``[outer, columns]``, columns running over ``dim`` and what is behind it.

    Returns:
        outer, and which columns each of ``parts`` has of ``size`` along ``dim``.
    """
    return math.prod(shape[:dim]), scaled_bounds(size, parts, math.prod(shape[dim + 1 :]))


@communicates
@torch.library.custom_op("fusedcomm::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: str, algorithm: str, group: str, channel: str, engine: str) -> Tensor:
    """x reduced over the ranks."""
    out = x.new_empty(x.shape)
    fill_all_reduce(Communicator.named(group, channel), x, op, algorithm, engine)(
        x.contiguous(), out
    )
    return out


@all_reduce.register_fake
def _(x, op, algorithm, group, channel, engine):
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, *ctx.rest = inputs


def _all_reduce_backward(ctx: Any, dy: Tensor) -> tuple:
    op, *_ = ctx.rest
    _require_linear("all_reduce", op)
    return all_reduce(dy, *ctx.rest), None, None, None, None, None


all_reduce.register_autograd(_all_reduce_backward, setup_context=_all_reduce_setup)


@communicates
@torch.library.custom_op("fusedcomm::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, size: int, group: str, channel: str, engine: str) -> Tensor:
    """The ranks' shards joined along ``dim``, which then is ``size`` long."""
    out = x.new_empty(gathered_shape(x.shape, dim, size))
    fill_all_gather(Communicator.named(group, channel), x, dim, size, engine)(x.contiguous(), out)
    return out


@all_gather.register_fake
def _(x, dim, size, group, channel, engine):
    return x.new_empty(gathered_shape(x.shape, dim, size))


def _all_gather_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, _, *ctx.where = inputs


def _all_gather_backward(ctx: Any, dy: Tensor) -> tuple:
    return reduce_scatter(dy, ctx.dim, "sum", *ctx.where), None, None, None, None, None


all_gather.register_autograd(_all_gather_backward, setup_context=_all_gather_setup)


@communicates
@torch.library.custom_op("fusedcomm::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, op: str, group: str, channel: str, engine: str) -> Tensor:
    """This rank's shard along ``dim`` of x reduced over the ranks."""
    comm = Communicator.named(group, channel)
    out = x.new_empty(scattered_shape(x.shape, dim, comm.rank, comm.world_size))
    fill_reduce_scatter(comm, x, dim, op, engine)(x.contiguous(), out)
    return out


@reduce_scatter.register_fake
def _(x, dim, op, group, channel, engine):
    comm = Communicator.named(group, channel)
    return x.new_empty(scattered_shape(x.shape, dim, comm.rank, comm.world_size))


def _reduce_scatter_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ctx.dim, ctx.op, *ctx.where = inputs
    ctx.size = x.shape[ctx.dim]


def _reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple:
    _require_linear("reduce_scatter", ctx.op)
    dx = all_gather(dy, ctx.dim, ctx.size, *ctx.where)
    if ctx.op == "avg":
        group, channel, _ = ctx.where
        dx = dx / Communicator.named(group, channel).world_size
    return dx, None, None, None, None, None


reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_reduce_scatter_setup)


@communicates
@torch.library.custom_op("fusedcomm::all_to_all", mutates_args=())
def all_to_all(
    x: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """What each rank's x has for this rank, in the order of ranks."""
    rows = x.shape[0] if recv_counts is None else sum(recv_counts)
    out = x.new_empty([rows, *x.shape[1:]])
    comm = Communicator.named(group, channel)
    fill_all_to_all(comm, x, send_counts, recv_counts, engine)(x.contiguous(), out)
    return out


@all_to_all.register_fake
def _(x, send_counts, recv_counts, group, channel, engine):
    rows = x.shape[0] if recv_counts is None else sum(recv_counts)
    return x.new_empty([rows, *x.shape[1:]])


def _all_to_all_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.send_counts, ctx.recv_counts, *ctx.where = inputs


def _all_to_all_backward(ctx: Any, dy: Tensor) -> tuple:
    dx = all_to_all(dy, ctx.recv_counts, ctx.send_counts, *ctx.where)
    return dx, None, None, None, None, None


all_to_all.register_autograd(_all_to_all_backward, setup_context=_all_to_all_setup)


@communicates
@torch.library.custom_op("fusedcomm::broadcast", mutates_args=())
def broadcast(x: Tensor, src: int, group: str, channel: str, engine: str) -> Tensor:
    """x of rank ``src``."""
    out = x.new_empty(x.shape)
    fill_broadcast(Communicator.named(group, channel), x, src, engine)(x.contiguous(), out)
    return out


@broadcast.register_fake
def _(x, src, group, channel, engine):
    return x.new_empty(x.shape)


def _broadcast_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.src, *ctx.where = inputs


def _broadcast_backward(ctx: Any, dy: Tensor) -> tuple:
    dx = all_reduce(dy, "sum", "auto", *ctx.where)
    group, channel, _ = ctx.where
    if Communicator.named(group, channel).rank != ctx.src:
        # Zero, but still a function of dy: in a second derivative all ranks must take part.
        dx = dx.masked_fill(torch.ones((), dtype=torch.bool, device=dx.device), 0)
    return dx, None, None, None, None


broadcast.register_autograd(_broadcast_backward, setup_context=_broadcast_setup)


def _require_linear(name: str, op: str) -> None:
    if op not in ("sum", "avg"):
        raise RuntimeError(f"{name} with op={op!r} has no derivative; detach() its input")
