"""Mixture of experts over ranks: tokens to their experts, experts, and back.

    d = fc.dispatch(x, topk_ids, topk_weights, num_experts)     # d.x: rows sorted by local expert
    h = my_experts(d.x, d.offs)                                 # as F.grouped_mm takes them
    y = fc.combine(h, d)                                        # weighted sum, one row per token

    y = fc.moe_ffn(x, topk_ids, topk_weights, w13, w2)          # all of it at once, overlapped

T tokens of this rank (any number, also 0, another on every rank), k choices each, E experts over
the W ranks of a group. An id below 0, or E and above, is no expert: nothing is sent or added for
it, and what lies behind it is never read. Ids that occur twice for a token count twice. ``group``
is as in :mod:`fusedcomm.ops.tensor_parallel`; at W = 1 all functions equal the loop over experts.

Raises, all functions: ``ValueError`` for arguments that cannot be right, before anything is sent;
``CapacityError`` where ``capacity`` is too small, on all ranks; ``MismatchError`` where ranks
disagree; ``PeerLostError``, ``PeerTimeoutError``, ``AbortedError`` where a rank is gone, late or
failed; ``ClosedError`` on a communicator that is unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.ops.autocast import autocast
from fusedcomm.ops.checks import check_engine
from fusedcomm.ops.checks_moe import (
    check_beside,
    check_choices,
    check_experts,
    check_num_tokens,
    check_rows,
    check_terms,
)
from fusedcomm.ops.dispatch import Address, address_of, direct, named
from fusedcomm.ops.library import moe as library
from fusedcomm.ops.library import moe_ffn as ffn_library
from fusedcomm.planning.routing import local_experts

Placed = Sequence[int] | Tensor | None


class Routing(NamedTuple):
    """Which row goes where; see ``fusedcomm.planning.routing``.

    Attributes:
        table: int64 ``[W, E]``: choices of every rank for every expert, experts in the order of
            their ranks. With ``capacity`` it lies where the ids are, else in CPU memory.
        order: int64 ``[T * k]``, the choices (token * k + choice) in the order in which they are
            sent; those of no expert last.
        slot: int64 ``[T, k]``, its inverse; -1 for no expert.
        relayed: int32 in CPU memory, of a group over several domains: the choices of other ranks
            whose rows this one passes on; see ``fusedcomm.planning.relaying``. Else empty.
    """

    table: Tensor
    order: Tensor
    slot: Tensor
    relayed: Tensor


@dataclass(frozen=True)
class Dispatched:
    """What :func:`dispatch` returns: this rank's rows, and the routing by which they return.

    Attributes:
        x: ``[R, hidden]``, the rows of this rank's experts, sorted by (expert, source rank, token,
            choice); R is ``capacity`` or the number of rows. Padding rows are zero.
        offs: int32 ``[E_local]``, cumulative: the row after each expert's last, padding included,
            as torch's grouped matmul takes it (counts [3, 4] give [3, 7]).
        counts: int32 ``[E_local]``, rows of each expert without padding.
        padded_counts: int32 ``[E_local]``, with padding: multiples of ``align``.
        weights: ``topk_weights``, or None; :func:`combine` applies them.
        dropped: int64 ``[]``, choices of this rank that found no room (``overflow="drop"``).
        routing: for :func:`combine` and ``dispatch(x2, plan=d)``.
        anchor, lead, where: for :func:`combine`: what ties y to x for autograd, the leading
            dimensions of x, and what all ranks agreed on.
    """

    x: Tensor
    offs: Tensor
    counts: Tensor
    padded_counts: Tensor
    weights: Tensor | None
    dropped: Tensor
    routing: Routing
    anchor: Tensor
    lead: tuple[int, ...]
    where: tuple[Any, ...]


def dispatch(
    x: Tensor,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    num_experts: int | None = None,
    *,
    group: Any = None,
    align: int = 1,
    capacity: int | None = None,
    max_tokens: int | None = None,
    overflow: str = "error",
    num_tokens: int | Tensor | None = None,
    placement: Placed = None,
    plan: Dispatched | None = None,
    engine: str = "auto",
) -> Dispatched:
    """Send every token to the ranks of its experts; differentiable in x.

    Args:
        x: this rank's tokens ``[…, hidden]``; their leading dimensions flatten to T.
        topk_ids: ``[…, k]``, any integer dtype; global ids. k is the same on every rank.
        topk_weights: ``[…, k]``, any floating dtype, or None for ones. They are kept for
            :func:`combine`, which is differentiable in them.
        num_experts: E, of all ranks.
        align: pad each expert's rows to a multiple.
        capacity: the most rows, padding included, that any rank receives; then d.x has exactly so
            many. Equal on every rank, as is ``max_tokens``.
        max_tokens: the most tokens that any rank sends. With both, memory never grows; else it
            follows the largest call so far.
        overflow: "error", or "drop": choices find room in the order of source rank, token, choice;
            those that do not are as if they had no expert, and are counted in ``d.dropped``.
        num_tokens: how many of the T tokens there are; those behind them have no expert, whatever
            their ids are, and nothing of them is read. A number or an integer tensor, which on a
            GPU may be changed between replays of a captured graph. Another one on every rank.
        placement: the rank of every expert, E of them. None: blocks of ``ceil(E / W)``. A rank's
            experts are in the order of their ids.
        plan: an earlier result whose routing is used again, without counting; x then has as many
            tokens, in any hidden size, and all other arguments are the plan's.
        engine: "auto", "host" (overlapped, CPU), "triton" (kernels) or "plain" (all-to-all of
            torch.distributed).

    With ``capacity`` no host waits for a GPU. There ``overflow="error"`` is told by a later call,
    and until then results are anything; see ``docs/moe.md``.

    Returns:
        see :class:`Dispatched`.
    """
    check_rows("x", x)
    if plan is not None:
        return _replay(x, plan, topk_ids, topk_weights, num_experts, num_tokens)
    if topk_ids is None or num_experts is None:
        raise ValueError("dispatch needs topk_ids and num_experts, or the plan of an earlier call")
    check_engine(engine)
    check_choices(x, topk_ids, topk_weights)
    check_num_tokens(x, num_tokens)
    address = address_of(group)
    owners = check_terms(
        topk_ids, num_experts, address.world_size, align, capacity, max_tokens, overflow, placement
    )
    where = _where(num_experts, owners, align, capacity, max_tokens, address, engine)
    ids = _ids_of(topk_ids, num_tokens)
    *routing, offs, counts, padded, dropped = direct(library.moe_route, ids)(ids, overflow, *where)
    rows = x.reshape(-1, x.shape[-1])
    sent, anchor = direct(library.moe_dispatch, rows)(rows, *routing, *where)
    return Dispatched(
        sent,
        offs,
        counts,
        padded,
        topk_weights,
        dropped,
        Routing(*routing),
        anchor,
        tuple(x.shape[:-1]),
        where,
    )


def _replay(x: Tensor, plan: Dispatched, *others: Any) -> Dispatched:
    if any(other is not None for other in others):
        raise ValueError(
            "plan has the ids, weights, num_experts and num_tokens already: give x alone with it"
        )
    if tuple(x.shape[:-1]) != plan.lead:
        raise ValueError(f"x is {list(x.shape)}, but the plan's tokens are {list(plan.lead)}")
    rows = x.reshape(-1, x.shape[-1])
    sent, anchor = direct(library.moe_dispatch, rows)(rows, *plan.routing, *plan.where)
    return replace(plan, x=sent, anchor=anchor)


def combine(h: Tensor, d: Dispatched, *, save_rows: bool = True) -> Tensor:
    """Bring the experts' rows back and add them up; differentiable in h and ``d.weights``.

    ``y[t] = Σ_j weights[t, j] · h's row of (t, j)``, in float32, in order of choice, rounded once.

    Args:
        h: ``[R, hidden]`` in the order of ``d.x``, any hidden size; padding rows are not read.
        d: what :func:`dispatch` returned, on this channel.
        save_rows: keep the rows that came back, ``T * k`` of them, for the weights' gradient. Else
            they are sent once more in the backward pass. The same on every rank.

    Returns:
        y ``[…, hidden]`` in h's dtype; zeros for a token of no expert.
    """
    if not isinstance(d, Dispatched):
        raise ValueError(f"d must be what dispatch returned; got {type(d).__name__}")
    check_rows("h", h)
    if h.dim() != 2 or h.shape[0] != d.x.shape[0]:
        raise ValueError(
            f"h must be [{d.x.shape[0]}, hidden], a row for each of d.x; got {list(h.shape)}"
        )
    weights = None if d.weights is None else d.weights.reshape(d.routing.slot.shape)
    keep = save_rows and _tracked(weights)
    op = direct(library.moe_combine, h, weights, d.anchor)
    y, _ = op(h, weights, d.anchor, *d.routing, keep, *d.where)
    return y.reshape(*d.lead, h.shape[1])


def moe_ffn(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    num_experts: int | None = None,
    group: Any = None,
    activation: str = "swiglu",
    layout: str = "gate_up",
    transposed: bool = False,
    align: int = 1,
    capacity: int | None = None,
    max_tokens: int | None = None,
    overflow: str = "error",
    num_tokens: int | Tensor | None = None,
    placement: Placed = None,
    save_rows: bool = True,
    engine: str = "auto",
    beside: Callable[[], Any] | None = None,
    dropped: Tensor | None = None,
) -> Any:
    """Dispatch, experts and combine at once, overlapped; differentiable in all but the ids.

    ``y[t] = Σ_j weights[t, j] · (act(x[t] · w13ᵀ + b13) · w2ᵀ + b2)`` with the weights of expert
    ``topk_ids[t, j]``. The activation is computed in float32 and rounded once. Under
    ``torch.autocast`` x, experts and y are in its dtype, as ``F.linear``'s.

    Args:
        x, topk_ids, topk_weights, group, align, capacity, max_tokens, overflow, num_tokens,
            placement, engine: as in :func:`dispatch`.
        w13: this rank's experts ``[E_local, 2 * ffn, hidden]``; ``[E_local, ffn, hidden]`` for
            relu2, which has no gate.
        w2: ``[E_local, hidden, ffn]``.
        b13, b2: ``[E_local, 2 * ffn]``, ``[E_local, hidden]``, or None.
        num_experts: E; may be left out where every rank has ``E_local = E / W``.
        activation: "swiglu", "geglu", "geglu_tanh", "gpt_oss" (clamped) or "relu2".
        layout: "gate_up" (all gate rows of w13 first) or "interleaved" (gate and up in turn).
        transposed: weights are ``[E_local, in, out]``, as gpt-oss has them.
        save_rows: as in :func:`combine`; the down-projection is then done once more as well.
        beside: called while the rows are on their way (a shared expert, say). It may communicate,
            but for another mixture of experts it needs another channel. If it raises, the other
            ranks' calls do, too, and the communicator is unusable.
        dropped: int64 ``[]`` on x's device; it is set to the number of this rank's choices that
            found no room (``overflow="drop"``).

    Returns:
        y ``[…, hidden]``; zeros for a token of no expert. With ``beside``, y and its result.
    """
    check_engine(engine)
    x, (w13, w2), (b13, b2) = autocast(x, [w13, w2], [b13, b2])
    check_rows("x", x)
    check_choices(x, topk_ids, topk_weights)
    check_num_tokens(x, num_tokens)
    address = address_of(group)
    if num_experts is None:
        num_experts = w13.shape[0] * address.world_size
    owners = check_terms(
        topk_ids, num_experts, address.world_size, align, capacity, max_tokens, overflow, placement
    )
    local = local_experts(num_experts, address.rank, address.world_size, owners)
    check_experts(x, w13, w2, b13, b2, local, activation, layout, transposed)
    check_beside(x, beside, dropped)
    where = _where(num_experts, owners, align, capacity, max_tokens, address, engine)
    ids = _ids_of(topk_ids, num_tokens)
    *routing, _, _, _, lost = direct(library.moe_route, ids)(ids, overflow, *where)
    if dropped is not None:
        dropped.copy_(lost)
    rows = x.reshape(-1, x.shape[-1])
    weights = None if topk_weights is None else topk_weights.reshape(ids.shape)
    sent = result = None
    if beside is not None:
        sent = direct(ffn_library.moe_send, rows.detach())(rows.detach(), *routing, *where)
        result = _called(beside, address)
    y, *_ = direct(ffn_library.moe_ffn, rows, weights, w13, w2, b13, b2)(
        rows,
        weights,
        w13,
        w2,
        b13,
        b2,
        *routing,
        _tracked(rows, w13, w2, b13, b2, None if save_rows else weights),
        save_rows and _tracked(weights),
        activation,
        layout,
        transposed,
        *where,
        sent,
    )
    return y.reshape(x.shape) if beside is None else (y.reshape(x.shape), result)


def _ids_of(topk_ids: Tensor, num_tokens: int | Tensor | None) -> Tensor:
    """The ids ``[T, k]``; -1 from token ``num_tokens`` on."""
    ids = topk_ids.reshape(-1, topk_ids.shape[-1])
    if num_tokens is None:
        return ids
    return torch.where(present(ids, num_tokens), ids.to(torch.int64), -1)


def present(rows: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Which of ``rows [T, …]`` are the first ``num_tokens``: bool ``[T, 1]``, on their device."""
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.reshape(())
    return (torch.arange(rows.shape[0], device=rows.device) < num_tokens)[:, None]


def _called(beside: Callable[[], Any], address: Address) -> Any:
    """Its result; where it raises, the peers await rows that will never come, and are told."""
    try:
        return beside()
    except BaseException as error:
        named(address).abort(f"what moe_ffn called beside itself raised {error!r}")
        raise


def _tracked(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of the tensors may be asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _where(
    num_experts: int,
    owners: tuple[int, ...],
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    address: Address,
    engine: str,
) -> tuple[Any, ...]:
    """The arguments that all custom ops end in; see ``library.moe_call.Where``."""
    placed = " ".join(map(str, owners))
    names = (address.group, address.channel, engine)
    return (num_experts, placed, align, capacity, max_tokens, *names)
