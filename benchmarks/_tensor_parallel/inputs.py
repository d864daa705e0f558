"""Inputs that every rank can make for every other, and the collectives of the serial paths.

T tokens, W ranks; shards are torch.chunk's: ceil(T / W) rows each, the last ones shorter or empty.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

if hasattr(dist, "all_gather_single"):  # torch 2.13's names; it warns at the older ones
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def tokens(seed: int, count: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Random activations [count, features] of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, features, generator=generator).to(dtype)


def weight(seed: int, out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """A random weight [out_features, in_features] that keeps the activations' variance."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(out_features, in_features, generator=generator)
    return (values / math.sqrt(in_features)).to(dtype)


def rows_of(rank: int, count: int, world_size: int) -> slice:
    """The rows of ``count`` that belong to ``rank``, by torch.chunk's rule."""
    size = math.ceil(count / world_size)
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with zero rows added up to ``rows``: gloo wants equal shards."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])


def serial_all_gather(x: torch.Tensor, count: int) -> torch.Tensor:
    """The shards of all ranks, [count, features]."""
    world_size = dist.get_world_size()
    size = math.ceil(count / world_size)
    gathered = x.new_empty(world_size * size, x.shape[1])
    _all_gather(gathered, _padded(x, size))
    return gathered[:count]


def serial_reduce_scatter(partial: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``partial`` [T, features]."""
    world_size = dist.get_world_size()
    count = partial.shape[0]
    size = math.ceil(count / world_size)
    shard = partial.new_empty(size, partial.shape[1])
    _reduce_scatter(shard, _padded(partial, world_size * size))
    own = rows_of(dist.get_rank(), count, world_size)
    return shard[: own.stop - own.start]
