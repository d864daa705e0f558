"""The mixture of experts on the Triton engine: rows pushed by kernels, products that await them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import Experts, activate_backward
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.arguments import blocks, meta
from fusedcomm.engines.triton.collectives import all_gather
from fusedcomm.engines.triton.config import Tiles, tiles_of
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import Launch, launches
from fusedcomm.engines.triton.places import Places, Segments
from fusedcomm.kernels import grouped_linear, moe_rows
from fusedcomm.planning.moe import Plan, returns_space, rows_space, table_text

#: Rows and features that are moved at once.
_ROWS, _FEATURES = 16, 512


def exchange_counts(comm: Communicator, plan: Plan, counts: np.ndarray) -> np.ndarray:
    """The table ``[W, E]``, from every rank's own row ``[E]``; the host waits for it."""
    size, experts = comm.world_size, len(counts)
    own = torch.from_numpy(counts.astype(np.int64)).to(comm.device).view(1, experts)
    table = own.new_empty(1, size * experts)
    bounds = [(rank * experts, (rank + 1) * experts) for rank in range(size)]
    all_gather(comm, plan, own, table, bounds)  # type: ignore[arg-type]  # it needs the text alone
    return table.view(size, experts).cpu().numpy()


def dispatch(
    comm: Communicator, plan: Plan, x: Tensor, scale: Tensor | None, routed: Routed
) -> Tensor:
    """This rank's rows ``[received, hidden]``; see the host engine."""
    hidden = x.shape[1]
    places = Places(routed, comm.rank, x.device)
    result = x.new_empty(routed.received(comm.rank), hidden)
    space = rows_space(routed.terms, routed.layout, hidden * x.dtype.itemsize)
    with launches(comm, "dispatch", space, _text(plan, routed), x.device) as rows:
        _push(rows, places, places.out, x.contiguous(), routed.tokens, scale)
        _await(rows, places)
        _take(rows, places, result)
    return result


def combine(
    comm: Communicator, plan: Plan, h: Tensor, weights: Tensor | None, routed: Routed, keep: bool
) -> tuple[Tensor, Tensor]:
    """The weighted sums of this rank's tokens, and the rows they are made of if ``keep``."""
    hidden = h.shape[1]
    places = Places(routed, comm.rank, h.device)
    space = returns_space(routed.terms, routed.layout, hidden * h.dtype.itemsize)
    with launches(comm, "combine", space, _text(plan, routed), h.device) as returns:
        _push(returns, places, places.back, h.contiguous(), None, None)
        _await(returns, places)
        return _sum(returns, h, weights, routed, keep)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, routed: Routed) -> int:
    """Nothing sets out early here: rows and products are launched together, and a product awaits
    its rows on the device. What is to run beside them goes on a stream of its own."""
    return -1


def moe_ffn(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: Tensor | None,
    experts: Experts,
    routed: Routed,
    keep_rows: bool,
    keep_choices: bool,
    sent: int | None = None,
) -> list[Tensor]:
    """y ``[T, hidden]``, and what the backward pass needs; see the host engine."""
    hidden, total = x.shape[1], routed.received(comm.rank)
    places = Places(routed, comm.rank, x.device)
    row_bytes = hidden * x.dtype.itemsize
    spaces = (
        rows_space(routed.terms, routed.layout, row_bytes),
        returns_space(routed.terms, routed.layout, row_bytes),
    )
    kept_x = x.new_empty((total, hidden) if keep_rows else (0,))
    kept_z = x.new_empty((total, experts.width) if keep_rows else (0,))
    a = x.new_empty(total, experts.ffn)
    text = _text(plan, routed)
    with launches(comm, "moe_ffn", spaces[0], text, x.device, spaces[1]) as rows:
        (returns,) = rows.beside
        _push(rows, places, places.out, x.contiguous(), routed.tokens, None)
        _up(rows, places, routed, experts, a, kept_z if keep_rows else None)
        down = experts.w2.transpose(1, 2) if experts.style.transposed else experts.w2
        _down(returns, places, routed, a, down, experts.b2)
        _await(rows, places)
        if keep_rows:
            _take(rows, places, kept_x)
        _await(returns, places)
        y, kept = _sum(returns, x, weights, routed, keep_choices)
    return [y, kept_x, kept_z, kept]


def moe_ffn_backward(
    comm: Communicator,
    plan: Plan,
    dy: Tensor,
    weights: Tensor | None,
    x_rows: Tensor,
    z: Tensor,
    experts: Experts,
    routed: Routed,
    need_x: bool,
    needs: list[bool],
) -> list[Tensor | None]:
    """From dy: dx, and the gradients of w13, w2, b13 and b2; see the host engine."""
    hidden, total = dy.shape[1], z.shape[0]
    places = Places(routed, comm.rank, dy.device)
    row_bytes = hidden * dy.dtype.itemsize
    spaces = [rows_space(routed.terms, routed.layout, row_bytes)]
    if need_x:
        spaces.append(returns_space(routed.terms, routed.layout, row_bytes))
    up = experts.w13 if experts.style.transposed else experts.w13.transpose(1, 2)
    down = experts.w2 if experts.style.transposed else experts.w2.transpose(1, 2)
    da, dz = z.new_empty(total, experts.ffn), torch.empty_like(z)
    dx: Tensor | None = None
    text = _text(plan, routed)
    with launches(comm, "moe_ffn_backward", spaces[0], text, dy.device, *spaces[1:]) as rows:
        scale = routed.scale(weights)
        _push(rows, places, places.out, dy.contiguous(), routed.tokens, scale)
        _product(rows, places, routed, down, da)
        rows.call(lambda: activate_backward(z, da, experts.style, da, dz))
        if need_x:
            _down(rows.beside[0], places, routed, dz, up, None)
        _await(rows, places)
        # Read where they arrived: the slot is this call's until it ends.
        dh = rows.workspace.part(comm.rank, rows.slot, 0, (total, hidden), dy.dtype)
        grads = experts_grads(rows, places, dh, da, dz, x_rows, experts, needs)
        if need_x:
            _await(rows.beside[0], places)
            dx, _ = _sum(rows.beside[0], dy, None, routed, False)
    return [dx, *grads]


