"""All-reduce and reduce-scatter on the Triton engine: pushed and added, round a ring, by a switch.

Each function is one call or, for a tensor larger than a slot may be, one call per window of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.exchanging import alignment, alone, common, numbers, windows
from fusedcomm.engines.triton.launch import launches
from fusedcomm.errors import FusedcommError
from fusedcomm.kernels import collectives as kernels
from fusedcomm.kernels import multimem, ring_all_reduce
from fusedcomm.planning import exchanges
from fusedcomm.planning.collectives import Plan
from fusedcomm.planning.exchanges import exchange_space, part_of, pieces_of

Bounds = list[tuple[int, int]]

#: In what the elements of each dtype are reduced.
_WIDE = {
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


def all_reduce(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    """``out = reduction over ranks of x``, bitwise equal on every rank; both flat."""
    if comm.world_size == 1:
        alone(comm, plan, x, out)
        return
    x, out = numbers(x), numbers(out)
    run = {
        "one_shot": _one_shot,
        "two_shot": _two_shot,
        "ring": _ring,
        "multimem": _multimem,
    }[plan.algorithm]
    shares = 1 if plan.algorithm == "one_shot" else comm.world_size
    for start, stop in windows(x.numel(), shares * exchanges.WINDOW_BYTES // x.dtype.itemsize):
        run(comm, plan, x[start:stop], out[start:stop], reduction)


def reduce_scatter(
    comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds, reduction: str
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``, added in the order of ranks."""
    if comm.world_size == 1:
        alone(comm, plan, x, out)
        return
    x, out = numbers(x), numbers(out)
    rows = x.shape[0]
    if rows > 1:
        x = torch.cat([x[:, start:stop].reshape(-1) for start, stop in bounds])
    shard = bounds[0][1] * rows
    x, out = x.reshape(-1), out.view(-1)
    for start, stop in windows(shard, exchanges.WINDOW_BYTES // x.dtype.itemsize):
        _reduce(
            comm, plan, "reduce_scatter", x[start:], out[start:stop], reduction, shard, stop - start
        )


def _one_shot(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    _reduce(comm, plan, "all_reduce", x, out, reduction, 0, x.numel())


def _reduce(
    comm: Communicator,
    plan: Plan,
    op: str,
    x: Tensor,
    out: Tensor,
    reduction: str,
    stride: int,
    size: int,
) -> None:
    """out = this rank's part of x reduced; parts of ``size`` elements, ``stride`` apart."""
    cut = pieces_of(x.device, size)
    space = exchange_space(comm.world_size, size * x.dtype.itemsize, cut.number)
    pushes = (comm.world_size - 1) * cut.number
    with launches(comm, op, space, plan.text, x.device) as launch:
        # See the kernel: a rank that reduces into x must have pushed all of it.
        parts = [(0, pushes), (pushes, cut.number)]
        whole = [(0, pushes + cut.number)]
        for skip, programs in parts if out.data_ptr() == x.data_ptr() else whole:
            launch.run(
                kernels.reduce_kernel,
                programs,
                "reduce",
                "push and add",
                x=x,
                out=out,
                stride=stride,
                size=size,
                total=x.numel(),
                skip=skip,
                ALIGN=min(alignment(x, stride), alignment(out, 0)),
                **_reduction(x.dtype, reduction, comm.world_size),
                **common(launch, cut),
            )


def _reduction(dtype: torch.dtype, reduction: str, world_size: int) -> dict[str, Any]:
    return {"OP": reduction, "ACC": _WIDE[dtype], "scale": 1 / world_size}


def _two_shot(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    size = part_of(x.numel(), comm.world_size)
    cut = pieces_of(x.device, size)
    space = exchange_space(comm.world_size, 2 * size * x.dtype.itemsize, 2 * cut.number)
    programs = (2 * comm.world_size - 1) * cut.number
    with launches(comm, "all_reduce", space, plan.text, x.device) as launch:
        launch.run(
            kernels.two_shot_kernel,
            programs,
            "reduce",
            "push, add, take",
            x=x,
            out=out,
            size=size,
            total=x.numel(),
            ALIGN=min(alignment(x, 0), alignment(out, 0)),
            **_reduction(x.dtype, reduction, comm.world_size),
            **common(launch, cut),
        )


def _ring(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    world_size = comm.world_size
    size = part_of(x.numel(), world_size)
    cut = pieces_of(x.device, size, ring=True)
    chunks = 2 * world_size * cut.number
    space = exchange_space(world_size, world_size * size * x.dtype.itemsize, chunks)
    with launches(comm, "all_reduce", space, plan.text, x.device) as launch:
        launch.run(
            ring_all_reduce.ring_kernel,
            cut.number,
            "reduce",
            "round the ring",
            x=x,
            out=out,
            size=size,
            total=x.numel(),
            **_reduction(x.dtype, reduction, world_size),
            **common(launch, cut),
        )


def _multimem(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    world_size = comm.world_size
    size = part_of(x.numel(), world_size)
    cut = pieces_of(x.device, size)
    nbytes = world_size * size * x.dtype.itemsize
    space = exchange_space(1, 2 * nbytes, 2 * cut.number)
    with launches(comm, "all_reduce", space, plan.text, x.device) as launch:
        multicast = launch.workspace.segments[comm.rank].multicast
        if multicast is None:
            raise FusedcommError(
                "the topology says that a switch reaches all ranks, but torch has no multicast "
                "pointer for this group's memory"
            )
        chosen = _reduction(x.dtype, reduction, world_size)
        launch.run(
            multimem.multimem_kernel,
            (2 * world_size + 1) * cut.number,
            "reduce",
            "through the switch",
            x=x,
            out=out,
            multicast=multicast,
            size=size,
            total=x.numel(),
            OP=chosen["OP"],
            scale=chosen["scale"],
            **common(launch, cut),
        )
