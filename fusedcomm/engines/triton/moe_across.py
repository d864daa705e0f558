"""The mixture of experts over several domains: the functions of ``moe``, in two levels.

What crosses is as on the host engine (``engines.host.moe_across`` has the table), and so is the
routing, made on the host. Inside a domain the kernels of one domain run, twice in every call: on
the rows of the domain's own ranks, while the others' cross, and on these (``engines.origins``).
Either call has its rows in the order (expert, carrier, domain, token); what the caller sees is put
into the promised one, (expert, source, token), or taken from there. What is kept for a backward
pass stays as it is, the others' behind the own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.border import Border, call, weight_grad
from fusedcomm.engines.across.routing import exchange_choices, route
from fusedcomm.engines.choices import dot_rows
from fusedcomm.engines.experts import Experts
from fusedcomm.engines.relays import Relays
from fusedcomm.engines.triton import moe as kernels
from fusedcomm.engines.triton.moe import Kept
from fusedcomm.planning.moe import Plan
from fusedcomm.trace import span

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
        return _received(border, plan, x)


def combine(
    comm: Communicator, plan: Plan, h: Tensor, weights: Tensor | None, relays: Relays, keep: bool
) -> tuple[Tensor, Tensor]:
    """The weighted sums of this rank's tokens, and the rows that this rank added if ``keep``.

    Returns:
        y ``[T, hidden]``; the finished rows ``[carried, hidden]`` of the own tokens and of those
        carried, each as they came back, or an empty tensor.
    """
    origins = relays.origins
    with call(comm, plan, relays, "combine", f"rows kept {keep}") as border:
        border.send(None, weights, h.dtype)
        own, others = (h.index_select(0, origin.places) for origin in origins)
        kept, back = _room(h, h.shape[1], origins.sent, keep)
        border.finish()
        inner = _inner(border, plan, _OTHERS)
        sums, _ = kernels.combine(*inner, others, _weights(border), origins.others, False, back[1])
        _send_back(border, sums, {})
        inner = _inner(border, plan, _OWN)
        y, _ = kernels.combine(
            *inner, own, border.weights[relays.mine], origins.own, False, back[0]
        )
        return _added(border, y)[0], kept


def choices(comm: Communicator, plan: Plan, h: Tensor, relays: Relays) -> Tensor:
    """The rows that ``combine`` keeps, once more; nothing crosses."""
    origins = relays.origins
    kept, back = _room(h, h.shape[1], origins.sent, True)
    with comm.collective(f"{plan.text}, {relays.text}"):
        border = Border(comm, "combine", relays)
        for name, origin, room in zip(_NAMES, origins, back, strict=True):
            inner = _inner(border, plan, name)
            kernels.combine(*inner, h.index_select(0, origin.places), None, origin, False, room)
    return kept


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
        dh = _received(border, plan, dy) if need_h else None
        border.finish()
        if kept is None or weights is None:
            return dh, None
        dots = _dots(border, dy, kept)
        border.send_back({}, dots)
        return dh, weight_grad(relays, dots | border.finish_back()[1], weights)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, relays: Relays) -> int:
    """Begin ``moe_ffn``: this rank's rows set out into other domains; see ``moe`` for its own."""
    with call(comm, plan, relays, "moe_ffn") as border:
        border.send(x, None, x.dtype)
        return comm.calls.put_aside(border)


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
    origins, hidden = relays.origins, x.shape[1]
    with call(comm, plan, relays, "moe_ffn", f"rows kept {keep_choices}") as border:
        border.send(x if sent is None else None, weights, x.dtype)
        brings = border if sent is None else comm.calls.take_up(sent)
        kept_x, rows = _room(x, hidden, origins.received, keep_rows, relays.received)
        kept_z, zs = _room(x, experts.width, origins.received, keep_rows, relays.received)
        kept, back = _room(x, hidden, origins.sent, keep_choices)
        own, others = map(Kept, rows, zs, back)
        inner = _inner(border, plan, _OWN)
        (y,) = kernels.moe_ffn(
            *inner, x, border.weights[relays.mine], experts, origins.own, False, False, into=own
        )
        border.finish()
        brings.finish()
        inner = _inner(border, plan, _OTHERS)
        (sums,) = kernels.moe_ffn(
            *inner, _rows(brings), _weights(border), experts, origins.others, False, False,
            into=others,
        )  # fmt: skip
        _send_back(border, sums, {})
        return [_added(border, y)[0], kept_x, kept_z, kept]


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

    Those of the experts are made in float32 from either origin's rows, added, and rounded once.

    Args:
        kept: what ``moe_ffn`` kept, if the choices' weights' gradient is needed.
        need_x: whether dx is. Both are equal on all ranks, as is whether anything else is.
        needs: whether those of w13, w2, b13 and b2 are.
    """
    inside, origins = need_x or any(needs), relays.origins
    dx: Tensor | None = None
    grads: list[Tensor | None] = [None] * 4
    said = f"gradient of rows {inside}, of weights {kept is not None}"
    with call(comm, plan, relays, "moe_ffn_backward", said) as border:
        border.send(dy, weights, dy.dtype)
        own_sums, sums = None, None
        if inside:
            own_x, others_x = x_rows[: sum(origins.received)].split(origins.received)
            own_z, others_z = z[: sum(origins.received)].split(origins.received)
            inner = _inner(border, plan, _OWN)
            own_sums, *grads = kernels.moe_ffn_backward(
                *inner, dy, border.weights[relays.mine], own_x, own_z, experts, origins.own,
                need_x, needs, wide=True,
            )  # fmt: skip
        border.finish()
        if inside:
            inner = _inner(border, plan, _OTHERS)
            sums, *more = kernels.moe_ffn_backward(
                *inner, _rows(border), _weights(border), others_x, others_z, experts,
                origins.others, need_x, needs, wide=True,
            )  # fmt: skip
        dots = {} if kept is None else _dots(border, dy, kept)
        if sums is not None or dots:
            _send_back(border, sums, dots)
        if inside:
            like = [experts.w13, experts.w2, experts.b13, experts.b2]
            grads = list(map(_both, grads, more, like))
        if own_sums is not None:
            dx, came = _added(border, own_sums)
            dots |= came
        elif dots:
            dots |= border.finish_back()[1]
    return [dx, weight_grad(relays, dots, weights), *grads]


def moe_ffn_choices(
    comm: Communicator, plan: Plan, z: Tensor, experts: Experts, relays: Relays
) -> Tensor:
    """The rows that ``moe_ffn`` keeps, made from z once more; nothing crosses."""
    origins = relays.origins
    kept, back = _room(z, experts.hidden, origins.sent, True)
    zs = z[: sum(origins.received)].split(origins.received)
    with comm.collective(f"{plan.text}, {relays.text}"):
        border = Border(comm, "moe_ffn_backward", relays)
        for name, origin, theirs, room in zip(_NAMES, origins, zs, back, strict=True):
            inner = _inner(border, plan, name)
            kernels.moe_ffn_choices(*inner, theirs, experts, origin, room)
    return kept


#: Of the origins, in texts.
_NAMES = _OWN, _OTHERS = "own domain", "other domains"


def _inner(border: Border, plan: Plan, name: str) -> tuple[Communicator, Plan]:
    """The domain's communicator, and the plan of a call there.

    On a GPU its text is the same in every call of a kind, as only new ones are compared there.
    """
    on_cpu = border.relays.slots.device.type == "cpu"
    text = border.levels.named(name) if on_cpu else f"{plan.text}: {name}"
    return border.inside, replace(plan, text=text)


def _room(
    like: Tensor, width: int, sizes: Sequence[int], keep: bool, least: int = 0
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """A tensor for what is kept, ``least`` rows or more, and what either origin has of it."""
    if not keep:
        return like.new_empty(0), (None, None)
    whole = like.new_empty(max(sum(sizes), least), width)
    return whole, whole[: sum(sizes)].split(list(sizes))


def _rows(border: Border) -> Tensor:
    """The tokens ``[tokens, hidden]`` that came from other domains, in their order."""
    return _joined([border.rows[domain] for domain in border.relays.others])


def _weights(border: Border) -> Tensor | None:
    """Their weights ``[tokens, k]``, or None for ones."""
    found = [border.weights[domain] for domain in border.relays.others]
    given = [theirs for theirs in found if theirs is not None]
    return _joined(given) if given else None


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _received(border: Border, plan: Plan, x: Tensor) -> Tensor:
    """This rank's rows, scaled by the weights if there are any; ends ``border.finish``."""
    relays = border.relays
    origins = relays.origins
    result = x.new_zeros(relays.received, x.shape[1])
    inner = _inner(border, plan, _OWN)
    scale = origins.own.scale(border.weights[relays.mine])
    result.index_copy_(0, origins.own.places, kernels.dispatch(*inner, x, scale, origins.own))
    border.finish()
    inner = _inner(border, plan, _OTHERS)
    scale = origins.others.scale(_weights(border))
    rows = kernels.dispatch(*inner, _rows(border), scale, origins.others)
    return result.index_copy_(0, origins.others.places, rows)


