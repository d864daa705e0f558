"""Rows on their way to experts and back, on the host engine.

Who raises and awaits which flag, in the workspace "moe rows" (source to expert's rank):

- ready[source][chunk(expert, piece)]: raised by the source when the piece is written in its
  reader's memory; awaited by the reader before it uses the piece. Pieces without rows have no
  flag: the table tells the reader that there are none.
- ready[source][last]: raised by the source when it has written everything, also if that is
  nothing; awaited by the reader before it says consumed.

In "moe returns" (expert's rank to source) only the last flag is used: a token's sum needs all its
choices, in order, so the source has no use for a part.

Inside one of several domains a rank carries the rows of several sources (``planning.relaying``), in
its own name: pieces of each have flags of their own, and so has, on the way back, each of them as a
whole.
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
        carrier: the rank that sends them.
        chunk: the flag's number; -1 for what this rank sends itself.
        first, last: where they lie among this rank's rows.
        back: where the finished rows go among the source's.
        relayed: whether the source is in another domain.
    """

    source: int
    chunk: int
    first: int
    last: int
    back: int
    carrier: int
    relayed: bool

    @property
    def rows(self) -> int:
        return self.last - self.first


def arriving(routed: Routed, rank: int) -> list[list[Piece]]:
    """What a rank gets for each of its experts, in the order of its rows."""
    layout, carriers = routed.layout, routed.carriers
    found: list[list[Piece]] = [[] for _ in layout.placement.experts[rank]]
    for source in range(len(layout.counts_WE)):
        carrier, part = carriers.ranks[source], carriers.numbers[source]
        relayed = part != carriers.own
        for expert, rows, sent, begin in layout.segments(source, rank):
            for number, first, last in pieces(rows):
                flag = -1 if carrier == rank else chunk(expert, number, part, carriers.most)
                place = (begin + first, begin + last, sent + first)
                found[expert].append(Piece(source, flag, *place, carrier, relayed))
    return found


