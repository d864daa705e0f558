"""Rows on their way to experts and back, on the host engine.

Who raises and awaits which flag, in the workspace "moe rows" (source to expert's rank):

- ready[source][chunk(expert, piece)]: raised by the source when the piece is written in its
  reader's memory; awaited by the reader before it uses the piece. Pieces without rows have no
  flag: the table tells the reader that there are none.
- ready[source][last]: raised by the source when it has written everything, also if that is
  nothing; awaited by the reader before it says consumed.

In "moe returns" (expert's rank to source) only the last flag is used: a token's sum needs all its
choices, in order, so the source has no use for a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.choices import sum_choices
from fusedcomm.engines.routed import Routed
from fusedcomm.planning.moe import returns_space, rows_space
from fusedcomm.planning.routing import chunk, chunks, pieces
from fusedcomm.protocol import Call
from fusedcomm.schedule import successors
from fusedcomm.trace import span

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one source for one expert of this rank.

    Attributes:
        chunk: the flag's number; -1 for this rank's own rows.
        first, last: where they lie among this rank's rows.
        back: where the finished rows go among the source's.
    """

    source: int
    chunk: int
    first: int
    last: int
    back: int

    @property
    def rows(self) -> int:
        return self.last - self.first


def arriving(routed: Routed, rank: int) -> list[list[Piece]]:
    """What a rank gets for each of its experts, in the order of its rows."""
    layout = routed.layout
    found: list[list[Piece]] = [[] for _ in layout.placement.experts[rank]]
    for source in range(len(layout.counts_WE)):
        for expert, rows, sent, begin in layout.segments(source, rank):
            for number, first, last in pieces(rows):
                flag = -1 if source == rank else chunk(expert, number)
                found[expert].append(Piece(source, flag, begin + first, begin + last, sent + first))
    return found


class Rows:
    """One call on the workspace "moe rows".

    After ``send``, ``own`` are this rank's rows, ``[received, hidden]``: those of other sources may
    be read after ``await_piece``, all until ``done``.
    """

    def __init__(
        self, comm: Communicator, op: str, routed: Routed, hidden: int, dtype: torch.dtype
    ) -> None:
        self.rank = comm.rank
        self._routed = routed
        self._peers = successors(comm.rank, comm.world_size)
        self._closing = chunks(routed.placement) - 1
        self._received = routed.layout.received.tolist()
        self._hidden, self._dtype = hidden, dtype
        space = rows_space(routed.most_received, hidden * dtype.itemsize, routed.placement)
        self.call: Call = comm.memory.take(op, space)
        self.own = torch.empty(0)

    def _region(self, owner: int) -> Tensor:
        return self.call.write(owner, 0, (self._received[owner], self._hidden), self._dtype)

    def send(self, x: Tensor, scale: Tensor | None, own: Tensor | None = None) -> None:
        """Write this rank's rows where their experts read them; its own ones last.

        Args:
            x: ``[T, hidden]``, contiguous.
            scale: a factor for every row sent ``[sent, 1]``, or None.
            own: where the own ones go, by default between the others.
        """
        for peer in self._peers:
            self.call.await_reader(peer)
            self._send_to(peer, self._region(peer), x, scale)
            self.call.signal(peer, self._closing)
        self._send_to(self.rank, self._region(self.rank) if own is None else own, x, scale)
        self.own = self.call.read(
            self.rank, 0, (self._received[self.rank], self._hidden), self._dtype
        )

    def _send_to(self, peer: int, region: Tensor, x: Tensor, scale: Tensor | None) -> None:
        tokens = self._routed.tokens
        name = "own rows" if peer == self.rank else f"rows for rank {peer}"
        for expert, rows, sent, begin in self._routed.layout.segments(self.rank, peer):
            for number, first, last in pieces(rows):
                part = slice(sent + first, sent + last)
                out = region[begin + first : begin + last]
                flag = chunk(expert, number)
                named = self.call.flag(self.rank, flag, peer)
                with span("copy", name, rank=self.rank, signal=named):
                    if scale is None:
                        torch.index_select(x, 0, tokens[part], out=out)
                    else:
                        torch.mul(x.index_select(0, tokens[part]), scale[part], out=out)
                if peer != self.rank:
                    self.call.signal(peer, flag)

    def has(self, piece: Piece) -> bool:
        """Whether ``await_piece`` would return at once."""
        return piece.chunk < 0 or self.call.arrived(piece.source, piece.chunk)

    def await_any(self, unit: list[Piece], over: Callable[[], bool]) -> None:
        """Wait until ``over()``, true at the latest when all pieces of the unit are there."""
        missing = next((piece for piece in unit if not self.has(piece)), None)
        if missing is not None:
            with span("wait", "wait for any rank", rank=self.rank):
                self.call.wait_until(over, missing.source, missing.chunk)

    def await_piece(self, piece: Piece) -> None:
        """Wait until the piece is there."""
        if piece.chunk >= 0:
            flag = self.call.flag(piece.source, piece.chunk, self.rank)
            with span("wait", f"wait for rank {piece.source}", rank=self.rank, awaits=flag):
                self.call.wait(piece.source, piece.chunk)

    def done(self) -> None:
        """Say that all rows were read. All sources are awaited first; see ``protocol``."""
        for peer in self._peers:
            self.call.wait(peer, self._closing)
        for peer in self._peers:
            self.call.consumed(peer)


