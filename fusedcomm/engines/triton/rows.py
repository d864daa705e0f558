"""Launches that move a mixture of experts' rows: to the experts, back, and into tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.arguments import blocks
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.engines.triton.places import Places, Segments
from fusedcomm.kernels import moe_rows as kernels

#: Rows and features that are moved at once.
_ROWS, _FEATURES = 16, 512


def push_rows(
    launch: Launch,
    places: Places,
    segments: Segments,
    data: Tensor,
    index: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Queue: rows of ``data [rows, hidden]`` go where ``segments`` say, with a flag for each piece.

    Args:
        index: the rows in the order of the segments, int64; None: as they lie.
        scale: ``[rows]``, what each is multiplied by on its way, in that order; None for nothing.
    """
    launch.run(
        kernels.push_rows_kernel,
        launch.programs,
        "copy",
        "push rows",
        data=data,
        index=segments.fields if index is None else index,
        scale=data if scale is None else scale.float().contiguous(),
        segments=segments.fields,
        pieces_W=segments.pieces,
        counters=launch.counters(segments.counters),
        count=segments.number,
        closing=places.closing,
        hidden=data.shape[1],
        record=launch.record,
        INDEXED=index is not None,
        SCALED=scale is not None,
        BM=_ROWS,
        BN=_FEATURES,
        **launch.ranks,
        **launch.flags,
    )


def await_rows(launch: Launch, places: Places) -> None:
    """Queue: wait until every rank has sent all its rows."""
    flags = {name: launch.flags[name] for name in ("epoch_word", "ready_word", "chunks")}
    launch.run(
        kernels.await_kernel,
        1,
        "wait",
        "wait for all rows",
        closing=places.closing,
        num_warps=1,
        **flags,
        **launch.ranks,
        **launch.waits,
    )


def take_rows(launch: Launch, places: Places, out: Tensor) -> None:
    """Queue: ``out [received, hidden]`` becomes the experts' rows, and zeros between them."""
    _copy(launch, places.first_E, places.counts_E, out)


def take_back(launch: Launch, out: Tensor | None) -> None:
    """Queue: ``out [sent, hidden]``, if there is one, becomes the rows that came back."""
    if out is None:
        return
    first = torch.zeros(1, dtype=torch.int64, device=out.device)
    _copy(launch, first, torch.full_like(first, out.shape[0]), out)


def add_choices(
    launch: Launch,
    like: Tensor,
    hidden: int,
    weights: Tensor | None,
    routed: Routed,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Queue the sums of each token's rows that came back, weighted if there are ``weights [T, k]``.

    Returns:
        the sums ``[T, hidden]``, in the dtype of ``like``; the rows they are made of, ``[T, k,
        hidden]`` by token and choice, if ``keep``, else an empty tensor.
    """
    tokens, k = routed.slot.shape
    y = like.new_empty(tokens, hidden)
    kept = like.new_empty((tokens, k, hidden) if keep else (0,))
    launch.run(
        kernels.sum_kernel,
        tokens,
        "reduce",
        "add the choices",
        slot=routed.slot.contiguous(),
        weights=y if weights is None else weights.float().contiguous(),
        y=y,
        kept=kept,
        tokens=tokens,
        hidden=hidden,
        K=k,
        WEIGHTED=weights is not None,
        KEEP=keep,
        BN=_FEATURES,
        **_memory(launch),
    )
    return y, kept


def _copy(launch: Launch, first_E: Tensor, counts_E: Tensor, out: Tensor) -> None:  # noqa: N803
    launch.run(
        kernels.take_kernel,
        blocks(out.shape[0], _ROWS),
        "copy",
        "take rows",
        out=out,
        first_E=first_E,
        counts_E=counts_E,
        experts=first_E.shape[0],
        rows=out.shape[0],
        hidden=out.shape[1],
        BM=_ROWS,
        BN=_FEATURES,
        **_memory(launch),
    )


def _memory(launch: Launch) -> dict[str, Any]:
    flags = launch.flags
    return {
        "bases": launch.workspace.pointers,
        "rank": launch.rank,
        "data_offset": flags["data_offset"],
        "region_bytes": flags["region_bytes"],
        "record": launch.record,
    }
