"""Which engine the mixture of experts uses, and the memory it takes.

Three workspaces serve all calls of a channel, forward and backward:

========= ============================================= ======= =========================
kind      data per rank                                 slots   written by
========= ============================================= ======= =========================
counts    the table: a row of E int32 from every rank   1       its source
rows      R rows on their way to experts                2       all sources, by the plan
returns   C rows on their way back                      2       all owners, by the plan
========= ============================================= ======= =========================

R is ``capacity`` or, without it, the most rows that a rank has received so far; C is
``k * max_tokens`` or the most choices that a rank has sent so far. (Inside one of N domains a rank
has N sources' choices: see ``relaying``. Kernels that may not look at the table, as there is a
capacity but no ``max_tokens``, have room for ``W * capacity``.) One slot is enough for the counts:
all ranks have long read the table when one of them comes to make the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusedcomm.planning.engine import ACROSS, choose_engine, overlaps
from fusedcomm.planning.routing import Array, Layout, Placement, chunks, owners_text, place
from fusedcomm.protocol import Space
from fusedcomm.trace import record_plan

if TYPE_CHECKING:
    from fusedcomm.communicator import Communicator

OPS = ("dispatch", "combine")


@dataclass(frozen=True)
class Terms:
    """What a routing depends on besides the ids; equal on every rank.

    Attributes:
        num_experts: E.
        top_k: k.
        owners: the rank of every expert; empty for blocks of ``ceil(E / W)``.
        align: every expert's rows are padded to a multiple of it.
        capacity: the most rows, padding included, that a rank can receive; None for no limit.
        max_tokens: the most tokens that a rank sends; None if nobody knows.
    """

    num_experts: int
    top_k: int
    owners: tuple[int, ...]
    align: int
    capacity: int | None
    max_tokens: int | None

    def placement(self, world_size: int) -> Placement:
        return place(self.num_experts, world_size, self.owners)

    def __str__(self) -> str:
        return (
            f"{self.num_experts} experts {owners_text(self.owners)}, top-{self.top_k}, align "
            f"{self.align}, capacity {self.capacity}, max_tokens {self.max_tokens}"
        )


@dataclass(frozen=True)
class Plan:
    """How one call is carried out.

    Attributes:
        text: what must be equal on every rank, for the board.
        engine: "triton", "host" or "plain".
        reason: a sentence for people.
        across: whether it is the form for several domains.
    """

    text: str
    engine: str
    reason: str
    across: bool = False


def plan(
    comm: Communicator,
    op: str,
    terms: Terms,
    *,
    device: torch.device,
    dtype: torch.dtype,
    what: str,
    engine: str,
) -> Plan:
    """The plan for one call.

    Args:
        dtype: of the rows, or of the ids where only these matter.
        what: all else that must be equal on every rank.
        engine: what the caller asked for.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    chosen, reason = choose_engine(comm, device, dtype, engine, across=ACROSS)
    across = chosen != "plain" and comm.inside is not None
    chunks = "two_level" if across else 1 if chosen == "plain" else terms.num_experts
    record_plan(op, chosen, chunks, reason)
    return Plan(f"{op} {what} of {terms}, engine {chosen}", chosen, reason, across)


def is_across(comm: Communicator, device: torch.device, dtype: torch.dtype, engine: str) -> bool:
    """Whether ``plan`` says that calls are carried out in two levels, inside domains and between.

    Args:
        engine: what the caller asked for.
    """
    return comm.inside is not None and overlaps(comm, device, dtype, engine, across=ACROSS)


def table_text(layout: Layout) -> str:
    """A digest of the table, for the board: ranks may replay different plans."""
    return digest_text(layout.counts_WE)


def digest_text(counts_WE: Array) -> str:  # noqa: N803
    return f"routing {zlib.crc32(counts_WE.tobytes()):08x}"


def counts_space(num_experts: int, world_size: int) -> Space:
    """Every rank writes its row of the table into all ranks' memory."""
    return Space("moe counts", world_size, 4 * num_experts, 1, slots=1)


def rows_space(rows: int, row_bytes: int, placement: Placement, most: int = 1) -> Space:
    """All sources write rows where their experts will read them: the most that a rank receives.

    Args:
        most: how many sources every rank sends for; see ``relaying``.
    """
    return _space("moe rows", rows, row_bytes, placement, most)


def returns_space(rows: int, row_bytes: int, placement: Placement, most: int = 1) -> Space:
    """All owners of experts write finished rows where they came from: the most that were sent."""
    return _space("moe returns", rows, row_bytes, placement, most)


def _space(kind: str, rows: int, row_bytes: int, placement: Placement, most: int = 1) -> Space:
    return Space(kind, 1, rows * row_bytes, chunks(placement, most), shared=True)


def spaces(
    op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype, backward: bool
) -> list[Space]:
    """The memory of "dispatch" (or "combine") calls of shape [rows, hidden, experts].

    Its rows are ``capacity`` for a dispatch, ``k * max_tokens`` for a combine. The backward pass of
    one is the other: reserve both.
    """
    if len(shape) != 3 or min(shape) < 0:
        raise ValueError(f"{op} takes a shape [rows, hidden, experts]; got {list(shape)}")
    rows, hidden, experts = shape
    placement = place(experts, world_size)
    kind = "moe rows" if op == "dispatch" else "moe returns"
    found = [_space(kind, rows, hidden * dtype.itemsize, placement)]
    if op == "dispatch":
        found.append(counts_space(experts, world_size))
    return found
