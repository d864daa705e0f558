"""Embedding and loss over a vocabulary that is cut over the ranks of a group.

Rank r has the rows (of the embedding, of the head's weight) and the logits of its shard of the ids,
``torch.chunk``'s: uneven and empty ones included. ``group`` and errors as in
``fusedcomm.ops.tensor_parallel``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusedcomm.ops.checks import DTYPES
from fusedcomm.ops.dispatch import address_of
from fusedcomm.ops.library import layouts
from fusedcomm.ops.library import vocabulary as library
from fusedcomm.schedule import shard_bounds

REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    vocabulary: int | None = None,
    padding_idx: int | None = None,
    group: Any = None,
    scatter_dim: int | None = None,
) -> Tensor:
    """Look up token ids in a table of which every rank has some rows.

    Args:
        ids: ``[…]`` integers, the same on every rank.
        weight: this rank's rows ``[V/W, features]``.
        vocabulary: V. None means that all ranks have equally many rows.
        padding_idx: an id whose row gets no gradient.
        scatter_dim: None: the result is replicated, and its gradient counts once. Otherwise the
            dimension of ids along which each rank keeps its shard.

    Returns:
        ``[…, features]``, or ``[…, T/W, …, features]``. Exact: one rank has each row.

    Raises:
        ValueError: besides the arguments' shapes, an id that the vocabulary has not (on CPU).
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers; got {ids.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [rows, features]; got shape {list(weight.shape)}")
    address = address_of(group)
    first, total = _place("weight", weight.shape[0], vocabulary, address.rank, address.world_size)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= total:
            raise ValueError(
                f"ids holds {low if low < 0 else high}, but the vocabulary's are 0 to {total - 1}"
            )
    partial = _own_rows(ids, weight, first, padding_idx)
    where = (address.group, address.channel)
    if scatter_dim is None:
        return layouts.sum_partials(partial, "embeddings", *where)
    dim = scatter_dim + ids.dim() if scatter_dim < 0 else scatter_dim
    if not 0 <= dim < ids.dim():
        raise ValueError(
            f"scatter_dim={scatter_dim} is no dimension of ids (shape {list(ids.shape)})"
        )
    return layouts.scatter_sum(partial, dim, *where)


def _own_rows(ids: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
    """The rows that this rank has, 0 for the others."""
    rows = weight.shape[0]
    if not rows:  # Part of the graph still: every rank has the same one.
        return weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
    local = ids - first
    foreign = (local < 0) | (local >= rows)
    if padding_idx is not None:
        padding_idx = padding_idx - first if first <= padding_idx < first + rows else None
    found = F.embedding(local.masked_fill(foreign, 0), weight, padding_idx)
    return found.masked_fill(foreign[..., None], 0)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int | None = None,
    group: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits cut over the vocabulary.

    No rank ever has the logits of the whole vocabulary: three numbers a token are exchanged, four
    with label smoothing. The loss is replicated (bitwise equal on all ranks), its gradient counts
    once, and the backward pass does not communicate.

    Args:
        logits: all tokens, this rank's part of the vocabulary ``[…, V/W]``: what
            :func:`fusedcomm.all_gather_linear` makes of a head cut by rows.
        targets: ``[…]`` ids (of the whole vocabulary), the same on every rank.
        vocabulary: V. None means that all ranks have equally many logits.
        ignore_index: a target that is left out, of the mean's count as well.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1]; see ``torch.nn.functional.cross_entropy``.

    Returns:
        A scalar, or ``[…]`` for "none", in float32 (float64 for float64 logits). As torch's, the
        mean over no tokens is NaN.

    Raises:
        ValueError: besides the arguments' shapes, a target that the vocabulary has not (on CPU;
            elsewhere its loss is NaN).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1]; got {label_smoothing}")
    if logits.dim() < 1 or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits must be [tokens, vocabulary] floating point; got {list(logits.shape)} "
            f"{logits.dtype}"
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be ids, integers; got {targets.dtype}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {list(targets.shape)}, but logits {list(logits.shape)}: targets "
            "must have that shape without the last dimension"
        )
    address = address_of(group)
    first, total = _place("logits", logits.shape[-1], vocabulary, address.rank, address.world_size)
    flat = targets.reshape(-1).long()
    losses, _ = library.vocab_parallel_cross_entropy(
        logits.reshape(flat.shape[0], logits.shape[-1]),
        flat,
        first,
        total,
        ignore_index,
        float(label_smoothing),
        address.group,
        address.channel,
    )
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (flat != ignore_index).sum()


def _place(
    name: str, own: int, vocabulary: int | None, rank: int, world_size: int
) -> tuple[int, int]:
    """This rank's first id, and the size of the vocabulary."""
    total = own * world_size if vocabulary is None else vocabulary
    start, stop = shard_bounds(total, world_size)[rank]
    if stop - start != own:
        raise ValueError(
            f"{name} has {own} of a vocabulary of {total}, but rank {rank} of {world_size} has "
            f"{stop - start} of them (torch.chunk's rule)"
        )
    return start, total
