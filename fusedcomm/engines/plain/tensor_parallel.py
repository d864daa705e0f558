"""Tensor-parallel operations without overlap, on torch.distributed's collectives.

The functions, arguments and results are those of ``engines.host.tensor_parallel``. This engine
serves any device and any distance, and is what the overlapped engines are compared with. What its
sums promise (order, rounding) is what torch.distributed's backend promises. Ranks that share no
memory have no boards to compare: where they disagree, torch.distributed decides how that shows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from fusedcomm.communicator import Communicator
from fusedcomm.engines.plain.collectives import (
    all_gather_rows,
    all_reduce_in_place,
    reduce_scatter_rows,
)
from fusedcomm.planning.tensor_parallel import Plan
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
    gathered = _gather(comm, "all_gather_linear", plan, x, bounds)
    with span("gemm", "all rows", rank=comm.rank):
        ys = [F.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)]
    return [*ys, gathered] if return_gathered else ys


def all_gather_weight_grad(
    comm: Communicator, plan: Plan, x: Tensor, dys: list[Tensor], bounds: Bounds
) -> list[Tensor]:
    gathered = _gather(comm, "all_gather_weight_grad", plan, x, bounds)
    with span("gemm", "weight gradient", rank=comm.rank):
        return [dy.t() @ gathered for dy in dys]


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
    op = "linear_reduce_scatter"
    partial = _partial(comm, xs, weights, init, wire)
    text = f"{plan.text}, bias {bias is not None}"
    with comm.collective(text), span("copy", "reduce-scatter", rank=comm.rank):
        own = reduce_scatter_rows(comm, op, partial, bounds)
    return _finish(own, bias, xs[0].dtype)


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
    gathered = _gather(comm, "linear_reduce_scatter_backward", plan, dy, bounds)
    with span("gemm", "gradients", rank=comm.rank):
        return (
            gathered @ weight if need_x else None,
            gathered.t() @ x if need_weight else None,
            gathered.sum(0) if need_bias else None,
        )


def linear_all_reduce(
    comm: Communicator,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    op = "linear_all_reduce"
    partial = _partial(comm, xs, weights, None, wire)
    text = f"{plan.text}, bias {bias is not None}"
    with comm.collective(text), span("copy", "all-reduce", rank=comm.rank):
        all_reduce_in_place(comm, op, partial)
    return _finish(partial, bias, xs[0].dtype)


def _gather(comm: Communicator, op: str, plan: Plan, shard: Tensor, bounds: Bounds) -> Tensor:
    with comm.collective(plan.text), span("copy", "all-gather", rank=comm.rank):
        return all_gather_rows(comm, op, shard, bounds)


def _partial(
    comm: Communicator,
    xs: list[Tensor],
    weights: list[Tensor],
    init: Tensor | None,
    wire: torch.dtype,
) -> Tensor:
    with span("gemm", "partial", rank=comm.rank):
        parts = [F.linear(x.to(wire), w.to(wire)) for x, w in zip(xs, weights, strict=True)]
        total = parts[0] if init is None else parts[0] + init
        for part in parts[1:]:
            total = total + part
        return total


def _finish(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias).to(dtype)
