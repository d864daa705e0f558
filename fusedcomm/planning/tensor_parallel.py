"""Which chunking the tensor-parallel operations use, and the memory it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusedcomm.planning.engine import ACROSS, choose_engine
from fusedcomm.protocol import Space
from fusedcomm.schedule import scaled_bounds
from fusedcomm.trace import record_plan

if TYPE_CHECKING:
    from fusedcomm.communicator import Communicator

Bounds = list[tuple[int, int]]

OPS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")

#: Operations, and gradients of some, that gather rows before their product.
_GATHERING = ("all_gather_linear", "all_gather_weight_grad", "linear_reduce_scatter_backward")

#: Bytes of a rank's chunk from which copy engines carry an all-gather between different GPUs: they
#: need no multiprocessor. Below, their start, some microseconds a copy, costs more.
COPIED_BYTES = 1 << 20
#: The same for a reduce-scatter. Its product then is the library's, a call for each chunk; whether
#: that is ever better than a kernel that stores into the owner's memory is to be measured.
COPIED_SCATTER_BYTES: float = math.inf

#: Rows of a rank's chunk from which the GEMM is cut by chunks. Below, the weight's traffic, paid
#: once per chunk, costs more than waiting for all the chunks.
MIN_CHUNK_ROWS = 256
#: Rows and columns of the least tile that kernels exchange on a GPU, each with a flag of its own.
LEAST_TILE = (64, 64)
#: Bytes of one rank's partial result up to which an all-reduce sums all partials on every rank
#: (one exchange) instead of one shard of them each (two exchanges).
ONE_SHOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How one call is carried out.

    Attributes:
        text: what must be equal on every rank, for the board.
        engine: "triton", "host" or "plain".
        chunked: whether the GEMM is cut at the ranks' chunks, and overlaps with them.
        pieces: into how many signalled pieces a rank's chunk is cut.
        one_shot: for an all-reduce, whether every rank sums everything itself.
        copies: for the Triton engine, whether copy engines carry the rows, not kernels.
        reason: a sentence for people.
    """

    text: str
    engine: str
    chunked: bool
    pieces: int
    one_shot: bool
    reason: str
    copies: bool = False


def plan(
    comm: Communicator,
    op: str,
    size: int,
    inner: int,
    *,
    features: int,
    dtype: torch.dtype,
    wire: torch.dtype,
    device: torch.device,
    engine: str,
) -> Plan:
    """The plan for one call.

    Args:
        size, inner: the global rows are ``size`` tokens, the cut dimension, times ``inner``.
        features, dtype, wire: of the rows that cross between ranks, before and while they do.
        engine: what the caller asked for.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    chosen, reason = choose_engine(comm, device, dtype, engine, across=ACROSS)
    bounds = scaled_bounds(size, comm.world_size, inner)
    rows = bounds[0][1]
    chunked = chosen == "triton" or (chosen == "host" and is_chunked(bounds))
    # Between domains every byte should cross once, so there each rank sums its own part.
    summed_everywhere = op == "linear_all_reduce" and chosen != "plain" and comm.inside is None
    one_shot = summed_everywhere and is_one_shot(bounds, features * wire.itemsize)
    if chosen == "host":
        reason += (
            f"; {rows} rows a rank are enough to cut the GEMM at the ranks' chunks"
            if chunked
            else f"; {rows} rows a rank are too few to cut the GEMM: it would read the weight "
            f"{comm.world_size} times"
        )
    copies = False
    if chosen == "triton" and device.type == "cuda" and comm.reach(device).copies:
        copies = is_copied(op, rows * features * wire.itemsize, comm.world_size)
        reason += "; copy engines carry the rows" if copies else "; kernels carry the rows"
    form = "chunked" if chunked else "one-shot" if one_shot else "whole"
    form += ", copied" if copies else ""
    text = f"{op} {dtype} [{size}x{inner}, {features}] as {wire}, engine {chosen} {form}"
    result = Plan(text, chosen, chunked, 1, one_shot, reason, copies)
    record_plan(op, chosen, comm.world_size if chunked else 1, reason)
    return result


def is_chunked(bounds: Bounds) -> bool:
    """Whether the GEMM is worth cutting at the ranks' chunks."""
    return len(bounds) == 1 or bounds[0][1] >= MIN_CHUNK_ROWS


