"""Tensor-parallel operations on the host engine.

====================== ======================================= =====================================
operation              this rank has                           this rank gets
====================== ======================================= =====================================
all_gather_linear      x [T/W, K], weight [N/W, K]             y [T, N/W] = all x · weightᵀ
linear_reduce_scatter  x [T, K/W], weight [N, K/W]             y [T/W, N], its rows of the sum
linear_all_reduce      the same                                y [T, N], the sum over ranks
====================== ======================================= =====================================

Every function is one call on the communicator: announced on the board with all that must be equal
on every rank, then carried out by ``gather`` and ``scatter``, which hold the protocol; ``group``
puts them together where the group has several domains.
"""

from __future__ import annotations

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.combining import add_in_order
from fusedcomm.engines.host.gather import describe
from fusedcomm.engines.host.group import gather, reduce_scatter
from fusedcomm.engines.products import add_linears, linear_into, sum_of_linears
from fusedcomm.planning.tensor_parallel import Plan, one_shot_space
from fusedcomm.schedule import successors
from fusedcomm.trace import span

Tensor = torch.Tensor
Bounds = list[tuple[int, int]]


def all_gather_linear(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    bounds: Bounds,
    return_gathered: bool,
) -> list[Tensor]:
    """``y_i = gathered(x) · weights[i]ᵀ + biases[i]``, then the gathered x if asked for."""
    op, total, features = "all_gather_linear", bounds[-1][1], x.shape[1]
    ys = [x.new_empty(total, weight.shape[0]) for weight in weights]
    whole = not plan.chunked and comm.world_size > 1
    gathered = x.new_empty(total, features) if whole or return_gathered else None
    with comm.collective(plan.text + describe(comm, x)):
        for start, stop, rows in gather(comm, op, x, bounds, plan.pieces):
            if gathered is not None:
                with span("copy", "keep", rank=comm.rank):
                    gathered[start:stop].copy_(rows)
            if not whole:
                _linears(comm, ys, start, stop, rows, weights, biases)
        if whole and gathered is not None:
            _linears(comm, ys, 0, total, gathered, weights, biases)
    return [*ys, gathered] if return_gathered and gathered is not None else ys


