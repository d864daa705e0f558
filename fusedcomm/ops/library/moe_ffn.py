"""Dispatch, experts and combine as one torch custom op; see ``library.moe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.engines.experts import Experts, Style
from fusedcomm.ops.library.effects import communicates
from fusedcomm.ops.library.moe_call import Where, decide, kept_rows, received, said, weight_grad


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
    relayed: Tensor,
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

    That is: the rows ``[received, hidden]``, z ``[received, width]``, and the finished rows, as in
    ``moe_combine``. ``sent`` is what ``moe_send`` returned, if it was called.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    run = decide("moe_ffn", x, slot.shape[1], _text(x, weights, style), where)
    return run.engine.moe_ffn(
        run.comm,
        run.plan,
        x,
        weights,
        Experts(w13, w2, b13, b2, style),
        run.routed(table, order, slot, relayed),
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
    relayed: Tensor,
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
    run = decide("moe_send", x, slot.shape[1], f"{x.dtype} [{x.shape[1]}]", where)
    return torch.tensor(
        run.engine.moe_send(run.comm, run.plan, x, run.routed(table, order, slot, relayed))
    )


@moe_send.register_fake
def _(x, *rest):
    return torch.empty((), dtype=torch.int64, device="cpu")


def _text(x: Tensor, weights: Tensor | None, style: Style) -> str:
    return f"{x.dtype} [{x.shape[1]}]{said(weights)} {style.activation}"


@moe_ffn.register_fake
def _(
    x, weights, w13, w2, b13, b2, table, order, slot, relayed, keep_rows, keep_choices,
    activation, layout, transposed, num_experts, owners, align, capacity, *where,
):  # fmt: skip
    hidden = x.shape[1]
    width = w13.shape[2 if transposed else 1]
    rows = received(capacity) if keep_rows else 0
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((rows, hidden) if keep_rows else (0,)),
        x.new_empty((rows, width) if keep_rows else (0,)),
        kept_rows(x, slot, hidden, keep_choices, where[:-1]),
    ]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weights, w13, w2, b13, b2, *routing = inputs[:10]
    ctx.kept, ctx.style, ctx.where = bool(inputs[11]), inputs[12:15], inputs[15:23]
    ctx.present = [tensor is not None for tensor in (weights, b13, b2)]
    ctx.set_materialize_grads(False)
    optional = [tensor for tensor in (weights, b13, b2) if tensor is not None]
    ctx.save_for_backward(w13, w2, *routing, *output[1:], *optional)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    dy, needs = grads[0], list(ctx.needs_input_grad[:6])
    if dy is None or not any(needs):
        return (None,) * 24
    w13, w2, table, order, slot, relayed, rows, z, kept, *optional = ctx.saved_tensors
    present = iter(optional)
    weights, b13, b2 = (next(present) if there else None for there in ctx.present)
    routing = (table, order, slot, relayed)
    if not needs[1]:
        kept = None
    elif not ctx.kept:
        kept = moe_ffn_choices(z, w13, w2, b13, b2, *routing, *ctx.style, *ctx.where)
    made = moe_ffn_grads(
        dy, weights, w13, w2, b13, b2, *routing, rows, z, kept, needs, *ctx.style, *ctx.where
    )
    found = [grad if needed else None for grad, needed in zip(made, needs, strict=True)]
    return (*found, *[None] * 18)


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
    relayed: Tensor,
    rows: Tensor,
    z: Tensor,
    kept: Tensor | None,
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
    """The gradients of x, weights, w13, w2, b13 and b2; empty tensors for those not needed.

    ``kept`` is given if the weights' is.
    """
    where: Where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    need_x, _, *others = needs
    # What a rank's own experts need is its own affair; whether rows come back is not.
    what = f"{_text(dy, weights, style)}, input gradient {need_x}"
    run = decide("moe_ffn_backward", dy, slot.shape[1], what, where)
    routed = run.routed(table, order, slot, relayed)
    exchange = (run.comm, run.plan, dy, weights, rows, z, Experts(w13, w2, b13, b2, style), routed)
    if run.plan.across:
        found = run.engine.moe_ffn_backward(*exchange, kept, need_x, others)
    else:
        found = [None] * 5
        if need_x or any(others):
            found = run.engine.moe_ffn_backward(*exchange, need_x, others)
        found = [found[0], weight_grad(dy, weights, kept, slot), *found[1:]]
    return [dy.new_empty(0) if grad is None else grad for grad in found]


@moe_ffn_grads.register_fake
def _(dy, weights, w13, w2, b13, b2, table, order, slot, relayed, rows, z, kept, needs, *rest):
    like = [dy, weights, w13, w2, b13, b2]
    return [
        tensor.new_empty(tensor.shape) if needed and tensor is not None else dy.new_empty(0)
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
    relayed: Tensor,
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
    """The finished rows that ``moe_ffn`` keeps for the weights' gradient, from z once more."""
    where: Where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    style = Style(activation, layout, transposed)
    what = f"choices of {_text(z, None, style)}"
    run = decide("moe_ffn_backward", z, slot.shape[1], what, where)
    experts = Experts(w13, w2, b13, b2, style)
    return run.engine.moe_ffn_choices(
        run.comm, run.plan, z, experts, run.routed(table, order, slot, relayed)
    )


@moe_ffn_choices.register_fake
def _(z, w13, w2, b13, b2, table, order, slot, relayed, activation, layout, transposed, *where):
    return kept_rows(z, slot, w2.shape[2 if transposed else 1], True, where)
