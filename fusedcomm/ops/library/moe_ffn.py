"""Dispatch, experts and combine as one torch custom op; see ``library.moe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.engines.experts import Experts, Style
from fusedcomm.ops.library.effects import communicates
from fusedcomm.ops.library.moe import Where, _decide, _received, moe_weight_grad


@communicates
@torch.library.custom_op("fusedcomm::moe_ffn", mutates_args=())
def moe_ffn(
    x: Tensor,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    keep_rows: bool,
    keep_choices: bool,
    activation: str,
    layout: str,
    transposed: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
    sent: Tensor | None,
) -> list[Tensor]:
    """y ``[T, hidden]``, and what the backward pass needs, where it is kept.

    That is: the rows ``[received, hidden]``, z ``[received, width]``, and the finished rows by
    token and choice ``[T, k, hidden]``. ``sent`` is what ``moe_send`` returned, if it was called.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    run = _decide("moe_ffn", x, slot.shape[1], _text(x, weights, style), where)
    return run.engine.moe_ffn(
        run.comm,
        run.plan,
        x,
        weights,
        Experts(w13, w2, b13, b2, style),
        run.routed(table, order, slot),
        keep_rows,
        keep_choices,
        None if sent is None else int(sent),
    )


@communicates
@torch.library.custom_op("fusedcomm::moe_send", mutates_args=())
def moe_send(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """Begin a ``moe_ffn``: its rows set out. Returns what ends it, int64 ``[]`` in CPU memory."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    run = _decide("moe_send", x, slot.shape[1], f"{x.dtype} [{x.shape[1]}]", where)
    return torch.tensor(run.engine.moe_send(run.comm, run.plan, x, run.routed(table, order, slot)))


@moe_send.register_fake
def _(x, *rest):
    return torch.empty((), dtype=torch.int64, device="cpu")


def _text(x: Tensor, weights: Tensor | None, style: Style) -> str:
    weighted = "" if weights is None else " weighted"
    return f"{x.dtype} [{x.shape[1]}]{weighted} {style.activation}"


@moe_ffn.register_fake
def _(
    x, weights, w13, w2, b13, b2, table, order, slot, keep_rows, keep_choices,
    activation, layout, transposed, num_experts, owners, align, capacity, *where,
):  # fmt: skip
    (tokens, k), hidden = slot.shape, x.shape[1]
    width = w13.shape[2 if transposed else 1]
    rows = _received(capacity) if keep_rows else 0
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((rows, hidden) if keep_rows else (0,)),
        x.new_empty((rows, width) if keep_rows else (0,)),
        x.new_empty((tokens, k, hidden) if keep_choices else (0,)),
    ]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weights, w13, w2, b13, b2, *routing = inputs[:9]
    ctx.kept, ctx.style, ctx.where = bool(inputs[10]), inputs[11:14], inputs[14:22]
    ctx.present = [tensor is not None for tensor in (weights, b13, b2)]
    ctx.set_materialize_grads(False)
    optional = [tensor for tensor in (weights, b13, b2) if tensor is not None]
    ctx.save_for_backward(w13, w2, *routing, *output[1:], *optional)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    dy = grads[0]
    if dy is None:
        return (None,) * 23
    w13, w2, table, order, slot, rows, z, kept, *optional = ctx.saved_tensors
    present = iter(optional)
    weights, b13, b2 = (next(present) if there else None for there in ctx.present)
    needs = list(ctx.needs_input_grad[:6])
    d_weights = None
    if needs[1] and weights is not None:
        if not ctx.kept:
            kept = moe_ffn_choices(z, w13, w2, b13, b2, table, order, slot, *ctx.style, *ctx.where)
        d_weights = moe_weight_grad(kept, slot, dy, weights.dtype)
    found: list[Tensor | None] = [None] * 5
    wanted = [needs[0], *needs[2:]]
    if any(wanted):
        made = moe_ffn_grads(
            dy, weights, w13, w2, b13, b2, table, order, slot, rows, z, wanted,
            *ctx.style, *ctx.where,
        )  # fmt: skip
        found = [grad if needed else None for grad, needed in zip(made, wanted, strict=True)]
    dx, *d_experts = found
    return (dx, d_weights, *d_experts, *[None] * 17)


moe_ffn.register_autograd(_backward, setup_context=_setup)


@communicates
@torch.library.custom_op("fusedcomm::moe_ffn_grads", mutates_args=())
def moe_ffn_grads(
    dy: Tensor,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    rows: Tensor,
    z: Tensor,
    needs: Sequence[bool],
    activation: str,
    layout: str,
    transposed: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """dx and the gradients of w13, w2, b13 and b2; empty tensors for those not needed."""
    where: Where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    need_x, *others = needs
    # What a rank's own experts need is its own affair; whether rows come back is not.
    what = f"{_text(dy, weights, style)}, input gradient {need_x}"
    run = _decide("moe_ffn_backward", dy, slot.shape[1], what, where)
    found = run.engine.moe_ffn_backward(
        run.comm,
        run.plan,
        dy,
        weights,
        rows,
        z,
        Experts(w13, w2, b13, b2, style),
        run.routed(table, order, slot),
        need_x,
        others,
    )
    return [dy.new_empty(0) if grad is None else grad for grad in found]


@moe_ffn_grads.register_fake
def _(dy, weights, w13, w2, b13, b2, table, order, slot, rows, z, needs, *rest):
    like = [dy, w13, w2, b13, b2]
    return [
        dy.new_empty(tensor.shape if needed and tensor is not None else (0,))
        for tensor, needed in zip(like, needs, strict=True)
    ]


@communicates
@torch.library.custom_op("fusedcomm::moe_ffn_choices", mutates_args=())
def moe_ffn_choices(
    z: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    activation: str,
    layout: str,
    transposed: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """The finished rows by token and choice ``[T, k, hidden]``, made from z once more."""
    where: Where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    what = f"choices of {_text(z, None, style)}"
    run = _decide("moe_ffn_backward", z, slot.shape[1], what, where)
    experts = Experts(w13, w2, b13, b2, style)
    return run.engine.moe_ffn_choices(
        run.comm, run.plan, z, experts, run.routed(table, order, slot)
    )


@moe_ffn_choices.register_fake
def _(z, w13, w2, b13, b2, table, order, slot, activation, layout, transposed, *where):
    (tokens, k), hidden = slot.shape, w2.shape[2 if transposed else 1]
    return z.new_empty(tokens, k, hidden)