class Returns:
    """One call on the workspace "moe returns".

    ``targets[source]``: the memory ``[sent, hidden]`` into which this rank writes finished rows.
    """

    def __init__(
        self, comm: Communicator, op: str, routed: Routed, hidden: int, dtype: torch.dtype
    ) -> None:
        self.rank = comm.rank
        self._routed = routed
        self._peers = successors(comm.rank, comm.world_size)
        self._closing = chunks(routed.placement) - 1
        self._hidden, self._dtype = hidden, dtype
        space = returns_space(routed.most_sent, hidden * dtype.itemsize, routed.placement)
        self.call: Call = comm.memory.take(op, space)
        sent = routed.layout.sent.tolist()
        for peer in self._peers:
            self.call.await_reader(peer)
        self.targets = {
            source: self.call.write(source, 0, (rows, hidden), dtype)
            for source, rows in enumerate(sent)
        }

    def signal(self, source: int) -> None:
        """Tell a source that all its rows are back."""
        if source != self.rank:
            flag = self.call.flag(self.rank, self._closing, source)
            with span("copy", f"all rows are back on rank {source}", rank=self.rank, signal=flag):
                self.call.signal(source, self._closing)

    def sum(self, weights: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
        """Await all rows and add them up; see ``sum_choices``."""
        for peer in self._peers:
            flag = self.call.flag(peer, self._closing, self.rank)
            with span("wait", f"wait for rank {peer}", rank=self.rank, awaits=flag):
                self.call.wait(peer, self._closing)
        with span("reduce", "add the choices", rank=self.rank):
            sent = int(self._routed.layout.sent[self.rank])
            rows = self.call.read(self.rank, 0, (sent, self._hidden), self._dtype)
            found = sum_choices(rows, self._routed.slot, weights, keep)
        for peer in self._peers:
            self.call.consumed(peer)
        return found


def clear_padding(rows: Tensor, routed: Routed, rank: int) -> None:
    """Zero the rows that belong to no token: each expert's padding, and those behind the last."""
    for first, last in routed.layout.padding(rank):
        rows[first:last].zero_()
    rows[int(routed.layout.received[rank]) :].zero_()


def in_order(rows: Rows, units: list[list[Piece]]) -> Iterator[list[Piece]]:
    """The units as their pieces come, in the order given where several are there."""
    waiting = list(units)

    def first_ready() -> int | None:
        return next((i for i, unit in enumerate(waiting) if all(map(rows.has, unit))), None)

    while waiting:
        ready = first_ready()
        if ready is None:
            rows.await_any(waiting[0], lambda: first_ready() is not None)
            continue
        unit = waiting.pop(ready)
        for piece in unit:
            rows.await_piece(piece)
        yield unit
