"""Launches of a reduce-scatter: partials are made in their owners' memory, or copied there."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedcomm.engines.products import sum_of_linears
from fusedcomm.engines.triton.arguments import (
    Bounds,
    aligned,
    meta,
    product_of,
    segments,
    weight_strides,
)
from fusedcomm.engines.triton.config import tiles_of
from fusedcomm.engines.triton.launch import DTYPES, Launch
from fusedcomm.kernels import linear_reduce_scatter as kernels
from fusedcomm.planning.tensor_parallel import Plan
from fusedcomm.schedule import reduce_order


def pairs_of(
    xs: list[Tensor], weights: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, int], tuple[int, ...]]:
    """One or two products as the kernels take them; more are joined along their inner dimension.

    Joining copies: it happens only in the backward pass of three or more weights on one gather.
    """
    if len(xs) > 2:
        xs, weights = [torch.cat(xs, 1)], [torch.cat(weights, 1)]
    xs = [aligned(x) for x in xs]
    depths = tuple(x.shape[1] for x in xs)
    tensors = {"x0": xs[0], "weight0": weights[0], "x1": xs[-1], "weight1": weights[-1]}
    numbers = {
        "PAIRS": len(xs),
        "K0": depths[0],
        "K1": depths[-1],
        **weight_strides(weights[0], "0"),
        **weight_strides(weights[-1], "1"),
    }
    return tensors, numbers, depths


def produce(
    launch: Launch,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> dict[str, int]:
    """Make this rank's partials in their owners' memory; returns how shards are cut."""
    features = weights[0].shape[0]
    tensors, numbers, depths = pairs_of(xs, weights)
    x = tensors["x0"]
    used = [tensors[f"weight{pair}"] for pair in range(numbers["PAIRS"])]
    product = product_of(used, init is not None or wire.itemsize > x.dtype.itemsize)
    tiles = tiles_of(x.device, x.dtype, bounds[0][1], features, max(depths), product)
    cut = segments(bounds, plan.pieces, tiles.rows)
    launch.run(
        kernels.produce_kernel,
        launch.programs,
        "gemm",
        "partials",
        init=x if init is None else init.contiguous(),
        counters=launch.counters(launch.world_size * plan.pieces),
        total_rows=bounds[-1][1],
        N=features,
        HAS_INIT=init is not None,
        WIRE=DTYPES[wire],
        record=launch.record,
        **tensors,
        **numbers,
        **cut,
        **meta(tiles, *depths),
        **launch.ranks,
        **launch.flags,
    )
    return cut


def produce_and_copy(
    launch: Launch,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> dict[str, int]:
    """As ``produce``, by the library's products, chunk by chunk; each is copied to its owner.

    Raises: ready[s][me][piece] on the owner.
    """
    features, rank = weights[0].shape[0], launch.rank
    cut = segments(bounds, plan.pieces, 32)
    row_bytes = features * wire.itemsize
    whole = xs[0].new_empty(bounds[-1][1], features, dtype=wire)
    for owner in reduce_order(rank, launch.world_size):
        first, last = bounds[owner]
        for piece in range(plan.pieces):
            start = min(first + piece * cut["piece_rows"], last)
            stop = min(start + cut["piece_rows"], last)
            rows = whole[start:stop]
            offset = (start - first) * row_bytes
            if owner == rank:
                place = launch.workspace.data_offset(launch.slot, rank) + offset
                segment = launch.workspace.segments[rank]
                rows = segment.tensor(place, (stop - start, features), wire)
            if stop > start:
                launch.call(partial(_multiply, rows, xs, weights, init, start, stop))
            if owner != rank:
                launch.copy(owner, offset, rows, piece)
    return cut


def _multiply(
    out: Tensor,
    xs: list[Tensor],
    weights: list[Tensor],
    init: Tensor | None,
    start: int,
    stop: int,
) -> None:
    rows = None if init is None else init[start:stop]
    sum_of_linears(out, [x[start:stop] for x in xs], weights, rows)
