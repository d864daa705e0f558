"""Dispatch, experts and combine in one call of the host engine.

A **unit** is a run of consecutive rows of one expert that is multiplied at once: enough of them
that a product costs no more a row than a long one, and whole pieces, so that it can begin when
these have come. Which rows make a unit depends on the table alone, so results do not depend on who
was early; the units' order does. The down-projection writes into the memory of the rank that the
rows came from.
"""

from __future__ import annotations

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import (
    Experts,
    activate,
    activate_backward,
    experts_grads,
    product,
)
from fusedcomm.engines.host.rows import Piece, Returns, Rows, arriving, in_order
from fusedcomm.engines.routed import Routed
from fusedcomm.planning.moe import Plan, table_text
from fusedcomm.trace import span

Tensor = torch.Tensor

#: Rows from which a product is as fast as a longer one.
UNIT_ROWS = 512
#: Rows from which a product goes straight into its reader's memory. Fewer go in one product for
#: all sources, and are copied.
DIRECT_ROWS = 128


def cut(found: list[Piece], least: int = UNIT_ROWS) -> list[list[Piece]]:
    """Consecutive pieces, in units of at least ``least`` rows (or all there are).

    >>> sizes = [600, 300, 200, 200, 80]
    >>> starts = [0, 600, 900, 1100, 1300]
    >>> found = [Piece(0, i, s, s + n, 0) for i, (s, n) in enumerate(zip(starts, sizes))]
    >>> [[piece.rows for piece in unit] for unit in cut(found)]
    [[600], [300, 200, 200, 80]]
    """
    units: list[list[Piece]] = []
    for piece in found:
        if units and sum(p.rows for p in units[-1]) < least:
            units[-1].append(piece)
        else:
            units.append([piece])
    if len(units) > 1 and sum(p.rows for p in units[-1]) < least:
        units[-2].extend(units.pop())
    return units


