"""Where every (token, choice) of a mixture of experts goes: pure functions of integers.

Words: a rank's tokens have k **choices** each, an expert's id or none. **Columns** are the experts
in the order in which they lie on the ranks: those of rank 0, then those of rank 1, and so on, on
each rank by id. The **table** ``counts_WE[source, column]`` says how many choices every rank sends
to every expert; it is the only thing that ranks have to tell each other, and all else follows from
it on every rank alone. A **segment** is what one source sends to one expert.

- A source sends its choices ordered by (column, token, choice): segment after segment. Finished
  rows come back in the same order.
- A reader's rows are ordered by (its expert, source, token, choice), each expert's padded to a
  multiple of ``align``: all segments of an expert are one block, no row is moved again.

Axes: W ranks, E experts or columns, T tokens, k choices. All arithmetic is in 64 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fusedcomm.schedule import piece_bounds, shard_bounds

Array = np.ndarray

#: Rows of a segment per signalled piece, and the most pieces of a segment. A longer segment is cut
#: into equal pieces, so that its reader can begin before all of it has come.
PIECE_ROWS = 1024
MAX_PIECES = 4


@dataclass(frozen=True)
class Placement:
    """Which rank has which expert.

    Attributes:
        starts: ``W + 1`` columns; rank r has columns ``starts[r]`` to ``starts[r + 1]``.
        column_of: ``[E + 1]``, the column of every expert id; the last entry, E, is "no expert".
        experts: the expert ids of every rank, in the order of its columns.
    """

    starts: tuple[int, ...]
    column_of: Array
    experts: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        return self.starts[-1]

    @property
    def most(self) -> int:
        """The most experts that a rank has."""
        return max(map(len, self.experts))

    def columns(self, rank: int) -> range:
        return range(self.starts[rank], self.starts[rank + 1])


@functools.lru_cache(maxsize=256)
def place(num_experts: int, world_size: int, owners: tuple[int, ...] = ()) -> Placement:
    """The placement of experts on ranks.

    Args:
        owners: the rank of every expert; empty for blocks of ``ceil(E / W)`` consecutive experts.

    >>> place(7, 3).experts
    ((0, 1, 2), (3, 4, 5), (6,))
    >>> odd_even = place(5, 2, (0, 1, 0, 1, 0))
    >>> odd_even.experts, odd_even.column_of.tolist()
    (((0, 2, 4), (1, 3)), [0, 3, 1, 4, 2, 5])
    """
    if owners:
        experts = [
            tuple(e for e, owner in enumerate(owners) if owner == rank)
            for rank in range(world_size)
        ]
    else:
        experts = [tuple(range(*bounds)) for bounds in shard_bounds(num_experts, world_size)]
    column_of = np.full(num_experts + 1, num_experts, dtype=np.int64)
    column_of[[e for own in experts for e in own]] = np.arange(num_experts)
    column_of.setflags(write=False)  # it is shared by all callers
    starts = tuple(np.cumsum([0, *map(len, experts)]).tolist())
    return Placement(starts, column_of, tuple(experts))


def local_experts(num_experts: int, rank: int, world_size: int, owners: tuple[int, ...]) -> int:
    """How many experts a rank has; as ``place`` has it, for compilers too.

    >>> [local_experts(7, rank, 3, ()) for rank in range(3)]
    [3, 3, 1]
    """
    if owners:
        return owners.count(rank)
    start, stop = shard_bounds(num_experts, world_size)[rank]
    return stop - start


def columns_of(ids: Array, placement: Placement) -> Array:
    """The column of every id; E where it names no expert (below 0, or E and above).

    >>> columns_of(np.array([[1, -1], [9, 0]]), place(2, 1)).tolist()
    [[1, 2], [2, 0]]
    """
    none = placement.num_experts
    valid = (ids >= 0) & (ids < none)
    return placement.column_of[np.where(valid, ids, none)]


def sort_choices(columns: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Sort one rank's choices by column; equal ones stay in the order of token and choice.

    Args:
        columns: ``[T, k]``, E for "no expert".

    Returns:
        counts ``[E]``; order ``[T * k]``, the flat number (token * k + choice) of the n-th choice
        that is sent, those of no expert last; slot ``[T, k]``, the inverse: the how-manieth row a
        choice is, -1 for no expert. Of two tokens with two choices among three experts,

    >>> counts, order, slot = sort_choices(np.array([[2, 0], [3, 2]]), 3)
    >>> counts.tolist()  # token 0 goes to 2 and 0, token 1 to none and 2
    [1, 0, 2]
    >>> order.tolist()
    [1, 0, 3, 2]
    >>> slot.tolist()
    [[1, 0], [-1, 2]]
    """
    flat = columns.reshape(-1)
    # A stable sort of 16-bit keys is a radix sort, many times faster.
    keys = flat.astype(np.uint16) if num_experts < 1 << 16 else flat
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(flat, minlength=num_experts + 1)[:num_experts]
    valid = int(counts.sum())
    slot = np.full(flat.shape, -1, dtype=np.int64)
    slot[order[:valid]] = np.arange(valid)
    return counts, order, slot.reshape(columns.shape)


class Segment(NamedTuple):
    """The rows of one source for one expert.

    Attributes:
        expert: its number on its rank.
        rows: how many.
        sent: where they begin among those that the source sends, and gets back.
        first: where they begin among those that the reader receives.
    """

    expert: int
    rows: int
    sent: int
    first: int


