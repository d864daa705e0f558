"""The mixture of experts on the Triton engine: rows pushed by kernels, products that await them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import Experts
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.activations import activate, activate_backward
from fusedcomm.engines.triton.arguments import blocks, meta
from fusedcomm.engines.triton.config import Tiles, tiles_of
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import Launch, launches
from fusedcomm.engines.triton.places import Places, Segments
from fusedcomm.engines.triton.routing import route
from fusedcomm.kernels import grouped_linear, moe_rows
from fusedcomm.planning.moe import Plan, returns_space, rows_space, table_text
from fusedcomm.protocol import Space

__all__ = [
    "combine",
    "dispatch",
    "moe_ffn",
    "moe_ffn_backward",
    "moe_ffn_choices",
    "moe_send",
    "route",
]

#: Rows and features that are moved at once.
_ROWS, _FEATURES = 16, 512


class Kept(NamedTuple):
    """Where a call is to put what it keeps, instead of into tensors of its own; None: not kept.

    Attributes:
        x, z: the experts' rows ``[received, hidden]``, and z ``[received, width]``.
        back: the finished rows ``[sent, hidden]`` as they came back, instead of by choice.
    """

    x: Tensor | None
    z: Tensor | None
    back: Tensor | None


def dispatch(
    comm: Communicator, plan: Plan, x: Tensor, scale: Tensor | None, routed: Routed
) -> Tensor:
    """This rank's rows ``[received, hidden]``; see the host engine."""
    result = x.new_empty(routed.received, x.shape[1])
    space = _rows(routed, x)
    with launches(comm, "dispatch", space, _text(plan, routed, x), x.device) as rows:
        places = Places(rows, routed)
        _push(rows, places, places.out, x.contiguous(), routed.tokens, scale)
        _await(rows, places)
        _take(rows, places, result)
    return result