def is_one_shot(bounds: Bounds, row_bytes: int) -> bool:
    """Whether every rank of an all-reduce should add everything itself."""
    return not is_chunked(bounds) and bounds[-1][1] * row_bytes <= ONE_SHOT_BYTES


def is_copied(op: str, chunk_bytes: int, world_size: int) -> bool:
    """Whether copy engines should carry a rank's chunk, between GPUs where they can."""
    if world_size == 1:
        return False
    if op in _GATHERING:
        return chunk_bytes >= COPIED_BYTES
    return op == "linear_reduce_scatter" and chunk_bytes >= COPIED_SCATTER_BYTES


def gather_space(bounds: Bounds, row_bytes: int, pieces: int = 1) -> Space:
    """Every rank offers its chunk in its own memory."""
    return Space("gather", 1, _longest(bounds) * row_bytes, pieces)


def scatter_space(bounds: Bounds, row_bytes: int, pieces: int = 1) -> Space:
    """Every rank writes a part of each chunk into its owner's memory."""
    return Space("scatter", len(bounds), _longest(bounds) * row_bytes, pieces)


def _longest(bounds: Bounds) -> int:
    """Rows of the longest chunk; the chunks of one domain of several need not begin at row 0."""
    return max(stop - start for start, stop in bounds)


def one_shot_space(rows: int, row_bytes: int) -> Space:
    """Every rank offers its whole partial result in its own memory."""
    return Space("gather", 1, rows * row_bytes, 1)


def exchange_space(
    rows: int, features: int, itemsize: int, world_size: int, shots: int, tiles: int
) -> Space:
    """Kernels that exchange tiles: every rank writes its partials, and sums, into its peers'.

    Args:
        itemsize: of the wider of partials and sums.
        shots: 1 where all partials go to every rank, 2 where sums come back.
        tiles: into how many tiles the result is cut.
    """
    return Space("scatter", world_size, shots * rows * features * itemsize, shots * tiles)


def gpu_spaces(op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype) -> list[Space]:
    """As ``spaces``, on a GPU: whatever the kernels send, forward or backward, they push."""
    *tokens, features = _checked(shape)
    if op != "linear_all_reduce":
        bounds = scaled_bounds(tokens[0], world_size, math.prod(tokens[1:]))
        return [scatter_space(bounds, features * dtype.itemsize)]
    total = math.prod(tokens)
    tiles = -(-total // LEAST_TILE[0]) * -(-features // LEAST_TILE[1])
    # Two shots never take less than one.
    return [exchange_space(total, features, dtype.itemsize, world_size, 2, tiles)]


def _checked(shape: Sequence[int]) -> Sequence[int]:
    if len(shape) < 2 or min(shape) < 0:
        raise ValueError(f"a global shape is [tokens, …, features]; got {list(shape)}")
    return shape


def spaces(
    op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype, backward: bool
) -> list[Space]:
    """The memory that calls of ``op``, one of ``OPS``, on this global shape take."""
    *tokens, features = _checked(shape)
    bounds = scaled_bounds(tokens[0], world_size, math.prod(tokens[1:]))
    row_bytes = features * dtype.itemsize
    gather, scatter = gather_space(bounds, row_bytes), scatter_space(bounds, row_bytes)
    if op == "all_gather_linear":
        return [gather, scatter] if backward else [gather]
    if op == "linear_reduce_scatter":
        return [scatter, gather] if backward else [scatter]
    if op == "linear_all_reduce":
        # It cuts the flattened rows. Fewer rows may go in one shot, which offers all of them.
        total = math.prod(tokens)
        bounds = scaled_bounds(total, world_size, 1)
        most = min(total, ONE_SHOT_BYTES // row_bytes if row_bytes else 0)
        one_shot = one_shot_space(most, row_bytes)
        if is_one_shot(bounds, row_bytes):
            return [one_shot]
        return [scatter_space(bounds, row_bytes), gather_space(bounds, row_bytes), one_shot]
    raise AssertionError(op)
