"""Tensor-parallel operations as launches of the kernels.

The functions, arguments and results are those of ``engines.host.tensor_parallel``. Who raises and
awaits which flag stands at the head of each file of ``kernels/``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.products import sum_of_linears
from fusedcomm.engines.triton.config import Tiles, tiles_of
from fusedcomm.engines.triton.launch import DTYPES, Launch, launches
from fusedcomm.kernels import all_gather_linear as gather_kernels
from fusedcomm.kernels import linear_all_reduce as all_reduce_kernels
from fusedcomm.kernels import linear_reduce_scatter as scatter_kernels
from fusedcomm.planning.tensor_parallel import Plan, exchange_space, scatter_space
from fusedcomm.schedule import reduce_order, successors

Bounds = list[tuple[int, int]]


def _blocks(extent: int, size: int) -> int:
    return -(-extent // size)


def _segments(bounds: Bounds, pieces: int, tile_rows: int) -> dict[str, int]:
    """How shards are cut into pieces, whole tiles each."""
    shard_rows = bounds[0][1]
    piece_rows = max(1, _blocks(_blocks(shard_rows, pieces), tile_rows)) * tile_rows
    return {"shard_rows": shard_rows, "piece_rows": piece_rows, "pieces": pieces}


def _strides(weight: Tensor, suffix: str = "") -> dict[str, int]:
    return {f"stride_wn{suffix}": weight.stride(0), f"stride_wk{suffix}": weight.stride(1)}


def _meta(tiles: Tiles, *depths: int) -> dict[str, object]:
    return {
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "GROUP": tiles.group,
        "EVEN_K": all(depth % tiles.depth == 0 for depth in depths),
        "PRECISION": "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _aligned(x: Tensor) -> Tensor:
    """x contiguous and on 16 bytes, as kernels read it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _send(launch: Launch, plan: Plan, x: Tensor, cut: dict[str, int]) -> None:
    """Send this rank's rows to all peers, by a kernel or by copy engine."""
    if plan.copies:
        _copy(launch, x, cut)
    else:
        _push(launch, x, cut)


def _copy(launch: Launch, x: Tensor, cut: dict[str, int]) -> None:
    """Copies run beside the launches that follow; ``launch.join`` ends that.

    Raises: ready[s][me][piece] on every peer, one after the other (``begin`` awaited consumed).
    """
    row_bytes = x.shape[1] * x.dtype.itemsize
    for peer in successors(launch.rank, launch.world_size):
        for piece in range(cut["pieces"]):
            start = min(piece * cut["piece_rows"], x.shape[0])
            rows = x[start : start + cut["piece_rows"]]
            launch.copy(peer, start * row_bytes, rows, piece)


def _push(launch: Launch, x: Tensor, cut: dict[str, int]) -> None:
    depth = 64
    rows = min(cut["piece_rows"], 64)
    programs = (launch.world_size - 1) * cut["pieces"] * _blocks(cut["piece_rows"], rows)
    if not programs:
        return
    launch.run(
        gather_kernels.push_kernel,
        programs,
        "copy",
        "push own rows",
        x=x,
        counters=launch.counters(launch.world_size * cut["pieces"]),
        rows=x.shape[0],
        piece_rows=cut["piece_rows"],
        pieces=cut["pieces"],
        K=x.shape[1],
        BM=rows,
        BK=depth,
        record=launch.record,
        **launch.ranks,
        **launch.flags,
    )


def _keep(launch: Launch, x: Tensor, bounds: Bounds, gathered: Tensor) -> None:
    """Copy the gathered rows out of the slot, behind a launch that awaited all of them."""
    for source, (start, stop) in enumerate(bounds):
        shape = (stop - start, x.shape[1])
        own = source == launch.rank
        workspace, slot = launch.workspace, launch.slot
        part = x if own else workspace.part(launch.rank, slot, source, shape, x.dtype)
        gathered[start:stop] = part