def combine(
    comm: Communicator,
    plan: Plan,
    h: Tensor,
    weights: Tensor | None,
    routed: Routed,
    keep: bool,
    back: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sums of this rank's tokens, and the rows they are made of if ``keep``.

    Args:
        back: where to put these rows as they came back; see ``Kept``.
    """
    space = _returns(routed, h)
    with launches(comm, "combine", space, _text(plan, routed, h), h.device) as returns:
        places = Places(returns, routed)
        _push(returns, places, places.back, h.contiguous(), None, None)
        _await(returns, places)
        _take_back(returns, back)
        return _sum(returns, h, h.shape[1], weights, routed, keep)


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
    into: Kept | None = None,
) -> list[Tensor]:
    """y ``[T, hidden]``, and what the backward pass needs; see the host engine.

    Args:
        into: given instead of ``keep_rows`` and ``keep_choices``; then y is all that is returned.
    """
    hidden, total = x.shape[1], routed.received
    spaces = (_rows(routed, x), _returns(routed, x))
    kept_x = kept_z = back = None
    if into is not None:
        kept_x, kept_z, back = into
    elif keep_rows:
        kept_x, kept_z = x.new_empty(total, hidden), x.new_empty(total, experts.width)
    a = x.new_empty(total, experts.ffn)
    text = _text(plan, routed, x)
    with launches(comm, "moe_ffn", spaces[0], text, x.device, spaces[1]) as rows:
        (returns,) = rows.beside
        places = Places(rows, routed)
        _push(rows, places, places.out, x.contiguous(), routed.tokens, None)
        _up(rows, places, routed, experts, a, kept_z)
        _down(returns, places, routed, a, _down_weight(experts), experts.b2)
        _await(rows, places)
        if kept_x is not None:
            _take(rows, places, kept_x)
        _await(returns, places)
        _take_back(returns, back)
        y, kept = _sum(returns, x, hidden, weights, routed, keep_choices)
    if into is not None:
        return [y]
    return [y, *(x.new_empty(0) if t is None else t for t in (kept_x, kept_z)), kept]


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
    wide: bool = False,
) -> list[Tensor | None]:
    """From dy: dx, and the gradients of w13, w2, b13 and b2; see the host engine.

    Args:
        wide: the latter in float32, to be added to others.
    """
    hidden, total = dy.shape[1], z.shape[0]
    spaces = [_rows(routed, dy)]
    if need_x:
        spaces.append(_returns(routed, dy))
    up = experts.w13 if experts.style.transposed else experts.w13.transpose(1, 2)
    down = experts.w2 if experts.style.transposed else experts.w2.transpose(1, 2)
    da, dz = z.new_empty(total, experts.ffn), torch.empty_like(z)
    dx: Tensor | None = None
    text = _text(plan, routed, dy)
    with launches(comm, "moe_ffn_backward", spaces[0], text, dy.device, *spaces[1:]) as rows:
        places = Places(rows, routed)
        scale = routed.scale(weights)
        _push(rows, places, places.out, dy.contiguous(), routed.tokens, scale)
        _product(rows, places, routed, down, da)
        activate_backward(rows, places, z, da, experts.style, da, dz)
        if need_x:
            _down(rows.beside[0], places, routed, dz, up, None)
        _await(rows, places)
        # Read where they arrived: the slot is this call's until it ends.
        dh = rows.workspace.part(comm.rank, rows.slot, 0, (total, hidden), dy.dtype)
        grads = experts_grads(rows, places, dh, da, dz, x_rows, experts, needs, wide)
        if need_x:
            _await(rows.beside[0], places)
            dx, _ = _sum(rows.beside[0], dy, hidden, None, routed, False)
    return [dx, *grads]


def moe_ffn_choices(
    comm: Communicator,
    plan: Plan,
    z: Tensor,
    experts: Experts,
    routed: Routed,
    back: Tensor | None = None,
) -> Tensor:
    """The finished rows by token and choice ``[T, k, hidden]``, made from z once more.

    Args:
        back: where to put them as they came back instead; see ``Kept``.
    """
    a = z.new_empty(z.shape[0], experts.ffn)
    space = _space_of(returns_space, routed.most_sent_unread, routed, experts.hidden, z)
    text = _text(plan, routed, z)
    with launches(comm, "moe_ffn_backward", space, text, z.device) as returns:
        places = Places(returns, routed)
        activate(returns, places, z, experts.style, a)
        _down(returns, places, routed, a, _down_weight(experts), experts.b2)
        _await(returns, places)
        if back is not None:
            _take_back(returns, back)
            return back
        _, kept = _sum(returns, z, experts.hidden, None, routed, True)
    return kept


def _down_weight(experts: Experts) -> Tensor:
    """``[experts, hidden, ffn]``."""
    return experts.w2.transpose(1, 2) if experts.style.transposed else experts.w2


def _rows(routed: Routed, x: Tensor) -> Space:
    """The memory in which rows like those of x travel to the experts."""
    return _space_of(rows_space, routed.most_received, routed, x.shape[1], x)


def _returns(routed: Routed, x: Tensor) -> Space:
    """The memory in which rows like those of x travel back."""
    return _space_of(returns_space, routed.most_sent_unread, routed, x.shape[1], x)


def _space_of(kind: Any, rows: int, routed: Routed, hidden: int, like: Tensor) -> Space:
    return kind(rows, hidden * like.dtype.itemsize, routed.placement)


def _text(plan: Plan, routed: Routed, x: Tensor) -> str:
    """What must be equal on every rank; the table as well, where anybody may look at it."""
    if routed.terms.capacity is not None or x.device.type != "cpu":
        return plan.text
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
    """The experts' rows, and zeros between them."""
    _copy(launch, places.first_E, places.counts_E, out)


def _take_back(launch: Launch, out: Tensor | None) -> None:
    """All rows that came back, if there is anywhere to put them."""
    if out is None:
        return
    first = torch.zeros(1, dtype=torch.int64, device=out.device)
    _copy(launch, first, torch.full_like(first, out.shape[0]), out)


def _copy(launch: Launch, first_E: Tensor, counts_E: Tensor, out: Tensor) -> None:  # noqa: N803
    launch.run(
        moe_rows.take_kernel,
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


def _sum(
    launch: Launch,
    like: Tensor,
    hidden: int,
    weights: Tensor | None,
    routed: Routed,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The sums ``[T, hidden]``, in the dtype of ``like``, and the rows they are made of."""
    tokens, k = routed.slot.shape
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
    launch: Launch,
    places: Places,
    routed: Routed,
    weight: Tensor,
    gated: bool = False,
    paired: bool = False,
) -> Tiles:
    """Tiles for products with ``weight [experts, N, K]``, of the rows that an expert usually has.

    Args:
        gated, paired: as ``up_kernel`` has them.
    """
    rows = blocks(routed.most_received, max(1, places.experts))
    product = "large" if weight.stride(2) == 1 else "transposed"
    if gated:
        product = "gated transposed" if product == "transposed" and not paired else "epilogue"
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
        PAIRED=gated and interleaved,
        up_shift=experts.ffn,
    )  # fmt: skip


def _product(launch: Launch, places: Places, routed: Routed, weight: Tensor, out: Tensor) -> None:
    """``out = rows · weightᵀ``; weight ``[experts, N, K]``."""
    _launch_up(
        launch, places, routed, weight, None, out, None,
        ACTIVATION="none", GATED=False, PAIRED=False, up_shift=0,
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
    tiles = _grouped(launch, places, routed, weight, how["GATED"], how["PAIRED"])
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
