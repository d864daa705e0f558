"""Launches of an all-gather: rows are sent to all peers; products read them as they come."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.engines.triton.arguments import Bounds, blocks
from fusedcomm.engines.triton.config import compiler_options, tiles_of
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.kernels import all_gather_linear as kernels
from fusedcomm.planning.tensor_parallel import Plan
from fusedcomm.schedule import successors


def send_rows(launch: Launch, plan: Plan, x: Tensor, cut: dict[str, int]) -> None:
    """Send this rank's rows to all peers, by a kernel or by copy engine."""
    if plan.copies:
        _copy(launch, x, cut)
    else:
        _push(launch, x, cut)


def _copy(launch: Launch, x: Tensor, cut: dict[str, int]) -> None:
    """Copies run beside the launches that follow; ``launch.join`` ends that.

    Raises: ready[s][me][piece] on every peer, one after the other (``begin`` awaited consumed).
    """
    row_bytes = x.shape[1] * x.dtype.itemsize
    for peer in successors(launch.rank, launch.world_size):
        for piece in range(cut["pieces"]):
            start = min(piece * cut["piece_rows"], x.shape[0])
            rows = x[start : start + cut["piece_rows"]]
            launch.copy(peer, start * row_bytes, rows, piece)


def _push(launch: Launch, x: Tensor, cut: dict[str, int]) -> None:
    depth = 64
    rows = min(cut["piece_rows"], 64)
    programs = (launch.world_size - 1) * cut["pieces"] * blocks(cut["piece_rows"], rows)
    if not programs:
        return
    launch.run(
        kernels.push_kernel,
        programs,
        "copy",
        "push own rows",
        x=x,
        counters=launch.counters(launch.world_size * cut["pieces"]),
        rows=x.shape[0],
        piece_rows=cut["piece_rows"],
        pieces=cut["pieces"],
        K=x.shape[1],
        BM=rows,
        BK=depth,
        record=launch.record,
        **launch.ranks,
        **launch.flags,
    )


def keep_rows(launch: Launch, x: Tensor, bounds: Bounds, gathered: Tensor) -> None:
    """Copy the gathered rows out of the slot, behind a launch that awaited all of them."""
    for source, (start, stop) in enumerate(bounds):
        shape = (stop - start, x.shape[1])
        own = source == launch.rank
        workspace, slot = launch.workspace, launch.slot
        part = x if own else workspace.part(launch.rank, slot, source, shape, x.dtype)
        gathered[start:stop] = part


def weight_grad(
    launch: Launch,
    x: Tensor,
    other: Tensor,
    grad: Tensor,
    strides: tuple[int, int],
    cut: dict[str, int],
    total: int,
) -> None:
    """``grad[n, k] = Σ_t other[t, n] · gathered(x)[t, k]``, stored with ``strides`` (n, k)."""
    rows, columns = other.shape[1], x.shape[1]
    tiles = tiles_of(x.device, x.dtype, rows, columns, cut["shard_rows"], "gradient")
    launch.run(
        kernels.weight_grad_kernel,
        blocks(rows, tiles.rows) * blocks(columns, tiles.columns),
        "gemm",
        "weight gradient",
        x=x,
        other=other,
        grad=grad,
        total_rows=total,
        N=rows,
        K=columns,
        stride_on=other.stride(1),
        stride_om=other.stride(0),
        stride_gn=strides[0],
        stride_gk=strides[1],
        BM=tiles.depth,
        BN=tiles.rows,
        BK=tiles.columns,
        PRECISION="ieee",
        **compiler_options(tiles),
        **cut,
        **launch.ranks,
        **launch.flags,
        **launch.waits,
    )
