"""Moving a tensor between layouts: token shards, replicated, partial sums.

What stands between the parallel layers where no product can hide the exchange: at the beginning of
a sequence-sharded model (``split_tokens``), at its end (``gather_tokens``), and around parameters
that every rank has but each uses on its own part (``sum_gradient``). Gradients follow DTensor: a
replicated tensor is one value, its gradient is equal on all ranks and counts once. Errors, shards
and ``group`` are those of ``fusedcomm.ops.tensor_parallel``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedcomm.ops.checks import check_shard
from fusedcomm.ops.dispatch import address_of
from fusedcomm.ops.library import layouts as library
from fusedcomm.schedule import shard_bounds


def split_tokens(x: Tensor, *, group: Any = None, dim: int = 0) -> Tensor:
    """This rank's shard of a tensor that all ranks have; the gradient is gathered.

    Args:
        x: replicated, ``[…, T, …, features]``.
        dim: the dimension to cut by ``torch.chunk``'s rule; not the last.

    Returns:
        ``[…, T/W, …, features]``, a copy.
    """
    address = address_of(group)
    return library.own_shard(x, _dim(x, dim), address.group, address.channel)


def gather_tokens(
    x: Tensor, *, group: Any = None, dim: int = 0, gathered_size: int | None = None
) -> Tensor:
    """All ranks' shards, replicated; the gradient is this rank's part of it.

    Args:
        x: this rank's shard ``[…, T/W, …, features]``.
        dim: the cut dimension; not the last.
        gathered_size: T. None means that all shards are equal.

    Returns:
        ``[…, T, …, features]``.
    """
    address = address_of(group)
    left = check_shard(x, _dim(x, dim), gathered_size, address.rank, address.world_size)
    size = x.shape[left] * address.world_size if gathered_size is None else gathered_size
    return library.join_shards(x, left, size, address.group, address.channel)


def split_features(x: Tensor, *, group: Any = None) -> Tensor:
    """This rank's features (the last dimension) of a replicated tensor; the gradient is gathered.

    Args:
        x: replicated, ``[…, N]``.

    Returns:
        ``[…, N/W]``, a copy.
    """
    address = address_of(group)
    return library.own_shard(x, x.dim() - 1, address.group, address.channel)


def gather_features(x: Tensor, *, group: Any = None, gathered_size: int | None = None) -> Tensor:
    """All ranks' features (the last dimension), replicated; the gradient is this rank's part.

    Args:
        x: ``[…, N/W]``.
        gathered_size: N. None means that all shards are equal.

    Returns:
        ``[…, N]``.
    """
    address = address_of(group)
    last, own = x.dim() - 1, x.shape[-1]
    size = own * address.world_size if gathered_size is None else gathered_size
    start, stop = shard_bounds(size, address.world_size)[address.rank]
    if own != stop - start:
        raise ValueError(
            f"x has {own} features, but of gathered_size={size} rank {address.rank} of "
            f"{address.world_size} has {stop - start} (torch.chunk's rule)"
        )
    return library.join_shards(x, last, size, address.group, address.channel)


def sum_partials(x: Tensor, *, group: Any = None, what: str = "a tensor") -> Tensor:
    """The sum over ranks, replicated; the gradient passes as it is.

    Args:
        x: this rank's part, of the same shape on every rank.
        what: names the tensor in messages; the same on every rank.
    """
    address = address_of(group)
    return library.sum_partials(x, what, address.group, address.channel)


def sum_gradient(x: Tensor, *, group: Any = None, what: str = "a tensor") -> Tensor:
    """``x`` itself, with its gradient summed over the ranks.

    For a parameter that all ranks hold and each applies to its own tokens, or to its own heads.
    The sum is part of the graph: it is right under gradient accumulation and checkpointing.

    Args:
        x: replicated.
        what: names the tensor in messages; the same on every rank.
    """
    address = address_of(group)
    return library.sum_gradient(x, what, address.group, address.channel)


def _dim(x: Tensor, dim: int) -> int:
    left = dim + x.dim() if dim < 0 else dim
    if x.dim() < 2 or not 0 <= left < x.dim() - 1:
        raise ValueError(
            f"dim={dim} is none of the token dimensions of x (shape {list(x.shape)}; the last "
            "holds the features)"
        )
    return left
