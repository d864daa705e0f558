"""The mixture of experts as torch custom ops: shapes for tracing, and their gradients.

A routing is four tensors: ``table`` int64 ``[W, E]``, ``order`` int64 ``[T * k]`` and ``slot``
int64 ``[T, k]`` (see ``planning.routing``), and ``relayed``, int32 in CPU memory: what this rank
knows of other domains' choices (see ``engines.relays``), or nothing. The table lies where the ids
are or, without ``capacity``, in CPU memory, since sizes then depend on it. With a routing, dispatch
and combine are each other's gradient, and nothing is counted again:

============ ============================== =======================================
op           gradient of its rows           gradient of the weights
============ ============================== =======================================
moe_dispatch dx = combine(d rows)
moe_combine  dh = dispatch(dy, weighted)    ⟨dy[t], row of (t, j)⟩, of rows kept or sent again
moe_ffn      both, with the experts between the same
============ ============================== =======================================

The rows that are kept for the weights' gradient lie where they are added up: ``[T, k, hidden]`` on
the tokens' rank, or, over several domains, ``[carried, hidden]`` on those that carry them.

A rank's y depends on its x through other ranks' experts, also where its own have no rows: then
nothing that autograd could see leads from d.x to h. So dispatch returns an **anchor** as well, an
empty tensor that combine takes in, and every rank takes part in every backward pass.

Rows of a token are added in float32 and rounded once. Sizes are static with ``capacity``; without
it the number of rows is data and unknown to a compiler. Ops with several results return lists: up
to torch 2.13 Inductor does not find the unknown sizes of an ordered effect that returns a tuple.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.routing import table_device
from fusedcomm.ops.library.effects import communicates
from fusedcomm.ops.library.moe_call import decide, kept_rows, ranks_of, received, said, weight_grad
from fusedcomm.planning.moe import Terms, is_across


@communicates
@torch.library.custom_op("fusedcomm::moe_route", mutates_args=())
def moe_route(
    ids: Tensor,
    overflow: str,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """The routing of ids ``[T, k]``, agreed on by all ranks.

    Returns:
        table, order, slot, relayed; offs, counts and padded counts, int32 ``[E_local]``; dropped,
        int64 ``[]``, this rank's choices that found no room.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    run = decide("dispatch", ids, ids.shape[1], f"counts, overflow {overflow}", where)
    call = (run.comm, run.plan, run.terms)
    table, order, slot, *rest = run.engine.route(*call, ids, overflow)
    relayed = torch.empty(0, dtype=torch.int32)
    if run.plan.across:
        relayed = run.engine.exchange_choices(*call, table, slot)
    return [table, order, slot, relayed, *rest]


@moe_route.register_fake
def _(ids, overflow, num_experts, owners, align, capacity, max_tokens, group, channel, engine):
    comm = Communicator.named(group, channel)
    terms = Terms(num_experts, ids.shape[1], ranks_of(owners), align, capacity, max_tokens)
    local = len(terms.placement(comm.world_size).experts[comm.rank])
    size = (comm.world_size, num_experts)
    across = is_across(comm, ids.device, ids.dtype, engine)
    relayed = torch.library.get_ctx().new_dynamic_size() if across else 0
    return [
        torch.empty(size, dtype=torch.int64, device=table_device(ids.device, capacity)),
        ids.new_empty(ids.shape[0] * ids.shape[1], dtype=torch.int64),
        ids.new_empty(ids.shape, dtype=torch.int64),
        torch.empty(relayed, dtype=torch.int32, device="cpu"),
        *(ids.new_empty(local, dtype=torch.int32) for _ in range(3)),
        ids.new_empty((), dtype=torch.int64),
    ]


