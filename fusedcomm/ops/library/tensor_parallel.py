"""The tensor-parallel operations as torch custom ops: shapes for tracing, and their gradients.

These are the 2-D forms: rows are ``size`` tokens times ``inner``, the flattened extents between the
cut dimension and the features. ``group`` and ``channel`` name a communicator. The public functions,
with argument checks, are in ``fusedcomm.ops.tensor_parallel``.

Gradients follow DTensor: a replicated tensor is one value, its gradient equal on all ranks.
With X = gathered x and dY = gathered dy:

===================== ================================ ========= =================
op                    input                            weight    bias
===================== ================================ ========= =================
all_gather_linear     reduce-scatter of dy · weight    dyᵀ · X   column sums of dy
linear_reduce_scatter dY · weight                      dYᵀ · x   column sums of dY
linear_all_reduce     dy · weight                      dyᵀ · x   column sums of dy
replicated_linear     all-reduce of dy · weight        dyᵀ · x   column sums of dy
===================== ================================ ========= =================

The gradient of one of the first two is the other, so the backward pass overlaps as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.ops.library.effects import communicates
from fusedcomm.planning.tensor_parallel import Plan, plan
from fusedcomm.schedule import scaled_bounds


class _Run(NamedTuple):
    """One call, decided: who, how, and on which rows."""

    comm: Communicator
    plan: Plan
    bounds: list[tuple[int, int]]
    engine: ModuleType


def _decide(
    op: str,
    like: Tensor,
    features: int,
    size: int,
    inner: int,
    where: tuple[str, str, str],
    wire: torch.dtype | None = None,
) -> _Run:
    group, channel, engine = where
    comm = Communicator.named(group, channel)
    chosen = plan(
        comm,
        op,
        size,
        inner,
        features=features,
        dtype=like.dtype,
        wire=wire or like.dtype,
        device=like.device,
        engine=engine,
    )
    bounds = scaled_bounds(size, comm.world_size, inner)
    # The host engine's functions serve several domains as well.
    several = chosen.engine == "triton" and comm.inside is not None
    engine = "across" if several else chosen.engine
    return _Run(comm, chosen, bounds, operations_of(engine, "tensor_parallel"))


def _own_rows(group: str, channel: str, size: int, inner: int) -> int:
    comm = Communicator.named(group, channel)
    start, stop = scaled_bounds(size, comm.world_size, inner)[comm.rank]
    return stop - start


def _spread(biases: Sequence[Tensor], biased: int, count: int) -> list[Tensor | None]:
    present = iter(biases)
    return [next(present) if biased >> i & 1 else None for i in range(count)]


def _bias_grads(dys: list[Tensor], biased: int, needs: Sequence[bool]) -> list[Tensor | None]:
    with_bias = [dy for i, dy in enumerate(dys) if biased >> i & 1]
    return [_column_sums(dy) if need else None for dy, need in zip(with_bias, needs, strict=True)]


def _column_sums(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)


@communicates
@torch.library.custom_op("fusedcomm::all_gather_linear", mutates_args=())
def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    size: int,
    inner: int,
    biased: int,
    keep_gathered: bool,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """One y per weight, then the gathered x if it is kept.

    Bit i of ``biased`` says whether ``biases`` has an entry for ``weights[i]``: torch's autograd
    for custom ops takes lists of tensors, not of optional ones.
    """
    where = (group, channel, engine)
    run = _decide("all_gather_linear", x, x.shape[1], size, inner, where)
    return run.engine.all_gather_linear(
        run.comm,
        run.plan,
        x,
        list(weights),
        _spread(biases, biased, len(weights)),
        run.bounds,
        keep_gathered,
    )


@all_gather_linear.register_fake
def _(x, weights, biases, size, inner, biased, keep_gathered, group, channel, engine):
    rows = size * inner
    ys = [x.new_empty(rows, weight.shape[0]) for weight in weights]
    return [*ys, x.new_empty(rows, x.shape[1])] if keep_gathered else ys


def _all_gather_linear_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weights, _, size, inner, biased, kept, *where = inputs
    ctx.size, ctx.inner, ctx.where, ctx.kept = size, inner, where, kept
    ctx.biased = biased
    ctx.save_for_backward(output[-1] if kept else x, *weights)


def _all_gather_linear_backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    source, *weights = ctx.saved_tensors
    d_gathered = grads[-1] if ctx.kept else None
    dys = [
        weight.new_zeros(ctx.size * ctx.inner, weight.shape[0]) if dy is None else dy
        for dy, weight in zip(grads, weights, strict=False)
    ]
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    dx = None
    if needs_x:
        transposed = [weight.t() for weight in weights]
        dx = linear_reduce_scatter_sum(dys, transposed, d_gathered, ctx.size, ctx.inner, *ctx.where)
    dws: list[Tensor | None] = [None] * len(weights)
    wanted = [i for i, needed in enumerate(needs_weights) if needed]
    if wanted:
        chosen = [dys[i] for i in wanted]
        if ctx.kept:
            found = [dy.t() @ source for dy in chosen]
        else:
            found = all_gather_weight_grad(source, chosen, ctx.size, ctx.inner, *ctx.where)
        for i, dw in zip(wanted, found, strict=True):
            dws[i] = dw
    dbs = _bias_grads(dys, ctx.biased, needs_biases)
    return dx, dws, dbs, None, None, None, None, None, None, None


all_gather_linear.register_autograd(
    _all_gather_linear_backward, setup_context=_all_gather_linear_setup
)


@communicates
@torch.library.custom_op("fusedcomm::all_gather_weight_grad", mutates_args=())
def all_gather_weight_grad(
    x: Tensor,
    dys: Sequence[Tensor],
    size: int,
    inner: int,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """``dyᵀ · X`` for every dy."""
    where = (group, channel, engine)
    run = _decide("all_gather_weight_grad", x, x.shape[1], size, inner, where)
    return run.engine.all_gather_weight_grad(run.comm, run.plan, x, list(dys), run.bounds)


@all_gather_weight_grad.register_fake
def _(x, dys, size, inner, group, channel, engine):
    return [x.new_empty(dy.shape[1], x.shape[1]) for dy in dys]


@communicates
@torch.library.custom_op("fusedcomm::linear_reduce_scatter", mutates_args=())
def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wire_dtype: torch.dtype | None,
    size: int,
    inner: int,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """This rank's rows of the sum over ranks of ``x · weightᵀ``, plus the bias."""
    where = (group, channel, engine)
    features = weight.shape[0]
    run = _decide("linear_reduce_scatter", x, features, size, inner, where, wire_dtype)
    return run.engine.linear_reduce_scatter(
        run.comm, run.plan, [x], [weight], bias, None, run.bounds, wire_dtype or x.dtype
    )


