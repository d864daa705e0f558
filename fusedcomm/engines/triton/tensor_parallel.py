"""Tensor-parallel operations as launches of the kernels.

The functions, arguments and results are those of ``engines.host.tensor_parallel``; but a caller may
say where results go (``outs``: contiguous, of any dtype that the kernels take), to put the parts of
several domains together. Who raises and awaits which flag stands at the head of each file of
``kernels/``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.arguments import (
    Bounds,
    aligned,
    blocks,
    meta,
    product_of,
    segments,
    weight_strides,
)
from fusedcomm.engines.triton.config import compiler_options, reduce_tiles, tiles_of
from fusedcomm.engines.triton.gather import keep_rows, send_rows, weight_grad
from fusedcomm.engines.triton.launch import DTYPES, launches
from fusedcomm.engines.triton.scatter import pairs_of, produce, produce_and_copy
from fusedcomm.kernels import all_gather_linear as gather_kernels
from fusedcomm.kernels import linear_all_reduce as all_reduce_kernels
from fusedcomm.kernels import linear_reduce_scatter as scatter_kernels
from fusedcomm.planning.tensor_parallel import Plan, exchange_space, scatter_space


def all_gather_linear(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    bounds: Bounds,
    return_gathered: bool,
    outs: list[Tensor] | None = None,
) -> list[Tensor]:
    op, total, features = "all_gather_linear", bounds[-1][1], x.shape[1]
    x = aligned(x)
    if outs is None:
        widths = [weight.shape[0] for weight in weights] + [features] * return_gathered
        outs = [x.new_empty(total, width) for width in widths]
    ys, gathered = outs[: len(weights)], outs[-1]
    widest = max(weight.shape[0] for weight in weights)
    tiles = tiles_of(x.device, x.dtype, bounds[0][1], widest, features, product_of(weights[:1]))
    cut = segments(bounds, plan.pieces, tiles.rows)
    space = scatter_space(bounds, features * x.dtype.itemsize, plan.pieces)
    with launches(comm, op, space, plan.text, x.device) as launch:
        send_rows(launch, plan, x, cut)
        for y, weight, bias in zip(ys, weights, biases, strict=True):
            launch.run(
                gather_kernels.consume_kernel,
                launch.programs,
                "gemm",
                "gathered rows",
                x=x,
                weight=weight,
                bias=y if bias is None else bias.contiguous(),
                y=y,
                total_rows=total,
                N=weight.shape[0],
                K=features,
                HAS_BIAS=bias is not None,
                **weight_strides(weight),
                **cut,
                **meta(tiles, features),
                **launch.ranks,
                **launch.flags,
                **launch.waits,
            )
        if return_gathered:
            launch.call(lambda: keep_rows(launch, x, bounds, gathered))
        if plan.copies:
            launch.join()
    return outs


def all_gather_weight_grad(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    dys: list[Tensor],
    bounds: Bounds,
    outs: list[Tensor] | None = None,
) -> list[Tensor]:
    op, total, features = "all_gather_weight_grad", bounds[-1][1], x.shape[1]
    x = aligned(x)
    grads = [dy.new_empty(dy.shape[1], features) for dy in dys] if outs is None else outs
    cut = segments(bounds, plan.pieces, 64)
    space = scatter_space(bounds, features * x.dtype.itemsize, plan.pieces)
    with launches(comm, op, space, plan.text, x.device) as launch:
        send_rows(launch, plan, x, cut)
        for dy, grad in zip(dys, grads, strict=True):
            weight_grad(launch, x, dy, grad, (features, 1), cut, total)
        if plan.copies:
            launch.join()
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
    out: Tensor | None = None,
) -> Tensor:
    op, features = "linear_reduce_scatter", weights[0].shape[0]
    space = scatter_space(bounds, features * wire.itemsize, plan.pieces)
    first, last = bounds[comm.rank]
    y = xs[0].new_empty(last - first, features) if out is None else out
    text = f"{plan.text}, bias {bias is not None}"
    with launches(comm, op, space, text, y.device) as launch:
        make = produce_and_copy if plan.copies else produce
        cut = make(launch, plan, xs, weights, init, bounds, wire)
        if plan.copies:
            # Not behind the reduction: should a copy need a multiprocessor, it must not have to get
            # one beside a kernel that waits for the other ranks' copies.
            launch.join()
        tiles = reduce_tiles(y.device)
        rows, columns = min(cut["piece_rows"], tiles.rows), tiles.columns
        launch.run(
            scatter_kernels.reduce_kernel,
            blocks(y.shape[0], rows) * blocks(features, columns),
            "reduce",
            "add the partials",
            bias=y if bias is None else bias.contiguous(),
            y=y,
            rows=y.shape[0],
            piece_rows=cut["piece_rows"],
            N=features,
            HAS_BIAS=bias is not None,
            WIRE=DTYPES[wire],
            BM=rows,
            BN=columns,
            **compiler_options(tiles),
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
    return y


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
    outs: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    op, total, features = "linear_reduce_scatter_backward", x.shape[0], dy.shape[1]
    dy = aligned(dy)
    if outs is None:
        shapes = ((total, weight.shape[1]), weight.shape, (features,))
        outs = [x.new_empty(shape) for shape in shapes]
    dx, dw, db = outs
    product = product_of([weight.t()])
    tiles = tiles_of(dy.device, dy.dtype, bounds[0][1], weight.shape[1], features, product)
    cut = segments(bounds, plan.pieces, tiles.rows)
    space = scatter_space(bounds, features * dy.dtype.itemsize, plan.pieces)
    gathered = dy.new_empty(total, features) if need_bias else None
    with launches(comm, op, space, plan.text, dy.device) as launch:
        send_rows(launch, plan, dy, cut)
        # Both kernels await every segment, so that what follows may read the slot.
        launch.run(
            gather_kernels.consume_kernel,
            launch.programs,
            "gemm",
            "input gradient",
            x=dy,
            weight=weight,
            bias=dx,
            y=dx,
            total_rows=total,
            N=weight.shape[1],
            K=features,
            HAS_BIAS=False,
            **weight_strides(weight.t()),
            **cut,
            **meta(tiles, features),
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
        if need_weight:
            # grad[n, k] with n this rank's features of x: stored transposed.
            strides = (dw.stride(1), dw.stride(0))
            weight_grad(launch, dy, x, dw, strides, cut, total)
        if gathered is not None:
            kept = gathered
            launch.call(lambda: keep_rows(launch, dy, bounds, kept))
        if plan.copies:
            launch.join()
    if gathered is not None:
        db.copy_(gathered.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)))
    return (
        dx if need_x else None,
        dw if need_weight else None,
        db if need_bias else None,
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
    op, total, features = "linear_all_reduce", xs[0].shape[0], weights[0].shape[0]
    tensors, numbers, depths = pairs_of(xs, weights)
    x = tensors["x0"]
    y = x.new_empty(total, features)
    tiles = tiles_of(x.device, x.dtype, min(total, 64), features, max(depths))
    count = blocks(total, tiles.rows) * blocks(features, tiles.columns)
    shots = 1 if plan.one_shot else 2
    widest = max(wire.itemsize, x.dtype.itemsize) if shots == 2 else wire.itemsize
    space = exchange_space(total, features, widest, comm.world_size, shots, count)
    kernel = (
        all_reduce_kernels.one_shot_kernel if shots == 1 else all_reduce_kernels.two_shot_kernel
    )
    text = f"{plan.text}, bias {bias is not None}"
    with launches(comm, op, space, text, y.device) as launch:
        launch.run_resident(
            kernel,
            min(count, launch.programs),
            "gemm",
            "partials, exchanged tile by tile",
            bias=y if bias is None else bias.contiguous(),
            y=y,
            M=total,
            N=features,
            HAS_BIAS=bias is not None,
            WIRE=DTYPES[wire],
            **tensors,
            **numbers,
            **meta(tiles, *depths),
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
    return y