def _send_back(border: Border, sums: Tensor | None, dots: dict[int, Tensor]) -> None:
    """Begin to give the sums ``[tokens, hidden]`` of carried tokens back, and ``dots``."""
    relays = border.relays
    theirs: dict[int, Tensor] = {}
    if sums is not None:
        sizes = [relays.carried[domain].tokens for domain in relays.others]
        theirs = dict(zip(relays.others, sums.split(sizes), strict=True))
    border.send_back(theirs, dots)


def _added(border: Border, own: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """All domains' sums ``[T, hidden]``, in their order, of which ``own`` are this one's.

    Returns also the gradients of weights that came with them, if any.
    """
    relays = border.relays
    came, dots = border.finish_back()
    with span("reduce", "add the domains' sums", rank=border.levels.comm.rank):
        total = own.new_zeros(own.shape, dtype=torch.float32)
        for domain, tokens in enumerate(relays.tokens):
            if domain == relays.mine:
                total += own
            else:
                total.index_add_(0, tokens, came[domain].float())  # no token occurs twice
    return total.to(own.dtype), dots


def _dots(border: Border, dy: Tensor, kept: Tensor) -> dict[int, Tensor]:
    """The gradients of the weights of all carried choices, of every domain ``[choices]``.

    Args:
        dy: this rank's own; the others' are ``border.rows``.
        kept: as ``combine`` has it.
    """
    relays, origins = border.relays, border.relays.origins
    found = {}
    own, others = kept.split(origins.sent)
    for origin, rows, theirs, domains in (
        (origins.own, own, dy, [relays.mine]),
        (origins.others, others, _rows(border), relays.others),
    ):
        dots = origin.by_choice(dot_rows(rows, origin.tokens[: origin.sent], theirs))
        carried = [relays.carried[domain] for domain in domains]
        split = dots.split([each.routed.slot.numel() for each in carried])
        for domain, each, values in zip(domains, carried, split, strict=True):
            found[domain] = values[each.places]
    return found


def _both(own: Tensor | None, others: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of an expert's tensor, of those in float32 from either origin's rows."""
    if own is None or others is None or like is None:
        return None
    return own.add_(others).to(like.dtype)
