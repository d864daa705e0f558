"""Dispatch, experts and combine in one call of the host engine.

Rows are multiplied in units (``units``), in the order in which they come. The down-projection
writes into the memory of the rank that the rows came from.
"""

from __future__ import annotations

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import (
    Experts,
    activate,
    activate_backward,
    experts_grads,
)
from fusedcomm.engines.host.rows import Piece, Returns, Rows, in_order
from fusedcomm.engines.host.units import Work
from fusedcomm.engines.routed import Routed
from fusedcomm.planning.moe import Plan, table_text
from fusedcomm.trace import span

Tensor = torch.Tensor


class Forward:
    """The products of one forward pass."""

    def __init__(
        self,
        work: Work,
        rows: Rows,
        returns: Returns,
        x: Tensor,
        experts: Experts,
        total: int | None,
    ) -> None:
        """Take the memory.

        Args:
            x: what the rows are like.
            total: rows to be kept for the backward pass; None if none are.
        """
        self._work, self._rows, self._returns, self._experts = work, rows, returns, experts
        self._keeps = total is not None
        kept = total or 0
        self.kept_x = x.new_empty((kept, x.shape[1]) if self._keeps else (0,))
        self.kept_z = x.new_empty((kept, experts.width) if self._keeps else (0,))
        self._z = x.new_empty(0 if self._keeps else work.longest, experts.width)
        self._a = x.new_empty(work.longest, experts.ffn)
        self._h = x.new_empty(work.longest, x.shape[1])

    def run(self, units: list[list[Piece]]) -> None:
        """Multiply units as their rows come, and bring the results back."""
        work, own, experts = self._work, self._rows.own, self._experts
        for unit in in_order(self._rows, units):
            first, last = unit[0].first, unit[-1].last
            expert, count = work.expert_of[first], last - first
            with span("gemm", f"expert {expert}, rows {first}:{last}", rank=work.rank):
                z = self.kept_z[first:last] if self._keeps else self._z[:count]
                experts.project_up(expert, own[first:last], z)
                activate(z, experts.style, self._a[:count])
                work.deliver_down(unit, self._returns, self._a[:count], experts, expert, self._h)
            if self._keeps:
                self.kept_x[first:last].copy_(own[first:last])


class Backward:
    """The products of one backward pass."""

    def __init__(
        self,
        work: Work,
        rows: Rows,
        returns: Returns | None,
        like: tuple[Tensor, Tensor],
        experts: Experts,
    ) -> None:
        """Take the memory.

        Args:
            returns: None if the gradients of x are not needed.
            like: dy, and z as the forward pass kept it.
        """
        self._work, self._rows, self._returns, self._experts = work, rows, returns, experts
        dy, self._z = like
        self._da = self._z.new_empty(self._z.shape[0], experts.ffn)
        self._dz = torch.empty_like(self._z)
        self._scratch = dy.new_empty(work.longest if returns else 0, dy.shape[1])

    def run(self, units: list[list[Piece]]) -> None:
        """The gradients of units as their rows come; those of x go back."""
        work, own, experts, da, dz = self._work, self._rows.own, self._experts, self._da, self._dz
        for unit in in_order(self._rows, units):
            first, last = unit[0].first, unit[-1].last
            expert, part = work.expert_of[first], slice(first, last)
            name = f"gradient of expert {expert}, rows {first}:{last}"
            with span("gemm", name, rank=work.rank):
                torch.mm(own[part], experts.down(expert).t(), out=da[part])
                activate_backward(self._z[part], da[part], experts.style, da[part], dz[part])
                if self._returns is not None:
                    factor = experts.up(expert).t()
                    work.deliver(unit, self._returns, dz[part], factor, None, self._scratch)

    def grads(self, x_rows: Tensor, routed: Routed, needs: list[bool]) -> list[Tensor | None]:
        """The gradients of the experts' weights, when all units are done; before ``Rows.done``."""
        rank = self._work.rank
        with span("gemm", "gradients of the experts' weights", rank=rank):
            own = self._rows.own
            return experts_grads(
                own, self._da, self._dz, x_rows, self._experts, routed, rank, needs
            )


def again(work: Work, returns: Returns, z: Tensor, experts: Experts) -> None:
    """Finished rows are made from z once more, and brought back."""
    a = z.new_empty(work.longest, experts.ffn)
    h = z.new_empty(work.longest, experts.hidden)
    work.begin(returns)
    for unit in [*work.units, *work.relayed_units]:
        first, last = unit[0].first, unit[-1].last
        expert, count = work.expert_of[first], last - first
        with span("gemm", f"expert {expert}, rows {first}:{last} again", rank=work.rank):
            activate(z[first:last], experts.style, a[:count])
            work.deliver_down(unit, returns, a[:count], experts, expert, h)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, routed: Routed) -> int:
    """Begin ``moe_ffn``: write this rank's rows where their experts read them.

    Returns:
        its number, with which ``moe_ffn`` goes on.
    """
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = Rows(comm, "moe_ffn", routed, x.shape[1], x.dtype)
        rows.send(routed, x.contiguous(), None)
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
    hidden = x.shape[1]
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        if sent is None:
            rows = Rows(comm, "moe_ffn", routed, hidden, x.dtype)
            rows.send(routed, x.contiguous(), None)
        else:
            rows = comm.calls.take_up(sent)
        returns = Returns(comm, "moe_ffn", routed, hidden, x.dtype)
        work = Work(comm, routed)
        work.begin(returns)
        total = routed.received if keep_rows else None
        products = Forward(work, rows, returns, x, experts, total)
        products.run(work.units)
        rows.done()
        y, kept = returns.sum(routed, weights, keep_choices)
        returns.done()
    return [y, products.kept_x, products.kept_z, kept]


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
    op, hidden = "moe_ffn_backward", dy.shape[1]
    dx: Tensor | None = None
    returns: Returns | None = None
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = Rows(comm, op, routed, hidden, dy.dtype)
        rows.send(routed, dy.contiguous(), routed.scale(weights))
        work = Work(comm, routed)
        if need_x:
            returns = Returns(comm, op, routed, hidden, dy.dtype)
            work.begin(returns)
        products = Backward(work, rows, returns, (dy, z), experts)
        products.run(work.units)
        grads = products.grads(x_rows, routed, needs)
        rows.done()
        if returns is not None:
            dx, _ = returns.sum(routed, None, False)
            returns.done()
    return [dx, *grads]


def moe_ffn_choices(
    comm: Communicator, plan: Plan, z: Tensor, experts: Experts, routed: Routed
) -> Tensor:
    """The finished rows by token and choice ``[T, k, hidden]``, made from z once more."""
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        returns = Returns(comm, "moe_ffn_backward", routed, experts.hidden, z.dtype)
        again(Work(comm, routed), returns, z, experts)
        _, kept = returns.sum(routed, None, True)
        returns.done()
    return kept