@linear_reduce_scatter.register_fake
def _(x, weight, bias, wire_dtype, size, inner, group, channel, engine):
    return x.new_empty(_own_rows(group, channel, size, inner), weight.shape[0])


def _linear_reduce_scatter_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, _, size, inner, *where = inputs
    ctx.size, ctx.inner, ctx.where = size, inner, where
    ctx.save_for_backward(x, weight)


def _linear_reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = linear_reduce_scatter_grads(dy, x, weight, needs, ctx.size, ctx.inner, *ctx.where)
    dx, dw, db = (grad if needed else None for grad, needed in zip(found, needs, strict=True))
    return dx, dw, db, None, None, None, None, None, None


linear_reduce_scatter.register_autograd(
    _linear_reduce_scatter_backward, setup_context=_linear_reduce_scatter_setup
)


@communicates
@torch.library.custom_op("fusedcomm::linear_reduce_scatter_sum", mutates_args=())
def linear_reduce_scatter_sum(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    init: Tensor | None,
    size: int,
    inner: int,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """``linear_reduce_scatter`` of a sum of products and of ``init``, each rank's own."""
    where = (group, channel, engine)
    run = _decide("linear_reduce_scatter", xs[0], weights[0].shape[0], size, inner, where)
    return run.engine.linear_reduce_scatter(
        run.comm, run.plan, list(xs), list(weights), None, init, run.bounds, xs[0].dtype
    )


@linear_reduce_scatter_sum.register_fake
def _(xs, weights, init, size, inner, group, channel, engine):
    return xs[0].new_empty(_own_rows(group, channel, size, inner), weights[0].shape[0])


@communicates
@torch.library.custom_op("fusedcomm::linear_reduce_scatter_grads", mutates_args=())
def linear_reduce_scatter_grads(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    size: int,
    inner: int,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """dx, dw and db of ``linear_reduce_scatter``; empty tensors for those not needed."""
    where = (group, channel, engine)
    op = "linear_reduce_scatter_backward"
    run = _decide(op, dy, dy.shape[1], size, inner, where)
    found = run.engine.linear_reduce_scatter_backward(
        run.comm, run.plan, dy, x, weight, run.bounds, *needs
    )
    return [dy.new_empty(0) if grad is None else grad for grad in found]


@linear_reduce_scatter_grads.register_fake
def _(dy, x, weight, needs, size, inner, group, channel, engine):
    shapes = [x.shape, weight.shape, dy.shape[1:]]
    return [
        dy.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True)
    ]


@communicates
@torch.library.custom_op("fusedcomm::linear_all_reduce", mutates_args=())
def linear_all_reduce(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    wire_dtype: torch.dtype | None,
    group: str,
    channel: str,
    engine: str,
) -> Tensor:
    """The sum over ranks of ``Σ xs · weightsᵀ``, plus the bias, on every rank."""
    x, features = xs[0], weights[0].shape[0]
    where = (group, channel, engine)
    run = _decide("linear_all_reduce", x, features, x.shape[0], 1, where, wire_dtype)
    return run.engine.linear_all_reduce(
        run.comm, run.plan, list(xs), list(weights), bias, run.bounds, wire_dtype or x.dtype
    )


@linear_all_reduce.register_fake
def _(xs, weights, bias, wire_dtype, group, channel, engine):
    return xs[0].new_empty(xs[0].shape[0], weights[0].shape[0])


def _linear_all_reduce_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    xs, weights, *_ = inputs
    ctx.save_for_backward(*xs, *weights)


def _linear_all_reduce_backward(ctx: Any, dy: Tensor) -> tuple:
    needs_xs, needs_weights, needs_bias = ctx.needs_input_grad[:3]
    saved = ctx.saved_tensors  # read once: checkpointing unpacks at each look
    xs, weights = saved[: len(needs_xs)], saved[len(needs_xs) :]
    dxs = [dy @ w if needed else None for w, needed in zip(weights, needs_xs, strict=True)]
    dws = [dy.t() @ x if needed else None for x, needed in zip(xs, needs_weights, strict=True)]
    return dxs, dws, _column_sums(dy) if needs_bias else None, None, None, None, None


linear_all_reduce.register_autograd(
    _linear_all_reduce_backward, setup_context=_linear_all_reduce_setup
)


@torch.library.custom_op("fusedcomm::replicated_linear", mutates_args=())
def replicated_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: int,
    group: str,
    channel: str,
    engine: str,
) -> list[Tensor]:
    """``x · weightᵀ + bias`` of an x that all ranks have; only the gradient communicates."""
    spread = _spread(biases, biased, len(weights))
    return [F.linear(x, w, b) for w, b in zip(weights, spread, strict=True)]


@replicated_linear.register_fake
def _(x, weights, biases, biased, group, channel, engine):
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


def _replicated_linear_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weights, _, biased, *where = inputs
    ctx.where = where
    ctx.biased = biased
    ctx.save_for_backward(x, *weights)


def _replicated_linear_backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    x, *weights = ctx.saved_tensors
    dys = [
        weight.new_zeros(x.shape[0], weight.shape[0]) if dy is None else dy
        for dy, weight in zip(grads, weights, strict=True)
    ]
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    dx = None
    if needs_x:
        dx = linear_all_reduce(dys, [weight.t() for weight in weights], None, None, *ctx.where)
    dws = [dy.t() @ x if needed else None for dy, needed in zip(dys, needs_weights, strict=True)]
    dbs = _bias_grads(dys, ctx.biased, needs_biases)
    return dx, dws, dbs, None, None, None, None


replicated_linear.register_autograd(
    _replicated_linear_backward, setup_context=_replicated_linear_setup
)