def all_gather_linear(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    bounds: Bounds,
    return_gathered: bool,
) -> list[Tensor]:
    op, total, features = "all_gather_linear", bounds[-1][1], x.shape[1]
    x = _aligned(x)
    ys = [x.new_empty(total, weight.shape[0]) for weight in weights]
    widest = max(weight.shape[0] for weight in weights)
    tiles = tiles_of(x.device, x.dtype, bounds[0][1], widest, features)
    cut = _segments(bounds, plan.pieces, tiles.rows)
    space = scatter_space(bounds, features * x.dtype.itemsize, plan.pieces)
    gathered = x.new_empty(total, features) if return_gathered else None
    with launches(comm, op, space, plan.text, x.device) as launch:
        _send(launch, plan, x, cut)
        for y, weight, bias in zip(ys, weights, biases, strict=True):
            launch.run(
                gather_kernels.consume_kernel,
                launch.programs,
                "gemm",
                "gathered rows",
                x=x,
                weight=weight,
                bias=y if bias is None else bias.contiguous(),
                y=y,
                total_rows=total,
                N=weight.shape[0],
                K=features,
                HAS_BIAS=bias is not None,
                **_strides(weight),
                **cut,
                **_meta(tiles, features),
                **launch.ranks,
                **launch.flags,
                **launch.waits,
            )
        if gathered is not None:
            kept = gathered
            launch.call(lambda: _keep(launch, x, bounds, kept))
        if plan.copies:
            launch.join()
    return ys if gathered is None else [*ys, gathered]


def _weight_grad(
    launch: Launch,
    x: Tensor,
    other: Tensor,
    grad: Tensor,
    strides: tuple[int, int],
    cut: dict[str, int],
    total: int,
) -> None:
    """``grad[n, k] = Σ_t other[t, n] · gathered(x)[t, k]``, stored with ``strides`` (n, k)."""
    rows, columns = other.shape[1], x.shape[1]
    tiles = tiles_of(x.device, x.dtype, rows, columns, cut["shard_rows"])
    launch.run(
        gather_kernels.weight_grad_kernel,
        _blocks(rows, tiles.rows) * _blocks(columns, tiles.columns),
        "gemm",
        "weight gradient",
        x=x,
        other=other,
        grad=grad,
        total_rows=total,
        N=rows,
        K=columns,
        stride_on=other.stride(1),
        stride_om=other.stride(0),
        stride_gn=strides[0],
        stride_gk=strides[1],
        BM=tiles.depth,
        BN=tiles.rows,
        BK=tiles.columns,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **cut,
        **launch.ranks,
        **launch.flags,
        **launch.waits,
    )


def all_gather_weight_grad(
    comm: Communicator, plan: Plan, x: Tensor, dys: list[Tensor], bounds: Bounds
) -> list[Tensor]:
    op, total, features = "all_gather_weight_grad", bounds[-1][1], x.shape[1]
    x = _aligned(x)
    grads = [dy.new_empty(dy.shape[1], features) for dy in dys]
    cut = _segments(bounds, plan.pieces, 64)
    space = scatter_space(bounds, features * x.dtype.itemsize, plan.pieces)
    with launches(comm, op, space, plan.text, x.device) as launch:
        _send(launch, plan, x, cut)
        for dy, grad in zip(dys, grads, strict=True):
            _weight_grad(launch, x, dy, grad, (features, 1), cut, total)
        if plan.copies:
            launch.join()
    return grads


