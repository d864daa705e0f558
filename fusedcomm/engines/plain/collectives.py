"""Collectives of rows on torch.distributed, for shards of any sizes.

All run within ``Communicator.collective``, and first make sure that every rank is in the same call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusedcomm.communicator import Communicator

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
    comm.await_peers(op, exchanging=rows * shard.shape[1] > 0)
    padded = _padded(shard, rows)
    gathered = shard.new_empty(rows * comm.world_size, shard.shape[1])
    if gathered.numel():
        comm.run_torch(op, lambda: _all_gather(gathered, padded, group=comm.group, async_op=True))
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
    comm.await_peers(op, exchanging=rows * partial.shape[1] > 0)
    padded = _padded(partial, rows * comm.world_size)
    own = partial.new_empty(rows, partial.shape[1])
    if own.numel():
        comm.run_torch(op, lambda: _reduce_scatter(own, padded, group=comm.group, async_op=True))
    return own[: last - first]


def all_reduce_in_place(comm: Communicator, op: str, tensor: torch.Tensor) -> None:
    """Replace ``tensor`` by its sum over the ranks."""
    comm.await_peers(op, exchanging=tensor.numel() > 0)
    if tensor.numel():
        comm.run_torch(op, lambda: dist.all_reduce(tensor, group=comm.group, async_op=True))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]] = x
    return padded
