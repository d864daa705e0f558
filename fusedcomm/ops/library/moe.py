"""The mixture of experts as torch custom ops: shapes for tracing, and their gradients.

A routing is three tensors: ``table`` int64 ``[W, E]``, ``order`` int64 ``[T * k]`` and ``slot``
int64 ``[T, k]``; see ``planning.routing``. The table lies where the ids are or, without
``capacity``, in CPU memory, since sizes then depend on it. With a routing, dispatch and combine are
each other's gradient, and nothing is counted again:

============ ============================== =======================================
op           gradient of its rows           gradient of the weights
============ ============================== =======================================
moe_dispatch dx = combine(d rows)
moe_combine  dh = dispatch(dy, weighted)    ⟨dy[t], row of (t, j)⟩, of rows kept or sent again
moe_ffn      both, with the experts between the same
============ ============================== =======================================

A rank's y depends on its x through other ranks' experts, also where its own have no rows: then
nothing that autograd could see leads from d.x to h. So dispatch returns an **anchor** as well, an
empty tensor that combine takes in, and every rank takes part in every backward pass.

Rows of a token are added in float32 and rounded once. Sizes are static with ``capacity``; without
it the number of rows is data and unknown to a compiler.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.engines.choices import dot_choices
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.routing import table_device
from fusedcomm.ops.library.effects import communicates
from fusedcomm.planning.moe import Plan, Terms, plan

#: num_experts, owners (ranks, blanks between them, or ""), align, capacity, max_tokens, group,
#: channel, engine. (A list would have to be answered by a list in every backward pass.)
Where = tuple[int, str, int, int | None, int | None, str, str, str]


class _Run(NamedTuple):
    """One call, decided: who, how, and under which terms."""

    comm: Communicator
    plan: Plan
    terms: Terms
    engine: ModuleType

    def routed(self, table: Tensor, order: Tensor, slot: Tensor) -> Routed:
        comm = self.comm
        return Routed(self.terms, comm.rank, comm.world_size, table, order, slot)


def _ranks(owners: str) -> tuple[int, ...]:
    return tuple(map(int, owners.split()))


def _decide(op: str, like: Tensor, top_k: int, what: str, where: Where) -> _Run:
    num_experts, owners, align, capacity, max_tokens, group, channel, engine = where
    comm = Communicator.named(group, channel)
    if comm.calls.aside and op != "moe_ffn":
        raise ValueError(
            f"{op} on a channel where a moe_ffn is under way: what runs beside it must use another "
            "channel"
        )
    terms = Terms(num_experts, top_k, _ranks(owners), align, capacity, max_tokens)
    chosen = plan(comm, op, terms, device=like.device, dtype=like.dtype, what=what, engine=engine)
    return _Run(comm, chosen, terms, operations_of(chosen.engine, "moe"))


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The routing of ids ``[T, k]``, agreed on by all ranks.

    Returns:
        table, order, slot; offs, counts and padded counts, int32 ``[E_local]``; dropped, int64
        ``[]``, this rank's choices that found no room.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    run = _decide("dispatch", ids, ids.shape[1], f"counts, overflow {overflow}", where)
    return run.engine.route(run.comm, run.plan, run.terms, ids, overflow)


@moe_route.register_fake
def _(ids, overflow, num_experts, owners, align, capacity, max_tokens, group, channel, engine):
    comm = Communicator.named(group, channel)
    terms = Terms(num_experts, ids.shape[1], _ranks(owners), align, capacity, max_tokens)
    local = len(terms.placement(comm.world_size).experts[comm.rank])
    size = (comm.world_size, num_experts)
    return (
        torch.empty(size, dtype=torch.int64, device=table_device(ids.device, capacity)),
        ids.new_empty(ids.shape[0] * ids.shape[1], dtype=torch.int64),
        ids.new_empty(ids.shape, dtype=torch.int64),
        *(ids.new_empty(local, dtype=torch.int32) for _ in range(3)),
        ids.new_empty((), dtype=torch.int64),
    )


def _received(capacity: int | None) -> Any:
    return torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity


@communicates
@torch.library.custom_op("fusedcomm::moe_dispatch", mutates_args=())
def moe_dispatch(
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
) -> tuple[Tensor, Tensor]:
    """This rank's rows ``[received, hidden]`` of all ranks' tokens ``[T, hidden]``; the anchor."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    return _dispatch(x, None, table, order, slot, where), x.new_empty(0)


