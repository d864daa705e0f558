"""Which engine and which chunking an operation uses, and why.

Decided only from facts that are equal on all ranks: global shape, dtype, world size, device kind,
whether the group shares memory. So every rank comes to the same answer without asking.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.trace import record_plan

ENGINES = ("auto", "host", "plain")

#: Rows of a rank's chunk from which the GEMM is cut by chunks. Below, the weight's traffic, paid
#: once per chunk, costs more than waiting for all the chunks.
MIN_CHUNK_ROWS = 256
#: Bytes of one rank's partial result up to which an all-reduce sums all partials on every rank
#: (one exchange) instead of one shard of them each (two exchanges).
ONE_SHOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How one call is carried out.

    Attributes:
        engine: "host" or "plain".
        chunked: whether the GEMM is cut at the ranks' chunks, and overlaps with them.
        pieces: into how many signalled pieces a rank's chunk is cut.
        one_shot: for an all-reduce, whether every rank sums everything itself.
        reason: a sentence for people.
    """

    engine: str
    chunked: bool
    pieces: int
    one_shot: bool
    reason: str

    def __str__(self) -> str:
        form = "chunked" if self.chunked else "whole"
        return f"{self.engine} {form} pieces={self.pieces} one_shot={self.one_shot}"


def plan(
    comm: Communicator,
    op: str,
    bounds: list[tuple[int, int]],
    *,
    features: int,
    dtype: torch.dtype,
    device: torch.device,
    engine: str,
) -> Plan:
    """The plan for one call.

    Args:
        bounds: which rows each rank has; the first chunk is the longest.
        features, dtype: of the rows that cross between ranks.
        engine: what the caller asked for.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    chosen, reason = _choose_engine(comm, device, engine)
    rows = bounds[0][1]
    result_bytes = bounds[-1][1] * features * dtype.itemsize
    chunked = chosen == "host" and (comm.world_size == 1 or rows >= MIN_CHUNK_ROWS)
    one_shot = chosen == "host" and not chunked and result_bytes <= ONE_SHOT_BYTES
    if chosen == "host":
        reason += (
            f"; {rows} rows a rank are enough to cut the GEMM at the ranks' chunks"
            if chunked
            else f"; {rows} rows a rank are too few to cut the GEMM: it would read the weight "
            f"{comm.world_size} times"
        )
    result = Plan(chosen, chunked, 1, one_shot, reason)
    record_plan(op, chosen, comm.world_size if chunked else 1, reason)
    return result


def _choose_engine(comm: Communicator, device: torch.device, engine: str) -> tuple[str, str]:
    if engine == "plain":
        return "plain", "the plain engine was asked for"
    if not comm.shares_memory:
        obstacle = "the group's ranks do not share memory (several machines)"
    elif device.type != "cpu":
        obstacle = f"the host engine serves CPU tensors, not {device.type}"
    elif engine == "host":
        return "host", "the host engine was asked for"
    else:
        return "host", "CPU tensors of ranks that share memory"
    if engine == "host":
        raise ValueError(f'engine="host" cannot serve this call: {obstacle}')
    warnings.warn(f"fusedcomm runs without overlap: {obstacle}", stacklevel=2)
    return "plain", obstacle