@communicates
@torch.library.custom_op("fusedcomm::moe_dispatch", mutates_args=())
def moe_dispatch(
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
) -> list[Tensor]:
    """This rank's rows ``[received, hidden]`` of all ranks' tokens ``[T, hidden]``; the anchor."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    run = decide("dispatch", x, slot.shape[1], f"{x.dtype} [{x.shape[1]}]", where)
    routed = run.routed(table, order, slot, relayed)
    return [run.engine.dispatch(run.comm, run.plan, x, None, routed), x.new_empty(0)]


@moe_dispatch.register_fake
def _(x, table, order, slot, relayed, num_experts, owners, align, capacity, *where):
    return [x.new_empty(received(capacity), x.shape[1]), x.new_empty(0)]


def _dispatch_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, *routing = inputs[:5]
    ctx.where = inputs[5:]
    ctx.save_for_backward(*routing)


def _dispatch_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    dx, _ = moe_combine(grads[0], None, None, *ctx.saved_tensors, False, *ctx.where)
    return (dx, *[None] * 12)


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


@communicates
@torch.library.custom_op("fusedcomm::moe_combine", mutates_args=())
def moe_combine(
    h: Tensor,
    weights: Tensor | None,
    anchor: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    relayed: Tensor,
    keep: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """``y[t] = Σ_j weights[t, j] · row of (t, j)``, and these rows if kept (see above).

    They are h's rows ``[received, hidden]`` of all ranks.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    run = decide("combine", h, slot.shape[1], f"{h.dtype} [{h.shape[1]}]{said(weights)}", where)
    routed = run.routed(table, order, slot, relayed)
    return [*run.engine.combine(run.comm, run.plan, h, weights, routed, keep)]


@moe_combine.register_fake
def _(h, weights, anchor, table, order, slot, relayed, keep, *where):
    return [h.new_empty(slot.shape[0], h.shape[1]), kept_rows(h, slot, h.shape[1], keep, where)]


def _combine_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    h, weights, anchor, *routing = inputs[:7]
    ctx.rows, ctx.where = h.shape[0], inputs[8:]
    ctx.anchored = None if anchor is None else anchor.dtype
    ctx.kept = bool(inputs[7])
    ctx.set_materialize_grads(False)
    weighted = [] if weights is None else [weights]
    if ctx.needs_input_grad[1]:
        weighted.append(output[1] if ctx.kept else h)
    ctx.save_for_backward(*routing, *weighted)


def _combine_backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    dy = grads[0]
    *routing, weights, kept = [*ctx.saved_tensors, None, None][:6]
    need_h, need_weights, need_anchor = ctx.needs_input_grad[:3]
    dh = d_weights = d_anchor = None
    if dy is not None and any(ctx.needs_input_grad[:3]):
        if need_weights and not ctx.kept:
            kept = moe_choices(kept, *routing, *ctx.where)
        dh, d_weights = moe_combine_grads(
            dy, weights, kept, *routing, ctx.rows, need_h or need_anchor, *ctx.where
        )
        if need_anchor and ctx.anchored is not None:
            d_anchor = dy.new_zeros(0, dtype=ctx.anchored)
    return (
        dh if need_h else None,
        d_weights if need_weights else None,
        d_anchor,
        *[None] * 13,
    )


moe_combine.register_autograd(_combine_backward, setup_context=_combine_setup)


@communicates
@torch.library.custom_op("fusedcomm::moe_combine_grads", mutates_args=())
def moe_combine_grads(
    dy: Tensor,
    weights: Tensor | None,
    kept: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    relayed: Tensor,
    rows: int,
    need_h: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """From dy: the gradients of h ``[rows, hidden]`` if needed, of the weights if ``kept``."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    what = f"{dy.dtype} [{dy.shape[1]}]{said(weights)}"
    run = decide("dispatch", dy, slot.shape[1], what, where)
    routed = run.routed(table, order, slot, relayed)
    if run.plan.across:
        grads = run.engine.combine_backward(run.comm, run.plan, dy, weights, kept, routed, need_h)
    else:
        dh = None
        if need_h:
            dh = run.engine.dispatch(run.comm, run.plan, dy, routed.scale(weights), routed)
        grads = dh, weight_grad(dy, weights, kept, slot)
    dh, d_weights = (dy.new_empty(0) if grad is None else grad for grad in grads)
    return dh, d_weights


@moe_combine_grads.register_fake
def _(dy, weights, kept, table, order, slot, relayed, rows, need_h, *where):
    dh = dy.new_empty((rows, dy.shape[1]) if need_h else (0,))
    return dh, dy.new_empty(0) if kept is None else torch.empty_like(weights)


@communicates
@torch.library.custom_op("fusedcomm::moe_choices", mutates_args=())
def moe_choices(
    h: Tensor,
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
    """The rows that ``moe_combine`` keeps, sent once more."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    what = f"choices of {h.dtype} [{h.shape[1]}]"
    run = decide("combine", h, slot.shape[1], what, where)
    routed = run.routed(table, order, slot, relayed)
    if run.plan.across:
        return run.engine.choices(run.comm, run.plan, h, routed)
    return run.engine.combine(run.comm, run.plan, h, None, routed, True)[1]


@moe_choices.register_fake
def _(h, table, order, slot, relayed, *where):
    return kept_rows(h, slot, h.shape[1], True, where)
