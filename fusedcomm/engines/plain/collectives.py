"""Collectives on torch.distributed, for shards of any sizes.

All run within ``Communicator.collective``, and first make sure that every rank is in the same call.
First those of rows, which the other operations of this engine are made of; then those with the
names and arguments of ``engines.host.collectives``. What sums promise (order, rounding) is what
torch.distributed's backend promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusedcomm.communicator import Communicator
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.planning.collectives import Plan

if hasattr(dist, "all_gather_single"):  # torch 2.13's names; it warns at the older ones
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

Bounds = list[tuple[int, int]]


def all_gather_rows(
    comm: Communicator, op: str, shard: torch.Tensor, bounds: Bounds
) -> torch.Tensor:
    """All ranks' rows; shorter shards travel padded."""
    rows, total = bounds[0][1], bounds[-1][1]
    comm.calls.await_peers(op, exchanging=rows * shard.shape[1] > 0)
    padded = _padded(shard, rows)
    gathered = shard.new_empty(rows * comm.world_size, shard.shape[1])
    if gathered.numel():
        comm.torch.run(op, lambda: _all_gather(gathered, padded, group=comm.group, async_op=True))
    # torch.chunk's shards are full but for the last ones, so all padding lies at the end.
    return gathered[:total]


def reduce_scatter_rows(
    comm: Communicator, op: str, partial: torch.Tensor, bounds: Bounds
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' partials; ``partial`` may be overwritten.

    gloo's reduce-scatter is an all-reduce whose work completes only in ``wait()``, where a dead
    peer cannot be noticed: on CPU the all-reduce is called directly.
    """
    first, last = bounds[comm.rank]
    if comm.device.type == "cpu":
        all_reduce_in_place(comm, op, partial)
        return partial[first:last].clone()
    rows = bounds[0][1]
    comm.calls.await_peers(op, exchanging=rows * partial.shape[1] > 0)
    padded = _padded(partial, rows * comm.world_size)
    own = partial.new_empty(rows, partial.shape[1])
    if own.numel():
        comm.torch.run(op, lambda: _reduce_scatter(own, padded, group=comm.group, async_op=True))
    return own[: last - first]


def all_reduce_in_place(
    comm: Communicator,
    op: str,
    tensor: torch.Tensor,
    reduction: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Replace ``tensor`` by its sum (or another reduction) over the ranks."""
    comm.calls.await_peers(op, exchanging=tensor.numel() > 0)
    if tensor.numel():
        comm.torch.run(
            op, lambda: dist.all_reduce(tensor, reduction, group=comm.group, async_op=True)
        )


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]] = x
    return padded


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has none of its own; divided afterwards
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
#: What gloo cannot reduce, and a type in which the result is the same when it is narrowed again.
_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}


def all_reduce(
    comm: Communicator, plan: Plan, x: torch.Tensor, out: torch.Tensor, reduction: str
) -> None:
    """``out = reduction over ranks of x``; both flat."""
    with comm.collective(plan.text):
        out.copy_(_reduced(comm, "all_reduce", x, reduction))


def all_gather(
    comm: Communicator, plan: Plan, x: torch.Tensor, out: torch.Tensor, bounds: Bounds
) -> None:
    """``out[:, bounds[r]] = x of rank r``."""
    rows = x.t().contiguous()
    with comm.collective(plan.text):
        gathered = all_gather_rows(comm, "all_gather", _as_bytes(rows), bounds)
    if out.numel():
        out.copy_(gathered.view(x.dtype).t())


def reduce_scatter(
    comm: Communicator,
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor,
    bounds: Bounds,
    reduction: str,
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``.

    An all-reduce of which the own part is kept, for the reason that ``reduce_scatter_rows`` has.
    """
    with comm.collective(plan.text):
        reduced = _reduced(comm, "reduce_scatter", x, reduction)
    out.copy_(reduced[:, slice(*bounds[comm.rank])])


def all_to_all(
    comm: Communicator,
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
) -> None:
    """``out`` is the concatenation of the rows that every rank has for this one."""
    op, world_size = "all_to_all", comm.world_size
    with comm.collective(plan.text):
        if send_counts is None or recv_counts is None:
            send_counts = recv_counts = [x.shape[0] // world_size] * world_size
            some = x.numel() > 0
        else:
            mine = torch.tensor([[*send_counts, *recv_counts]], device=x.device)
            bounds = [(rank, rank + 1) for rank in range(world_size)]
            rows = all_gather_rows(comm, op, mine, bounds).tolist()
            counts = check_all_counts(rows)
            some = x.shape[1] > 0 and any(map(any, counts))
        comm.calls.await_peers(op, exchanging=some)
        if not some:
            return
        received, sent = _as_bytes(out), _as_bytes(x)
        splits = (list(recv_counts), list(send_counts))
        comm.torch.run(
            op,
            lambda: dist.all_to_all_single(
                received, sent, *splits, group=comm.group, async_op=True
            ),
        )


def broadcast(comm: Communicator, plan: Plan, x: torch.Tensor, out: torch.Tensor, src: int) -> None:
    """``out = x of src``; both flat."""
    with comm.collective(plan.text):
        if comm.rank == src and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        comm.calls.await_peers("broadcast", exchanging=x.numel() > 0)
        if x.numel():
            root = dist.get_global_rank(comm.group, src)
            data = _as_bytes(out)
            comm.torch.run(
                "broadcast", lambda: dist.broadcast(data, root, group=comm.group, async_op=True)
            )


def _reduced(comm: Communicator, op: str, x: torch.Tensor, reduction: str) -> torch.Tensor:
    """A new tensor, x reduced over the ranks."""
    total = x.to(_WIDER.get(x.dtype, x.dtype), copy=True)
    all_reduce_in_place(comm, op, total, _REDUCE_OPS[reduction])
    return total.div_(comm.world_size) if reduction == "avg" else total.to(x.dtype)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor ``[rows, …]`` as bytes: what is only moved may be of any dtype."""
    columns = x.shape[1:].numel() * x.dtype.itemsize  # equal on all ranks, though rows may not be
    flat = x.as_strided((x.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).view(x.shape[0], columns)
