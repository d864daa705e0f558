"""The mixture of experts over several domains: the functions of ``moe``, in two levels.

With N domains of g ranks, a token's row crosses into a domain once, however many of its experts are
there, to the rank in its own rank's place; that one writes it to the experts' ranks, as if it were
its own, and adds their finished rows up: one row per token and domain comes back, and the domains'
are added in their order, in float32. (Each is rounded to the rows' dtype before.) With C choices of
other domains' experts, in P pairs of a token and such a domain, a rank sends across:

================= ================================================ ==============================
operation         there, to those who carry the rows on            back (as many as they carried)
================= ================================================ ==============================
routing           (N-1) 4 E bytes, its row of the table; then 4 C
dispatch          P rows
combine           4 C, the weights                                 P rows
combine, backward P rows; 4 C                                      4 C, the gradient of these
moe_ffn           P rows; 4 C                                      P rows
moe_ffn, backward P rows; 4 C                                      P rows; 4 C
================= ================================================ ==============================

(8 C with rows of float64.) What stands in one place of the table goes in one message to each
domain. While rows of other domains are on their way, those of the own one are sent, multiplied and
added up. Inside a domain, workspaces, flags and the order of rows are as in one; see ``rows``.
"""

from __future__ import annotations

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.border import Border, call, weight_grad
from fusedcomm.engines.across.routing import exchange_choices, route
from fusedcomm.engines.experts import Experts
from fusedcomm.engines.host.moe_ffn import Backward, Forward, again
from fusedcomm.engines.host.rows import Returns, Rows, arriving, clear_padding, give_back, take
from fusedcomm.engines.host.sums import Sums, weight_dots
from fusedcomm.engines.host.units import Work
from fusedcomm.engines.relays import Relays
from fusedcomm.planning.moe import Plan
from fusedcomm.schedule import successors

__all__ = [
    "choices",
    "combine",
    "combine_backward",
    "dispatch",
    "exchange_choices",
    "moe_ffn",
    "moe_ffn_backward",
    "moe_ffn_choices",
    "moe_send",
    "route",
]

Tensor = torch.Tensor


def dispatch(comm: Communicator, plan: Plan, x: Tensor, scale: None, relays: Relays) -> Tensor:
    """This rank's rows ``[received, hidden]``: all ranks' tokens for its experts."""
    with call(comm, plan, relays, "dispatch") as border:
        border.send(x, None, x.dtype)
        return _received(border, x)


def combine(
    comm: Communicator, plan: Plan, h: Tensor, weights: Tensor | None, relays: Relays, keep: bool
) -> tuple[Tensor, Tensor]:
    """The weighted sums of this rank's tokens, and the rows that this rank added if ``keep``.

    Returns:
        y ``[T, hidden]``; the finished rows ``[carried, hidden]`` of all sources of this rank, in
        the order in which they were sent, or an empty tensor.
    """
    with call(comm, plan, relays, "combine", f"rows kept {keep}") as border:
        border.send(None, weights, h.dtype)
        returns = _give_back(border, h)
        border.finish()
        sums = Sums(border, returns, weighted=True, keep=keep)
        sums.of_others()
        return sums.own(), sums.kept()


def choices(comm: Communicator, plan: Plan, h: Tensor, relays: Relays) -> Tensor:
    """The rows that ``combine`` keeps, once more; nothing crosses."""
    with comm.collective(f"{plan.text}, {relays.text}"):
        border = Border(comm, "combine", relays)
        return _carried(border, _give_back(border, h))


def combine_backward(
    comm: Communicator,
    plan: Plan,
    dy: Tensor,
    weights: Tensor | None,
    kept: Tensor | None,
    relays: Relays,
    need_h: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """From dy: the gradient of h ``[received, hidden]``, and that of the weights ``[T, k]``.

    Args:
        kept: what ``combine`` kept, if the weights' gradient is needed.
        need_h: whether h's is. Both are equal on all ranks.
    """
    said = f"gradient of rows {need_h}, of weights {kept is not None}"
    with call(comm, plan, relays, "dispatch", said) as border:
        border.send(dy, weights, dy.dtype)
        dh = _received(border, dy) if need_h else None
        border.finish()
        if kept is None or weights is None:
            return dh, None
        dots = weight_dots(border, dy, kept)
        border.send_back({}, dots)
        return dh, weight_grad(relays, dots | border.finish_back()[1], weights)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, relays: Relays) -> int:
    """Begin ``moe_ffn``: this rank's rows set out, into its own domain and others."""
    with call(comm, plan, relays, "moe_ffn") as border:
        border.send(x, None, x.dtype)
        return comm.calls.put_aside((border, _begun(border, x, scaled=False)))


def moe_ffn(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: Tensor | None,
    experts: Experts,
    relays: Relays,
    keep_rows: bool,
    keep_choices: bool,
    sent: int | None = None,
) -> list[Tensor]:
    """As in one domain; the finished rows that are kept are those of ``combine``."""
    with call(comm, plan, relays, "moe_ffn", f"rows kept {keep_choices}") as border:
        border.send(x if sent is None else None, weights, x.dtype)
        if sent is None:
            brings, rows = border, _begun(border, x, scaled=False)
        else:
            brings, rows = comm.calls.take_up(sent)
        with border.step("own domain"):
            work = Work(border.inside, relays.own.routed)
            returns = _returns(border, x, work)
            total = relays.own.routed.received if keep_rows else None
            products = Forward(work, rows, returns, x, experts, total)
            products.run(work.units)
        border.finish()
        brings.finish()
        with border.step("other domains"):
            _relay(brings, rows, scaled=False)
            products.run(work.relayed_units)
            rows.done()
        sums = Sums(border, returns, weighted=True, keep=keep_choices)
        sums.of_others()
        return [sums.own(), products.kept_x, products.kept_z, sums.kept()]


