"""The mixture of experts on the Triton engine: rows pushed by kernels, products that await them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import Experts
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.activations import activate, activate_backward
from fusedcomm.engines.triton.experts import down_product, grouped_product, up_product
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import launches
from fusedcomm.engines.triton.places import Places
from fusedcomm.engines.triton.routing import route
from fusedcomm.engines.triton.rows import (
    add_choices,
    await_rows,
    push_rows,
    take_back,
    take_rows,
)
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
        push_rows(rows, places, places.out, x.contiguous(), routed.tokens, scale)
        await_rows(rows, places)
        take_rows(rows, places, result)
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
        push_rows(returns, places, places.back, h.contiguous(), None, None)
        await_rows(returns, places)
        take_back(returns, back)
        return add_choices(returns, h, h.shape[1], weights, routed, keep)


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
        push_rows(rows, places, places.out, x.contiguous(), routed.tokens, None)
        up_product(rows, places, routed, experts, a, kept_z)
        down_product(returns, places, routed, a, _down_weight(experts), experts.b2)
        await_rows(rows, places)
        if kept_x is not None:
            take_rows(rows, places, kept_x)
        await_rows(returns, places)
        take_back(returns, back)
        y, kept = add_choices(returns, x, hidden, weights, routed, keep_choices)
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
        push_rows(rows, places, places.out, dy.contiguous(), routed.tokens, scale)
        grouped_product(rows, places, routed, down, da)
        activate_backward(rows, places, z, da, experts.style, da, dz)
        if need_x:
            down_product(rows.beside[0], places, routed, dz, up, None)
        await_rows(rows, places)
        # Read where they arrived: the slot is this call's until it ends.
        dh = rows.workspace.part(comm.rank, rows.slot, 0, (total, hidden), dy.dtype)
        grads = experts_grads(rows, places, dh, da, dz, x_rows, experts, needs, wide)
        if need_x:
            await_rows(rows.beside[0], places)
            dx, _ = add_choices(rows.beside[0], dy, hidden, None, routed, False)
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
        down_product(returns, places, routed, a, _down_weight(experts), experts.b2)
        await_rows(returns, places)
        if back is not None:
            take_back(returns, back)
            return back
        _, kept = add_choices(returns, z, experts.hidden, None, routed, True)
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