class _Work:
    """The units of one call, and the memory in which they are computed."""

    def __init__(self, comm: Communicator, routed: Routed) -> None:
        self.rank = comm.rank
        self.expert_of: dict[int, int] = {}  # the first row of a unit -> its expert
        units = []
        for expert, found in enumerate(arriving(routed, comm.rank)):
            for unit in cut(found):
                self.expert_of[unit[0].first] = expert
                units.append(unit)
        # Own rows are there already.
        self.units = sorted(units, key=lambda unit: any(piece.chunk >= 0 for piece in unit))
        self.longest = max((unit[-1].last - unit[0].first for unit in units), default=0)
        self._left = [0] * comm.world_size  # pieces of every source that are still to come back
        for unit in units:
            for piece in unit:
                self._left[piece.source] += 1

    def begin(self, returns: Returns) -> None:
        """Signal the sources that get nothing."""
        for source, left in enumerate(self._left):
            if not left:
                returns.signal(source)

    def back(self, unit: list[Piece], returns: Returns) -> None:
        """The unit's rows lie where they came from."""
        for piece in unit:
            self._left[piece.source] -= 1
            if not self._left[piece.source]:
                returns.signal(piece.source)

    def deliver(
        self,
        unit: list[Piece],
        returns: Returns,
        x: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        scratch: Tensor,
    ) -> None:
        """``x · factor + bias`` of a unit, back to the sources."""
        first = unit[0].first
        direct = len(unit) == 1 or all(piece.rows >= DIRECT_ROWS for piece in unit)
        if not direct:
            product(x, factor, bias, scratch[: x.shape[0]])
        for piece in unit:
            out = returns.targets[piece.source][piece.back : piece.back + piece.rows]
            part = slice(piece.first - first, piece.last - first)
            if direct:
                product(x[part], factor, bias, out)
            else:
                out.copy_(scratch[part])
        self.back(unit, returns)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, routed: Routed) -> int:
    """Begin ``moe_ffn``: write this rank's rows where their experts read them.

    Returns:
        its number, with which ``moe_ffn`` goes on.
    """
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = Rows(comm, "moe_ffn", routed, x.shape[1], x.dtype)
        rows.send(x.contiguous(), None)
        return comm.calls.put_aside(rows)


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
    """``y[t] = Σ_j weights[t, j] · expert_{ids[t, j]}(x[t])``.

    Args:
        keep_rows: whether to return what the backward pass needs of the experts' rows.
        keep_choices: whether to return what it needs for the weights.
        sent: what ``moe_send`` returned, if it was called.

    Returns:
        y ``[T, hidden]``; the rows ``[received, hidden]`` and z ``[received, width]``; the finished
        rows by token and choice ``[T, k, hidden]``. Those not kept are empty.
    """
    rank, hidden, total = comm.rank, x.shape[1], routed.received
    kept_x = x.new_empty((total, hidden) if keep_rows else (0,))
    kept_z = x.new_empty((total, experts.width) if keep_rows else (0,))
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        if sent is None:
            rows = Rows(comm, "moe_ffn", routed, hidden, x.dtype)
            rows.send(x.contiguous(), None)
        else:
            rows = comm.calls.take_up(sent)
        returns = Returns(comm, "moe_ffn", routed, hidden, x.dtype)
        work = _Work(comm, routed)
        work.begin(returns)
        scratch_z = x.new_empty(0 if keep_rows else work.longest, experts.width)
        scratch_a = x.new_empty(work.longest, experts.ffn)
        scratch_h = x.new_empty(work.longest, hidden)
        for unit in in_order(rows, work.units):
            first, last = unit[0].first, unit[-1].last
            expert, count = work.expert_of[first], last - first
            with span("gemm", f"expert {expert}, rows {first}:{last}", rank=rank):
                z = kept_z[first:last] if keep_rows else scratch_z[:count]
                experts.project_up(expert, rows.own[first:last], z)
                activate(z, experts.style, scratch_a[:count])
                bias = None if experts.b2 is None else experts.b2[expert]
                factor = experts.down(expert)
                work.deliver(unit, returns, scratch_a[:count], factor, bias, scratch_h)
            if keep_rows:
                kept_x[first:last].copy_(rows.own[first:last])
        rows.done()
        y, kept = returns.sum(weights, keep_choices)
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
    """From dy: dx, and the gradients of w13, w2, b13 and b2 where ``needs`` says so.

    The rows' gradients go the way of the rows, so it is the same exchange the other way round;
    the weights' products are made while dx is on its way.

    Args:
        need_x: whether dx is needed; equal on every rank.
    """
    rank, hidden = comm.rank, dy.shape[1]
    da_space = z.new_empty(z.shape[0], experts.ffn)
    dz = torch.empty_like(z)
    dx: Tensor | None = None
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = Rows(comm, "moe_ffn_backward", routed, hidden, dy.dtype)
        rows.send(dy.contiguous(), routed.scale(weights))
        work = _Work(comm, routed)
        if need_x:
            returns = Returns(comm, "moe_ffn_backward", routed, hidden, dy.dtype)
            work.begin(returns)
            scratch = dy.new_empty(work.longest, hidden)
        for unit in in_order(rows, work.units):
            first, last = unit[0].first, unit[-1].last
            expert, part = work.expert_of[first], slice(first, last)
            with span("gemm", f"gradient of expert {expert}, rows {first}:{last}", rank=rank):
                torch.mm(rows.own[part], experts.down(expert).t(), out=da_space[part])
                activate_backward(z[part], da_space[part], experts.style, da_space[part], dz[part])
                if need_x:
                    factor = experts.up(expert).t()
                    work.deliver(unit, returns, dz[part], factor, None, scratch)
        with span("gemm", "gradients of the experts' weights", rank=rank):
            grads = experts_grads(rows.own, da_space, dz, x_rows, experts, routed, rank, needs)
        rows.done()
        if need_x:
            dx, _ = returns.sum(None, False)
    return [dx, *grads]


def moe_ffn_choices(
    comm: Communicator, plan: Plan, z: Tensor, experts: Experts, routed: Routed
) -> Tensor:
    """The finished rows by token and choice ``[T, k, hidden]``, made from z once more."""
    hidden = experts.hidden
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        returns = Returns(comm, "moe_ffn_backward", routed, hidden, z.dtype)
        work = _Work(comm, routed)
        work.begin(returns)
        scratch_a = z.new_empty(work.longest, experts.ffn)
        scratch_h = z.new_empty(work.longest, hidden)
        for unit in work.units:
            first, last = unit[0].first, unit[-1].last
            expert, count = work.expert_of[first], last - first
            with span("gemm", f"expert {expert}, rows {first}:{last} again", rank=comm.rank):
                activate(z[first:last], experts.style, scratch_a[:count])
                bias = None if experts.b2 is None else experts.b2[expert]
                factor = experts.down(expert)
                work.deliver(unit, returns, scratch_a[:count], factor, bias, scratch_h)
        _, kept = returns.sum(None, True)
    return kept