def linear_reduce_scatter(
    comm: Communicator,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    op, features = "linear_reduce_scatter", weights[0].shape[0]
    space = scatter_space(bounds, features * wire.itemsize, plan.pieces)
    first, last = bounds[comm.rank]
    y = xs[0].new_empty(last - first, features)
    text = f"{plan.text}, bias {bias is not None}"
    with launches(comm, op, space, text, y.device) as launch:
        make = _produce_and_copy if plan.copies else _produce
        cut = make(launch, plan, xs, weights, init, bounds, wire)
        rows, columns = min(cut["piece_rows"], 32), 128
        launch.run(
            scatter_kernels.reduce_kernel,
            _blocks(y.shape[0], rows) * _blocks(features, columns),
            "reduce",
            "add the partials",
            bias=y if bias is None else bias.contiguous(),
            y=y,
            rows=y.shape[0],
            piece_rows=cut["piece_rows"],
            N=features,
            HAS_BIAS=bias is not None,
            WIRE=DTYPES[wire],
            BM=rows,
            BN=columns,
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
        if plan.copies:
            launch.join()
    return y


def _pairs(
    xs: list[Tensor], weights: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, int], tuple[int, ...]]:
    """One or two products as the kernels take them; more are joined along their inner dimension.

    Joining copies: it happens only in the backward pass of three or more weights on one gather.
    """
    if len(xs) > 2:
        xs, weights = [torch.cat(xs, 1)], [torch.cat(weights, 1)]
    xs = [_aligned(x) for x in xs]
    depths = tuple(x.shape[1] for x in xs)
    tensors = {"x0": xs[0], "weight0": weights[0], "x1": xs[-1], "weight1": weights[-1]}
    numbers = {
        "PAIRS": len(xs),
        "K0": depths[0],
        "K1": depths[-1],
        **_strides(weights[0], "0"),
        **_strides(weights[-1], "1"),
    }
    return tensors, numbers, depths


def _produce(
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
    tensors, numbers, depths = _pairs(xs, weights)
    x = tensors["x0"]
    tiles = tiles_of(x.device, x.dtype, bounds[0][1], features, max(depths))
    cut = _segments(bounds, plan.pieces, tiles.rows)
    launch.run(
        scatter_kernels.produce_kernel,
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
        **_meta(tiles, *depths),
        **launch.ranks,
        **launch.flags,
    )
    return cut


def _produce_and_copy(
    launch: Launch,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> dict[str, int]:
    """As ``_produce``, by the library's products, chunk by chunk; each is copied to its owner.

    Raises: ready[s][me][piece] on the owner.
    """
    features, rank = weights[0].shape[0], launch.rank
    cut = _segments(bounds, plan.pieces, 32)
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


def linear_reduce_scatter_backward(
    comm: Communicator,
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bounds: Bounds,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    op, total, features = "linear_reduce_scatter_backward", x.shape[0], dy.shape[1]
    dy = _aligned(dy)
    dx = x.new_empty(total, weight.shape[1])
    dw = weight.new_empty(weight.shape)
    tiles = tiles_of(dy.device, dy.dtype, bounds[0][1], weight.shape[1], features)
    cut = _segments(bounds, plan.pieces, tiles.rows)
    space = scatter_space(bounds, features * dy.dtype.itemsize, plan.pieces)
    gathered = dy.new_empty(total, features) if need_bias else None
    with launches(comm, op, space, plan.text, dy.device) as launch:
        _send(launch, plan, dy, cut)
        # Both kernels await every segment, so that what follows may read the slot.
        launch.run(
            gather_kernels.consume_kernel,
            launch.programs,
            "gemm",
            "input gradient",
            x=dy,
            weight=weight,
            bias=dx,
            y=dx,
            total_rows=total,
            N=weight.shape[1],
            K=features,
            HAS_BIAS=False,
            **_strides(weight.t()),
            **cut,
            **_meta(tiles, features),
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
        if need_weight:
            # grad[n, k] with n this rank's features of x: stored transposed.
            strides = (dw.stride(1), dw.stride(0))
            _weight_grad(launch, dy, x, dw, strides, cut, total)
        if gathered is not None:
            kept = gathered
            launch.call(lambda: _keep(launch, dy, bounds, kept))
        if plan.copies:
            launch.join()
    db = None
    if gathered is not None:
        wide = torch.promote_types(dy.dtype, torch.float32)
        db = gathered.sum(0, dtype=wide).to(dy.dtype)
    return dx if need_x else None, dw if need_weight else None, db


def linear_all_reduce(
    comm: Communicator,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    op, total, features = "linear_all_reduce", xs[0].shape[0], weights[0].shape[0]
    tensors, numbers, depths = _pairs(xs, weights)
    x = tensors["x0"]
    y = x.new_empty(total, features)
    tiles = tiles_of(x.device, x.dtype, min(total, 64), features, max(depths))
    count = _blocks(total, tiles.rows) * _blocks(features, tiles.columns)
    shots = 1 if plan.one_shot else 2
    widest = max(wire.itemsize, x.dtype.itemsize) if shots == 2 else wire.itemsize
    space = exchange_space(total, features, widest, comm.world_size, shots, count)
    kernel = (
        all_reduce_kernels.one_shot_kernel if shots == 1 else all_reduce_kernels.two_shot_kernel
    )
    text = f"{plan.text}, bias {bias is not None}"
    with launches(comm, op, space, text, y.device) as launch:
        launch.run_resident(
            kernel,
            min(count, launch.programs),
            "gemm",
            "partials, exchanged tile by tile",
            bias=y if bias is None else bias.contiguous(),
            y=y,
            M=total,
            N=features,
            HAS_BIAS=bias is not None,
            WIRE=DTYPES[wire],
            **tensors,
            **numbers,
            **_meta(tiles, *depths),
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
    return y