class Rows:
    """One call on the workspace "moe rows".

    After ``send``, ``own`` are this rank's rows, ``[received, hidden]``: those of other ranks may
    be read after ``await_piece``, all until ``done``.
    """

    def __init__(
        self, comm: Communicator, op: str, routed: Routed, hidden: int, dtype: torch.dtype
    ) -> None:
        self.rank = comm.rank
        self._routed = routed
        self._peers = successors(comm.rank, comm.world_size)
        most, placement = routed.carriers.most, routed.placement
        self._closing = chunks(placement, most) - 1
        self._received = routed.layout.received.tolist()
        self._hidden, self._dtype = hidden, dtype
        space = rows_space(routed.most_received, hidden * dtype.itemsize, placement, most)
        self.call: Call = comm.memory.take(op, space)
        self._begun = False
        self.own = torch.empty(0)

    def _region(self, owner: int) -> Tensor:
        return self.call.write(owner, 0, (self._received[owner], self._hidden), self._dtype)

    def send(
        self,
        routed: Routed,
        x: Tensor,
        scale: Tensor | None,
        *,
        own: Tensor | None = None,
        last: bool = True,
    ) -> None:
        """Write one source's rows where their experts read them; those of this rank last.

        Args:
            routed: the source's.
            x: ``[T, hidden]``, contiguous.
            scale: a factor for every row sent ``[sent, 1]``, or None.
            own: where those for this rank go, by default between the others.
            last: whether no other source follows.
        """
        for peer in self._peers:
            if not self._begun:
                self.call.await_reader(peer)
            self._send_to(peer, self._region(peer), routed, x, scale)
            if last:
                self.call.signal(peer, self._closing)
        region = self._region(self.rank) if own is None else own
        self._send_to(self.rank, region, routed, x, scale)
        if not self._begun:
            self._begun = True
            self.own = self.call.read(
                self.rank, 0, (self._received[self.rank], self._hidden), self._dtype
            )

    def _send_to(
        self, peer: int, region: Tensor, routed: Routed, x: Tensor, scale: Tensor | None
    ) -> None:
        tokens, carriers = routed.tokens, routed.carriers
        part_number = carriers.numbers[routed.source]
        name = "own rows" if peer == self.rank else f"rows for rank {peer}"
        for expert, rows, sent, begin in routed.layout.segments(routed.source, peer):
            for number, first, last in pieces(rows):
                part = slice(sent + first, sent + last)
                out = region[begin + first : begin + last]
                flag = chunk(expert, number, part_number, carriers.most)
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
        return piece.chunk < 0 or self.call.arrived(piece.carrier, piece.chunk)

    def await_any(self, unit: list[Piece], over: Callable[[], bool]) -> None:
        """Wait until ``over()``, true at the latest when all pieces of the unit are there."""
        missing = next((piece for piece in unit if not self.has(piece)), None)
        if missing is not None:
            with span("wait", "wait for any rank", rank=self.rank):
                self.call.wait_until(over, missing.carrier, missing.chunk)

    def await_piece(self, piece: Piece) -> None:
        """Wait until the piece is there."""
        if piece.chunk >= 0:
            flag = self.call.flag(piece.carrier, piece.chunk, self.rank)
            with span("wait", f"wait for rank {piece.carrier}", rank=self.rank, awaits=flag):
                self.call.wait(piece.carrier, piece.chunk)

    def done(self) -> None:
        """Say that all rows were read. All peers are awaited first; see ``protocol``."""
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
        self._peers = successors(comm.rank, comm.world_size)
        carriers = self._carriers = routed.carriers
        closing = chunks(routed.placement, carriers.most) - 1
        self._hidden, self._dtype = hidden, dtype
        row_bytes = hidden * dtype.itemsize
        space = returns_space(routed.most_sent, row_bytes, routed.placement, carriers.most)
        self.call: Call = comm.memory.take(op, space)
        for peer in self._peers:
            self.call.await_reader(peer)
        self.targets: dict[int, Tensor] = {}
        #: Of every source, the flag that says that all its rows are back, and where they begin.
        self._flags: list[int] = []
        self._begins: list[int] = []
        used = [0] * comm.world_size
        for source, rows in enumerate(routed.layout.sent.tolist()):
            carrier = carriers.ranks[source]
            self._flags.append(closing - carriers.numbers[source])
            self._begins.append(used[carrier] * row_bytes)
            used[carrier] += rows
            place = (self._begins[source], (rows, hidden))
            self.targets[source] = self.call.write(carrier, *place, dtype)

    def signal(self, source: int) -> None:
        """Tell the one who sent a source's rows that all of them are back."""
        carrier = self._carriers.ranks[source]
        if carrier != self.rank:
            number = self._flags[source]
            flag = self.call.flag(self.rank, number, carrier)
            with span("copy", f"all rows are back on rank {carrier}", rank=self.rank, signal=flag):
                self.call.signal(carrier, number)

    def rows(self, routed: Routed) -> Tensor:
        """Await all rows ``[sent, hidden]`` of a source that this rank sent; until ``done``."""
        number = self._flags[routed.source]
        for peer in self._peers:
            flag = self.call.flag(peer, number, self.rank)
            with span("wait", f"wait for rank {peer}", rank=self.rank, awaits=flag):
                self.call.wait(peer, number)
        sent = int(routed.layout.sent[routed.source])
        place = (self._begins[routed.source], (sent, self._hidden))
        return self.call.read(self.rank, *place, self._dtype)

    def sum(self, routed: Routed, weights: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
        """Await all rows of a source and add them up; see ``sum_choices``."""
        rows = self.rows(routed)
        with span("reduce", "add the choices", rank=self.rank):
            return sum_choices(rows, routed.slot, weights, keep)

    def done(self) -> None:
        """Say that all rows were read."""
        for peer in self._peers:
            self.call.consumed(peer)


def take(rows: Rows, found: list[Piece], result: Tensor) -> None:
    """Await pieces, and copy those that this rank did not write itself to their places."""
    for piece in found:
        if piece.chunk < 0:
            continue
        rows.await_piece(piece)
        result[piece.first : piece.last].copy_(rows.own[piece.first : piece.last])


def give_back(returns: Returns, routed: Routed, source: int, h: Tensor) -> None:
    """Write the finished rows of a source, of all that this rank has, where they came from."""
    target = returns.targets[source]
    with span("copy", f"rows for rank {source}", rank=returns.rank):
        for _, rows, back, first in routed.layout.segments(source, returns.rank):
            target[back : back + rows].copy_(h[first : first + rows])
    returns.signal(source)


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