def _text(plan: Plan, routed: Routed) -> str:
    return f"{plan.text}, {table_text(routed.layout)}"


def _push(
    launch: Launch,
    places: Places,
    segments: Segments,
    data: Tensor,
    index: Tensor | None,
    scale: Tensor | None,
) -> None:
    launch.run(
        moe_rows.push_rows_kernel,
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


def _await(launch: Launch, places: Places) -> None:
    flags = {name: launch.flags[name] for name in ("epoch_word", "ready_word", "chunks")}
    launch.run(
        moe_rows.await_kernel,
        1,
        "wait",
        "wait for all rows",
        closing=places.closing,
        num_warps=1,
        **flags,
        **launch.ranks,
        **launch.waits,
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


def _take(launch: Launch, places: Places, out: Tensor) -> None:
    launch.run(
        moe_rows.take_kernel,
        blocks(out.shape[0], _ROWS),
        "copy",
        "take rows",
        out=out,
        first_E=places.first_E,
        counts_E=places.counts_E,
        experts=places.experts,
        rows=out.shape[0],
        hidden=out.shape[1],
        BM=_ROWS,
        BN=_FEATURES,
        **_memory(launch),
    )


def _sum(
    launch: Launch, like: Tensor, weights: Tensor | None, routed: Routed, keep: bool
) -> tuple[Tensor, Tensor]:
    (tokens, k), hidden = routed.slot.shape, like.shape[1]
    y = like.new_empty(tokens, hidden)
    kept = like.new_empty((tokens, k, hidden) if keep else (0,))
    launch.run(
        moe_rows.sum_kernel,
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


def _grouped(
    launch: Launch, places: Places, routed: Routed, weight: Tensor, gated: bool = False
) -> Tiles:
    """Tiles for products with ``weight [experts, N, K]``, of the rows that an expert usually has.

    Args:
        gated: whether a tile has two sums.
    """
    received = int(routed.layout.received.max())
    rows = blocks(received, max(1, places.experts))
    product = "epilogue" if gated else "large" if weight.stride(2) == 1 else "transposed"
    _, columns, depth = weight.shape
    return tiles_of(launch.device, weight.dtype, rows, columns, depth, product)


def _up(
    launch: Launch,
    places: Places,
    routed: Routed,
    experts: Experts,
    a: Tensor,
    z: Tensor | None,
) -> None:
    """``z = rows · w13ᵀ + b13`` where z is kept, and ``a = activation(z)``."""
    w13 = experts.w13.transpose(1, 2) if experts.style.transposed else experts.w13
    gated = experts.width != experts.ffn
    interleaved = experts.style.layout == "interleaved"
    _launch_up(
        launch, places, routed, w13, experts.b13, a, z,
        ACTIVATION=experts.style.activation,
        GATED=gated,
        gate_step=2 if gated and interleaved else 1,
        up_shift=1 if interleaved else experts.ffn,
    )  # fmt: skip


def _product(launch: Launch, places: Places, routed: Routed, weight: Tensor, out: Tensor) -> None:
    """``out = rows · weightᵀ``; weight ``[experts, N, K]``."""
    _launch_up(
        launch, places, routed, weight, None, out, None,
        ACTIVATION="none", GATED=False, gate_step=1, up_shift=0,
    )  # fmt: skip


def _launch_up(
    launch: Launch,
    places: Places,
    routed: Routed,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    z: Tensor | None,
    **how: Any,
) -> None:
    tiles = _grouped(launch, places, routed, weight, how["GATED"])
    launch.run(
        grouped_linear.up_kernel,
        launch.programs,
        "gemm",
        "experts, up",
        weight=weight,
        bias=a if bias is None else bias.contiguous(),
        z=a if z is None else z,
        a=a,
        N=a.shape[1],
        K=weight.shape[2],
        stride_we=weight.stride(0),
        stride_wn=weight.stride(1),
        stride_wk=weight.stride(2),
        KEEP=z is not None,
        HAS_BIAS=bias is not None,
        **how,
        **meta(tiles, weight.shape[2]),
        **places.arguments(),
        **launch.ranks,
        **launch.flags,
        **launch.waits,
    )


def _down(
    launch: Launch,
    places: Places,
    routed: Routed,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> None:
    """``x · weightᵀ + bias``, back to the sources; weight ``[experts, N, K]``."""
    tiles = _grouped(launch, places, routed, weight)
    launch.run(
        grouped_linear.down_kernel,
        launch.programs,
        "gemm",
        "experts, down",
        x=x,
        weight=weight,
        bias=x if bias is None else bias.contiguous(),
        back_WE=places.back_WE,
        tiles_W=places.row_blocks(tiles.rows),
        counters=launch.counters(launch.world_size),
        closing=places.closing,
        N=weight.shape[1],
        K=weight.shape[2],
        stride_we=weight.stride(0),
        stride_wn=weight.stride(1),
        stride_wk=weight.stride(2),
        record=launch.record,
        HAS_BIAS=bias is not None,
        **meta(tiles, weight.shape[2]),
        **places.arguments(),
        **launch.ranks,
        **launch.flags,
    )