def moe_ffn_backward(
    comm: Communicator,
    plan: Plan,
    dy: Tensor,
    weights: Tensor | None,
    x_rows: Tensor,
    z: Tensor,
    experts: Experts,
    relays: Relays,
    kept: Tensor | None,
    need_x: bool,
    needs: list[bool],
) -> list[Tensor | None]:
    """From dy: dx, and the gradients of the choices' weights, w13, w2, b13 and b2.

    Args:
        kept: what ``moe_ffn`` kept, if the choices' weights' gradient is needed.
        need_x: whether dx is. Both are equal on all ranks, as is whether anything else is.
        needs: whether those of w13, w2, b13 and b2 are.
    """
    inside, dx = need_x or any(needs), None
    returns: Returns | None = None
    grads: list[Tensor | None] = [None] * 4
    said = f"gradient of rows {inside}, of weights {kept is not None}"
    with call(comm, plan, relays, "moe_ffn_backward", said) as border:
        border.send(dy, weights, dy.dtype)
        if inside:
            rows = _begun(border, dy, scaled=True)
            with border.step("own domain"):
                work = Work(border.inside, relays.own.routed)
                returns = _returns(border, dy, work) if need_x else None
                products = Backward(work, rows, returns, (dy, z), experts)
                products.run(work.units)
        border.finish()
        if inside:
            with border.step("other domains"):
                _relay(border, rows, scaled=True)
                products.run(work.relayed_units)
        dots = {} if kept is None else weight_dots(border, dy, kept)
        sums: Sums | None = None
        if returns is not None:
            sums = Sums(border, returns, weighted=False, keep=False)
            sums.of_others(dots)
        elif dots:
            border.send_back({}, dots)
        if inside:
            # While the others' sums are on their way.
            grads = products.grads(x_rows, relays.own.routed, needs)
            with border.step("rows read"):
                rows.done()
        if sums is not None:
            dx = sums.own()
            dots |= sums.dots
        elif dots:
            dots |= border.finish_back()[1]
    return [dx, weight_grad(relays, dots, weights), *grads]


def moe_ffn_choices(
    comm: Communicator, plan: Plan, z: Tensor, experts: Experts, relays: Relays
) -> Tensor:
    """The rows that ``moe_ffn`` keeps, made from z once more; nothing crosses."""
    with comm.collective(f"{plan.text}, {relays.text}"):
        border = Border(comm, "moe_ffn_backward", relays)
        with border.step("again"):
            hidden = experts.hidden
            returns = Returns(border.inside, border.op, relays.own.routed, hidden, z.dtype)
            again(Work(border.inside, relays.own.routed), returns, z, experts)
        return _carried(border, returns)


def _begun(border: Border, x: Tensor, *, scaled: bool, own: Tensor | None = None) -> Rows:
    """The own rows for the own domain are sent."""
    routed = border.relays.own.routed
    with border.step("own rows"):
        rows = Rows(border.inside, border.op, routed, x.shape[1], x.dtype)
        scale = routed.scale(border.weights[border.relays.mine]) if scaled else None
        rows.send(routed, x.contiguous(), scale, own=own, last=False)
    return rows


def _relay(border: Border, rows: Rows, *, scaled: bool, own: Tensor | None = None) -> None:
    """Within a step: send what came from other domains."""
    others = border.relays.others
    for domain in others:
        routed = border.relays.carried[domain].routed
        scale = routed.scale(border.weights[domain]) if scaled else None
        rows.send(routed, border.rows[domain], scale, own=own, last=domain == others[-1])


def _received(border: Border, x: Tensor) -> Tensor:
    """This rank's rows, scaled by the weights if there are any; ends ``border.finish``."""
    place, routed = border.inside.rank, border.relays.own.routed
    result = x.new_empty(routed.received, x.shape[1])
    rows = _begun(border, x, scaled=True, own=result)
    pieces = [piece for found in arriving(routed, place) for piece in found]
    with border.step("own domain"):
        take(rows, [piece for piece in pieces if not piece.relayed], result)
    border.finish()
    with border.step("other domains"):
        _relay(border, rows, scaled=True, own=result)
        take(rows, [piece for piece in pieces if piece.relayed], result)
        rows.done()
    clear_padding(result, routed, place)
    return result


def _returns(border: Border, like: Tensor, work: Work) -> Returns:
    """Within a step: the way back of finished rows."""
    routed = border.relays.own.routed
    returns = Returns(border.inside, border.op, routed, like.shape[1], like.dtype)
    work.begin(returns)
    return returns


def _give_back(border: Border, h: Tensor) -> Returns:
    """All finished rows are written where they came from, those of other domains first."""
    relays, place = border.relays, border.inside.rank
    routed = relays.own.routed
    with border.step("rows come back"):
        returns = Returns(border.inside, border.op, routed, h.shape[1], h.dtype)
        for domain in (*relays.others, relays.mine):
            ranks = border.levels.domains[domain]
            for carrier in (*successors(place, len(ranks)), place):
                give_back(returns, routed, ranks[carrier], h)
    return returns


def _carried(border: Border, returns: Returns) -> Tensor:
    """Copies of all finished rows that this rank carries."""
    with border.step("rows read"):
        found = [returns.rows(each.routed).clone() for each in border.relays.carried]
        returns.done()
    return torch.cat(found)
