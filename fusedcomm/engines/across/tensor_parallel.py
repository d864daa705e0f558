"""The tensor-parallel operations of a group of several domains, by kernels inside each.

The functions are those of ``engines.triton.tensor_parallel``, which serve one domain, in two
levels. With N domains of g ranks and a full tensor of S bytes, every byte crosses a border once:

============================== ============================================= ====================
operation                      steps                                         bytes a rank sends
============================== ============================================= ====================
all_gather_linear, its weight  own rows across | own domain's product; then  (N-1)/N S/g
gradient, and the gradients of each other domain's
linear_reduce_scatter
linear_reduce_scatter          each other domain's sums; across | the own    (N-1)/N S/g
                               domain's; add the domains' sums
linear_all_reduce              the same; then own rows across | own          2 (N-1)/N S/g
                               domain's rows; each other domain's
============================== ============================================= ====================

What stands on both sides of ``|`` goes on at the same time. A domain's sum of partial products is
rounded to ``wire`` before it crosses; the domains' are added in float32, in their order, rounded
once, and so equal on all ranks. Gradients of weights stay in float32 up to the end. (The
host engine has its own, ``engines.host.group``: there, rows are taken piece by piece.)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.collectives import gather_columns
from fusedcomm.engines.across.levels import Levels, two_levels
from fusedcomm.engines.across.parts import Bounds, width
from fusedcomm.engines.combining import add_in_order
from fusedcomm.engines.triton import tensor_parallel as inside
from fusedcomm.planning.collectives import Plan as CollectivePlan
from fusedcomm.planning.tensor_parallel import Plan
from fusedcomm.trace import span


def all_gather_linear(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    bounds: Bounds,
    return_gathered: bool,
) -> list[Tensor]:
    total, widths = bounds[-1][1], [weight.shape[0] for weight in weights]
    outs = [x.new_empty(total, size) for size in (*widths, *[x.shape[1]] * return_gathered)]
    with two_levels(comm, plan.text, "all_gather_linear", x.device) as levels:
        for domain, part, shard in levels.shards("rows cross", x, bounds, 0):
            places = [part.place(out) for out in outs]
            inside.all_gather_linear(
                levels.inside, _step(plan, domain), shard, weights, biases, part.inner,
                return_gathered, places,
            )  # fmt: skip
            for out, place in zip(outs, places, strict=True):
                part.put(out, place)
    return outs


def all_gather_weight_grad(
    comm: Communicator, plan: Plan, x: Tensor, dys: list[Tensor], bounds: Bounds
) -> list[Tensor]:
    totals = [_zeros(dy, dy.shape[1], x.shape[1]) for dy in dys]
    with two_levels(comm, plan.text, "all_gather_weight_grad", x.device) as levels:
        for domain, part, shard in levels.shards("rows cross", x, bounds, 0):
            rows = [part.of(dy) for dy in dys]
            grads = [torch.empty_like(total) for total in totals]
            step = _step(plan, domain)
            inside.all_gather_weight_grad(levels.inside, step, shard, rows, part.inner, grads)
            torch._foreach_add_(totals, grads)
    return [total.to(x.dtype) for total in totals]


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
    text = f"{plan.text}, bias {bias is not None}"
    with two_levels(comm, text, "linear_reduce_scatter", xs[0].device) as levels:
        return _reduced(levels, plan, xs, weights, bias, init, bounds, wire)


def _reduced(
    levels: Levels,
    plan: Plan,
    xs: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    init: Tensor | None,
    bounds: Bounds,
    wire: torch.dtype,
) -> Tensor:
    features = weights[0].shape[0]

    def reduce_for(domain: int) -> Tensor:
        part = levels.part(bounds, domain, 0)
        rows = width(bounds[levels.counterparts[domain]])
        return inside.linear_reduce_scatter(
            levels.inside,
            _step(plan, domain),
            [part.of(x) for x in xs],
            weights,
            None,
            None if init is None else part.of(init),
            part.inner,
            wire,
            xs[0].new_empty(rows, features, dtype=wire),
        )

    own_rows = width(bounds[levels.comm.rank])
    sums = levels.sums("sums cross", own_rows * features, reduce_for)
    with span("reduce", "add the domains' sums", rank=levels.comm.rank):
        return add_in_order(sums, bias, xs[0].dtype)


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
    dx = x.new_empty(x.shape[0], weight.shape[1])
    dw = _zeros(weight, *weight.shape)
    # Equal on all ranks, so added in an order that is: that of domains.
    dbs = [_zeros(dy, dy.shape[1]) for _ in comm.topology.domains]
    needs = (need_x, need_weight, need_bias)
    with two_levels(comm, plan.text, "linear_reduce_scatter_backward", dy.device) as levels:
        for domain, part, shard in levels.shards("rows cross", dy, bounds, 0):
            places = (part.place(dx), torch.empty_like(dw), dbs[domain])
            inside.linear_reduce_scatter_backward(
                levels.inside, _step(plan, domain), shard, part.of(x), weight, part.inner,
                *needs, places,
            )  # fmt: skip
            part.put(dx, places[0])
            if need_weight:
                dw += places[1]
    return (
        dx if need_x else None,
        dw.to(weight.dtype) if need_weight else None,
        torch.stack(dbs).sum(0).to(dy.dtype) if need_bias else None,
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
    features = weights[0].shape[0]
    text = f"{plan.text}, bias {bias is not None}"
    with two_levels(comm, text, "linear_all_reduce", xs[0].device) as levels:
        own = _reduced(levels, plan, xs, weights, bias, None, bounds, wire)
        y = own.new_empty(bounds[-1][1], features)
        columns = [(start * features, stop * features) for start, stop in bounds]
        rows = CollectivePlan(f"{text}: rows", plan.engine, "direct", None, plan.reason)
        gather_columns(levels, rows, own.view(1, -1), y.view(1, -1), columns)
    return y


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32)


def _step(plan: Plan, domain: int) -> Plan:
    """The plan of a call inside the domain, on the part that the ranks of one domain have."""
    return replace(plan, text=f"{plan.text}: domain {domain}")