def _dispatch(
    x: Tensor, weights: Tensor | None, table: Tensor, order: Tensor, slot: Tensor, where: Where
) -> Tensor:
    weighted = "" if weights is None else " weighted"
    what = f"{x.dtype} [{x.shape[1]}]{weighted}"
    run = _decide("dispatch", x, slot.shape[1], what, where)
    routed = run.routed(table, order, slot)
    return run.engine.dispatch(run.comm, run.plan, x, routed.scale(weights), routed)


@moe_dispatch.register_fake
def _(x, table, order, slot, num_experts, owners, align, capacity, *where):
    return x.new_empty(_received(capacity), x.shape[1]), x.new_empty(0)


def _dispatch_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, *routing = inputs[:4]
    ctx.where = inputs[4:]
    ctx.save_for_backward(*routing)


def _dispatch_backward(ctx: Any, d_rows: Tensor, _: Tensor) -> tuple:
    dx, _ = moe_combine(d_rows, None, None, *ctx.saved_tensors, False, *ctx.where)
    return (dx, *[None] * 11)


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


@communicates
@torch.library.custom_op("fusedcomm::moe_dispatch_weighted", mutates_args=())
def moe_dispatch_weighted(
    x: Tensor,
    weights: Tensor,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    rows: int,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """``moe_dispatch`` of every choice's ``weights[t, j] · x[t]``; ``rows`` come of it."""
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    return _dispatch(x, weights, table, order, slot, where)


@moe_dispatch_weighted.register_fake
def _(x, weights, table, order, slot, rows, *where):
    return x.new_empty(rows, x.shape[1])


@communicates
@torch.library.custom_op("fusedcomm::moe_combine", mutates_args=())
def moe_combine(
    h: Tensor,
    weights: Tensor | None,
    anchor: Tensor | None,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    keep: bool,
    num_experts: int,
    owners: str,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    group: str,
    channel: str,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """``y[t] = Σ_j weights[t, j] · row of (t, j)``, and these rows ``[T, k, hidden]`` if kept.

    They are h's rows ``[received, hidden]`` of all ranks.
    """
    where = (num_experts, owners, align, capacity, max_tokens, group, channel, engine)
    weighted = "" if weights is None else " weighted"
    run = _decide("combine", h, slot.shape[1], f"{h.dtype} [{h.shape[1]}]{weighted}", where)
    routed = run.routed(table, order, slot)
    return run.engine.combine(run.comm, run.plan, h, weights, routed, keep)


@moe_combine.register_fake
def _(h, weights, anchor, table, order, slot, keep, *where):
    (tokens, k), hidden = slot.shape, h.shape[1]
    return h.new_empty(tokens, hidden), h.new_empty((tokens, k, hidden) if keep else (0,))


def _combine_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    h, weights, anchor, *routing = inputs[:6]
    ctx.rows, ctx.where = h.shape[0], inputs[7:]
    ctx.anchored = None if anchor is None else anchor.dtype
    ctx.kept = bool(inputs[6])
    ctx.set_materialize_grads(False)
    weighted = [] if weights is None else [weights]
    if ctx.needs_input_grad[1]:
        weighted.append(output[1] if ctx.kept else h)
    ctx.save_for_backward(*routing, *weighted)


def _combine_backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple:
    table, order, slot, *weighted = ctx.saved_tensors
    dh = d_weights = d_anchor = None
    if dy is not None and (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
        if ctx.anchored is not None:
            d_anchor = dy.new_zeros(0, dtype=ctx.anchored)
        if weighted:
            routing = (table, order, slot, ctx.rows)
            dh = moe_dispatch_weighted(dy, weighted[0], *routing, *ctx.where)
        else:
            dh, _ = moe_dispatch(dy, table, order, slot, *ctx.where)
    if dy is not None and ctx.needs_input_grad[1]:
        weights, rows = weighted
        if not ctx.kept:
            _, rows = moe_combine(rows, None, None, table, order, slot, True, *ctx.where)
        d_weights = moe_weight_grad(rows, slot, dy, weights.dtype)
    return (dh if ctx.needs_input_grad[0] else None, d_weights, d_anchor, *[None] * 12)


moe_combine.register_autograd(_combine_backward, setup_context=_combine_setup)


@torch.library.custom_op("fusedcomm::moe_weight_grad", mutates_args=())
def moe_weight_grad(kept: Tensor, slot: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """``⟨dy[t], kept[t, j]⟩`` ``[T, k]``; 0 for a choice of no expert."""
    return dot_choices(kept, slot, dy, dtype)


@moe_weight_grad.register_fake
def _(kept, slot, dy, dtype):
    return dy.new_empty(slot.shape, dtype=dtype)