def _linears(
    comm: Communicator,
    ys: list[Tensor],
    start: int,
    stop: int,
    rows: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> None:
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        with span("gemm", f"rows {start}:{stop}", rank=comm.rank):
            linear_into(y[start:stop], rows, weight, bias)


def all_gather_weight_grad(
    comm: Communicator, plan: Plan, x: Tensor, dys: list[Tensor], bounds: Bounds
) -> list[Tensor]:
    """``dw_i = dys[i]ᵀ · gathered(x)``, chunk by chunk as the chunks arrive."""
    op, features = "all_gather_weight_grad", x.shape[1]
    grads = [dy.new_zeros(dy.shape[1], features) for dy in dys]
    with comm.collective(plan.text + describe(comm, x)):
        for start, stop, rows in gather(comm, op, x, bounds, plan.pieces):
            for grad, dy in zip(grads, dys, strict=True):
                with span("gemm", f"weight gradient {start}:{stop}", rank=comm.rank):
                    grad.addmm_(dy[start:stop].t(), rows)
    return grads


def linear_reduce_scatter(
    comm: Communicator,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    """This rank's rows of ``Σ_ranks (init + Σ_i xs[i] · weights[i]ᵀ) + bias``."""
    op = "linear_reduce_scatter"
    with comm.collective(f"{plan.text}, bias {bias is not None}"):
        return _reduce_rows(comm, op, plan, xs, weights, bias, init, bounds, wire)


def _reduce_rows(
    comm: Communicator,
    op: str,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    total, features, dtype = xs[0].shape[0], weights[0].shape[0], xs[0].dtype
    accumulate = None
    if plan.chunked:

        def partial(start: int, stop: int, out: Tensor) -> None:
            rows = None if init is None else init[start:stop]
            sum_of_linears(out, [x[start:stop] for x in xs], weights, rows)

        def add(start: int, stop: int, out: Tensor) -> None:
            add_linears(out, [x[start:stop] for x in xs], weights)

        if wire == dtype and init is None:
            accumulate = add
    else:
        whole = torch.empty(total, features, dtype=wire)
        with span("gemm", "all rows", rank=comm.rank):
            sum_of_linears(whole, xs, weights, init)

        def partial(start: int, stop: int, out: Tensor) -> None:
            out.copy_(whole[start:stop])

    return reduce_scatter(
        comm,
        op,
        partial,
        accumulate,
        bounds=bounds,
        features=features,
        wire=wire,
        dtype=dtype,
        bias=bias,
        pieces=plan.pieces,
    )


def linear_reduce_scatter_backward(
    comm: Communicator,
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bounds: Bounds,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """From this rank's rows of dy: ``dx = gathered(dy) · weight``, ``dw = gathered(dy)ᵀ · x``
    and the bias's gradient, the column sums of the gathered dy."""
    op, total, features = "linear_reduce_scatter_backward", x.shape[0], dy.shape[1]
    dx = x.new_empty(total, weight.shape[1]) if need_x else None
    dw = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    wide = torch.promote_types(dy.dtype, torch.float32)
    # By row range, and added in the order of rows at last: all ranks hold the bias, and must come
    # to the same gradient, but rows come in another order on each.
    sums = {0: torch.zeros(features, dtype=wide)}
    with comm.collective(plan.text + describe(comm, dy)):
        for start, stop, rows in gather(comm, op, dy, bounds, plan.pieces):
            if dx is not None:
                with span("gemm", f"input gradient {start}:{stop}", rank=comm.rank):
                    torch.mm(rows, weight, out=dx[start:stop])
            if dw is not None:
                with span("gemm", f"weight gradient {start}:{stop}", rank=comm.rank):
                    dw.addmm_(rows.t(), x[start:stop])
            if need_bias and stop > start:
                sums[start] = rows.sum(0, dtype=wide)
    db = torch.stack([sums[start] for start in sorted(sums)]).sum(0) if need_bias else None
    return dx, dw, None if db is None else db.to(dy.dtype)


def linear_all_reduce(
    comm: Communicator,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    """``Σ_ranks Σ_i xs[i] · weights[i]ᵀ + bias``, bitwise equal on every rank."""
    op, total, features = "linear_all_reduce", xs[0].shape[0], weights[0].shape[0]
    with comm.collective(f"{plan.text}, bias {bias is not None}"):
        if plan.one_shot:
            return _one_shot(comm, op, xs, weights, bias, wire)
        reduced = _reduce_rows(comm, op, plan, xs, weights, bias, None, bounds, wire)
        result = reduced.new_empty(total, features)
        for start, stop, rows in gather(comm, op, reduced, bounds, plan.pieces):
            with span("copy", f"rows {start}:{stop}", rank=comm.rank):
                result[start:stop].copy_(rows)
        return result


def _one_shot(
    comm: Communicator,
    op: str,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    wire: torch.dtype,
) -> Tensor:
    """Every rank reads all partials and adds them in the order of ranks: one exchange.

    Flags: ready[me][0] on each peer, awaited there by this function; consumed likewise.
    """
    rank, world_size = comm.rank, comm.world_size
    shape = (xs[0].shape[0], weights[0].shape[0])
    if world_size == 1:
        own = torch.empty(shape, dtype=wire)
        sum_of_linears(own, xs, weights)
        return add_in_order([own], bias, xs[0].dtype)
    peers = successors(rank, world_size)
    call = comm.memory.take(op, one_shot_space(shape[0], shape[1] * wire.itemsize))
    for peer in peers:
        call.await_reader(peer)
    own = call.write(rank, 0, shape, wire)
    with span("gemm", "partial", rank=rank, signal=call.flag(rank, 0)):
        sum_of_linears(own, xs, weights)
    for peer in peers:
        call.signal(peer)
    for peer in peers:
        with span("wait", f"wait for rank {peer}", rank=rank, awaits=call.flag(peer, 0)):
            call.wait(peer)
    parts = [own if s == rank else call.read(s, 0, shape, wire) for s in range(world_size)]
    with span("reduce", "add the partials", rank=rank):
        result = add_in_order(parts, bias, xs[0].dtype)
    for peer in peers:
        call.consumed(peer)
    return result
