"""All-gather and reduce-scatter of rows on torch.distributed, for shards of any sizes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusedcomm.communicator import Communicator


def all_gather_rows(
    comm: Communicator, shard: torch.Tensor, bounds: list[tuple[int, int]]
) -> torch.Tensor:
    """All ranks' rows; shorter shards travel padded."""
    world_size = comm.world_size
    rows, total = bounds[0][1], bounds[-1][1]
    padded = shard.contiguous()
    if shard.shape[0] < rows:
        padded = shard.new_zeros(rows, shard.shape[1])
        padded[: shard.shape[0]] = shard
    gathered = shard.new_empty(rows * world_size, shard.shape[1])
    if gathered.numel():
        dist.all_gather_into_tensor(gathered, padded, group=comm.group)
    # torch.chunk's shards are full but for the last ones, so all padding lies at the end.
    return gathered[:total]


def reduce_scatter_rows(
    comm: Communicator, partial: torch.Tensor, bounds: list[tuple[int, int]]
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' partials."""
    total, features = partial.shape
    rows = bounds[0][1]
    padded = partial.contiguous()
    if rows * comm.world_size > total:
        padded = partial.new_zeros(rows * comm.world_size, features)
        padded[:total] = partial
    own = partial.new_empty(rows, features)
    if own.numel():
        dist.reduce_scatter_tensor(own, padded, group=comm.group)
    first, last = bounds[comm.rank]
    return own[: last - first]