class Layout:
    """All places, from the table.

    Attributes:
        counts_WE: the table, by source and column.
        sent_row_WE: where in its source's order a segment begins, when sent and when coming back.
        first_row_WE: the row of its reader at which a segment begins.
        counts_E, padded_E: rows of every expert, without and with padding.
        first_row_E: the row at which an expert's block begins, on its rank.
        sent: rows that every rank sends; the rows that come back to it.
        received: rows that every rank receives, padding included.

    Two ranks with two experts each; rows are padded to a multiple of 4:

    >>> table = np.array([[1, 2, 0, 3], [2, 0, 1, 1]])
    >>> layout = Layout(table, place(4, 2), align=4)
    >>> layout.sent_row_WE.tolist()
    [[0, 1, 3, 3], [0, 2, 2, 3]]
    >>> layout.padded_E.tolist(), layout.first_row_E.tolist()
    ([4, 4, 4, 4], [0, 4, 0, 4])
    >>> layout.first_row_WE.tolist()  # expert 3: three rows of rank 0 from 4 on, then rank 1's
    [[0, 4, 0, 4], [1, 6, 0, 7]]
    >>> layout.sent.tolist(), layout.received.tolist()
    ([6, 4], [8, 8])
    """

    def __init__(self, counts_WE: Array, placement: Placement, align: int = 1) -> None:  # noqa: N803
        self.placement = placement
        self.counts_WE = counts_WE
        self.counts_E = counts_WE.sum(0)
        self.padded_E = -(-self.counts_E // align) * align
        ends = np.cumsum(self.padded_E)
        behind = np.concatenate([[0], ends])  # padded rows of all columns in front of this one
        starts = np.asarray(placement.starts)
        sizes = np.diff(starts)
        self.first_row_E = behind[:-1] - np.repeat(behind[starts[:-1]], sizes)
        self.first_row_WE = self.first_row_E + np.cumsum(counts_WE, 0) - counts_WE
        self.sent_row_WE = np.cumsum(counts_WE, 1) - counts_WE
        self.sent = counts_WE.sum(1)
        self.received = behind[starts[1:]] - behind[starts[:-1]]
        self._segments: dict[tuple[int, int], list[Segment]] = {}

    @property
    def most_sent(self) -> int:
        return int(self.sent.max())

    @property
    def most_received(self) -> int:
        return int(self.received.max())

    def offsets(self, rank: int) -> Array:
        """The row after each of a rank's experts' last, padding included: cumulative.

        >>> Layout(np.array([[3, 4]]), place(2, 1)).offsets(0).tolist()
        [3, 7]
        """
        own = self.placement.columns(rank)
        return np.cumsum(self.padded_E[own.start : own.stop])

    def segments(self, source: int, reader: int) -> list[Segment]:
        """The segments of a source for a reader's experts, of those that hold rows.

        >>> layout = Layout(np.array([[1, 2, 0, 3], [2, 0, 1, 1]]), place(4, 2), align=4)
        >>> for segment in layout.segments(1, 1):
        ...     print(segment)
        Segment(expert=0, rows=1, sent=2, first=0)
        Segment(expert=1, rows=1, sent=3, first=7)
        """
        found = self._segments.get((source, reader))
        if found is None:
            own = self.placement.columns(reader)
            counts, sent, first = (
                array[source, own.start : own.stop]
                for array in (self.counts_WE, self.sent_row_WE, self.first_row_WE)
            )
            some = np.flatnonzero(counts)
            values = (array[some].tolist() for array in (counts, sent, first))
            found = [Segment(*each) for each in zip(some.tolist(), *values, strict=True)]
            self._segments[source, reader] = found
        return found

    def padding(self, rank: int) -> list[tuple[int, int]]:
        """The rows (first, last) of a rank that are padding.

        >>> Layout(np.array([[3, 4]]), place(2, 1), align=4).padding(0)
        [(3, 4)]
        """
        own = self.placement.columns(rank)
        real, padded, first = (
            array[own.start : own.stop]
            for array in (self.counts_E, self.padded_E, self.first_row_E)
        )
        some = np.flatnonzero(padded > real)
        firsts = (first + real)[some].tolist()
        return list(zip(firsts, (first + padded)[some].tolist(), strict=True))


def pieces(rows: int) -> list[tuple[int, int, int]]:
    """How a segment of ``rows`` is cut: (number, first, last).

    >>> pieces(2500)
    [(0, 0, 834), (1, 834, 1668), (2, 1668, 2500)]
    >>> pieces(0)
    []
    """
    if rows <= PIECE_ROWS:
        return [(0, 0, rows)] if rows else []
    bounds = piece_bounds(rows, min(MAX_PIECES, -(-rows // PIECE_ROWS)))
    return [(piece, first, last) for piece, (first, last) in enumerate(bounds)]


def chunk(local_expert: int, piece: int, number: int = 0, most: int = 1) -> int:
    """The number of a piece's flag, among those from one rank to one reader.

    Args:
        number, most: which of the rank's sources the piece is of, and how many it has.
    """
    return (local_expert * most + number) * MAX_PIECES + piece


def chunks(placement: Placement, most: int = 1) -> int:
    """Flags from a rank to a reader: one a piece, and behind them one for each of its sources.

    The last of them all says that everything was sent.
    """
    return placement.most * most * MAX_PIECES + most


def owners_text(owners: Sequence[int]) -> str:
    """A placement, for the board."""
    return "in blocks" if not owners else "placed " + " ".join(map(str, owners))
