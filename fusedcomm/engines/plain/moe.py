"""The mixture of experts without overlap, on torch.distributed's all-to-all.

The functions, arguments and results are those of ``engines.host.moe``. Rows arrive ordered by
source and are put in order once more, which the overlapped engines save. Tables are read on the
host, also those of CUDA ranks.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from fusedcomm.communicator import Communicator
from fusedcomm.engines.choices import sum_choices
from fusedcomm.engines.experts import Experts, activate, activate_backward, experts_grads
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.routing import Route, route_on_host
from fusedcomm.planning.moe import Plan, Terms, table_text
from fusedcomm.trace import span

Tensor = torch.Tensor


def exchange_counts(comm: Communicator, plan: Plan, counts: np.ndarray) -> np.ndarray:
    own = torch.from_numpy(counts).to(comm.device)
    rows = [torch.empty_like(own) for _ in range(comm.world_size)]
    with comm.collective(plan.text):
        comm.calls.await_peers("dispatch")
        comm.torch.run(
            "dispatch", lambda: dist.all_gather(rows, own, group=comm.group, async_op=True)
        )
    return torch.stack(rows).cpu().numpy()


def route(comm: Communicator, plan: Plan, terms: Terms, ids: Tensor, overflow: str) -> Route:
    return route_on_host(exchange_counts, comm, plan, terms, ids, overflow)


def dispatch(
    comm: Communicator, plan: Plan, x: Tensor, scale: Tensor | None, routed: Routed
) -> Tensor:
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        return _there(comm, "dispatch", x, scale, routed)


def combine(
    comm: Communicator, plan: Plan, h: Tensor, weights: Tensor | None, routed: Routed, keep: bool
) -> tuple[Tensor, Tensor]:
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        back = _back(comm, "combine", h, routed)
    return sum_choices(back, routed.slot, weights, keep)


def moe_send(comm: Communicator, plan: Plan, x: Tensor, routed: Routed) -> int:
    """Nothing sets out early here: a collective occupies its caller until it ends."""
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
) -> list[Tensor]:
    rank, nothing = comm.rank, x.new_empty(0)
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = _there(comm, "moe_ffn", x, None, routed)
        z = rows.new_zeros(rows.shape[0], experts.width)
        h = torch.zeros_like(rows)
        with span("gemm", "experts", rank=rank):
            for expert, part in _blocks(routed, rank):
                experts.project_up(expert, rows[part], z[part])
                a = rows.new_empty(part.stop - part.start, experts.ffn)
                activate(z[part], experts.style, a)
                experts.project_down(expert, a, h[part])
        back = _back(comm, "moe_ffn", h, routed)
    y, kept = sum_choices(back, routed.slot, weights, keep_choices)
    return [y, rows if keep_rows else nothing, z if keep_rows else nothing.clone(), kept]


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
    rank, op = comm.rank, "moe_ffn_backward"
    a, dz = z.new_empty(z.shape[0], experts.ffn), torch.empty_like(z)
    back = None
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        dh = _there(comm, op, dy, routed.scale(weights), routed)
        dx_rows = torch.zeros_like(dh)
        with span("gemm", "gradients of the experts", rank=rank):
            for expert, part in _blocks(routed, rank):
                torch.mm(dh[part], experts.down(expert).t(), out=a[part])
                activate_backward(z[part], a[part], experts.style, a[part], dz[part])
                if need_x:
                    torch.mm(dz[part], experts.up(expert).t(), out=dx_rows[part])
            grads = experts_grads(dh, a, dz, x_rows, experts, routed, rank, needs)
        if need_x:
            back = _back(comm, op, dx_rows, routed)
    dx = None if back is None else sum_choices(back, routed.slot, None, False)[0]
    return [dx, *grads]


def moe_ffn_choices(
    comm: Communicator, plan: Plan, z: Tensor, experts: Experts, routed: Routed
) -> Tensor:
    h = z.new_zeros(z.shape[0], experts.hidden)
    with span("gemm", "experts again", rank=comm.rank):
        for expert, part in _blocks(routed, comm.rank):
            a = z.new_empty(part.stop - part.start, experts.ffn)
            activate(z[part], experts.style, a)
            experts.project_down(expert, a, h[part])
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        back = _back(comm, "moe_ffn_backward", h, routed)
    return sum_choices(back, routed.slot, None, True)[1]


def _there(comm: Communicator, op: str, x: Tensor, scale: Tensor | None, routed: Routed) -> Tensor:
    """This rank's rows, in their order, padding zeroed."""
    splits, own = _splits(comm, routed)
    some = sum(splits)  # behind them are the choices of no expert, whose rows nobody may read
    sent = x.index_select(0, routed.tokens[:some])
    if scale is not None:
        sent = (sent * scale[:some]).to(x.dtype)
    arrived = x.new_empty(sum(own), x.shape[1])
    _exchange(comm, op, arrived, sent, own, splits)
    rows = x.new_zeros(routed.received, x.shape[1])
    rows[_places(comm, routed).to(x.device)] = arrived
    return rows


def _back(comm: Communicator, op: str, h: Tensor, routed: Routed) -> Tensor:
    """This rank's rows come back, in the order in which they were sent."""
    splits, own = _splits(comm, routed)
    leaving = h.index_select(0, _places(comm, routed).to(h.device))
    back = h.new_empty(sum(splits), h.shape[1])
    _exchange(comm, op, back, leaving, splits, own)
    return back


def _exchange(
    comm: Communicator,
    op: str,
    out: Tensor,
    rows: Tensor,
    out_splits: list[int],
    in_splits: list[int],
) -> None:
    comm.calls.await_peers(op)
    with span("copy", "all-to-all", rank=comm.rank):
        comm.torch.run(
            op,
            lambda: dist.all_to_all_single(
                out, rows, out_splits, in_splits, group=comm.group, async_op=True
            ),
        )


def _splits(comm: Communicator, routed: Routed) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to every rank, and rows that it gets from every rank."""
    layout, own = routed.layout, routed.layout.placement.columns(comm.rank)
    starts = np.asarray(layout.placement.starts)
    behind = np.concatenate([[0], np.cumsum(layout.counts_WE[comm.rank])])
    sent = behind[starts[1:]] - behind[starts[:-1]]
    return sent.tolist(), layout.counts_WE[:, own.start : own.stop].sum(1).tolist()


def _places(comm: Communicator, routed: Routed) -> Tensor:
    """The row of everything that arrives, which is ordered by (source, expert, token)."""
    own = routed.layout.placement.columns(comm.rank)
    counts = routed.layout.counts_WE[:, own.start : own.stop].reshape(-1)
    firsts = routed.layout.first_row_WE[:, own.start : own.stop].reshape(-1)
    shift = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    return torch.from_numpy(shift + np.arange(len(shift)))


def _blocks(routed: Routed, rank: int) -> list[tuple[int, slice]]:
    """Every expert of a rank that has rows, and these."""
    layout = routed.layout
    return [
        (expert, slice(first, first + count))
        for expert, column in enumerate(layout.placement.columns(rank))
        for first, count in [(int(layout.first_row_E[column]), int(layout.counts_E[column]))]
        if count
    ]
