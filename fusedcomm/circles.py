"""Ranks that wait for each other in a circle: found and named, where all would wait for ever.

A rank that has waited for some time for one other says so in its control block: for whom, in what,
the number of this wait, and a beat that goes on at every further look that finds nothing. (When the
wait is over the entry stays; only its beat does not go on.) A rank that waits follows these entries
from the rank it waits for. If they lead back to it, and stay the same until every one of them has
beaten twice, then each has looked in vain after all others were seen waiting: nothing will ever end
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fusedcomm.board import ControlBlock

#: What a rank waits in.
KINDS = ("", "send", "recv", "a call of all ranks")
SEND, RECV, CALL = 1, 2, 3

#: Beats after which a circle is believed: the look before the first may be older than the entry.
_BEATS = 2


class Waiting(NamedTuple):
    """A rank's entry: it waits in ``kind`` for ``peer``."""

    rank: int
    kind: int
    peer: int
    number: int


class Circles:
    """This rank's entry, and its view of the others'."""

    def __init__(self, rank: int, blocks: Mapping[int, ControlBlock]) -> None:
        self._rank = rank
        self._blocks = blocks
        self._number = 0
        self._begun = 0.0
        self._seen: dict[Waiting, int] = {}

    def look(self, begun: float, kind: int, peer: int) -> list[Waiting] | None:
        """To be called after every look that found nothing, while this rank waits.

        Args:
            begun: when the wait began; tells it apart from others.

        Returns:
            The circle, this rank first, when it is certain.
        """
        own = self._blocks[self._rank]
        if begun != self._begun:
            self._begun, self._seen = begun, {}
            self._number += 1
            own.set_waiting(kind, peer, self._number)
        own.beat()
        chain = self._follow(Waiting(self._rank, kind, peer, self._number))
        if chain is None:
            self._seen = {}
            return None
        beats = {entry: self._blocks[entry.rank].waiting()[3] for entry in chain}
        if set(beats) != set(self._seen):
            self._seen = beats
            return None
        if all(beats[entry] - self._seen[entry] >= _BEATS for entry in chain):
            return chain
        return None

    def _follow(self, first: Waiting) -> list[Waiting] | None:
        """The entries from this rank's on, if they lead back to it."""
        chain = [first]
        while (following := chain[-1].peer) != self._rank:
            block = self._blocks.get(following)
            if block is None or any(entry.rank == following for entry in chain):
                return None
            kind, peer, number, _ = block.waiting()
            if not kind:
                return None
            chain.append(Waiting(following, kind, peer, number))
        return chain


def describe(chain: list[Waiting], buffer_bytes: int, call: str) -> str:
    """A circle as an error says it.

    Args:
        call: what this rank, the first one, is in, if that is a call of all ranks.
    """
    waits = ", ".join(f"rank {e.rank} in {KINDS[e.kind]} for rank {e.peer}" for e in chain)
    if all(entry.kind == SEND for entry in chain):
        size = f"{buffer_bytes / 2**20:g} MiB"
        return (
            f"ranks wait for each other in a circle ({waits}): each sends more than the buffer "
            f"of {size} holds before it receives. Use batch_send_recv, or isend and irecv"
        )
    own = f"; rank {chain[0].rank} is in [{call}]" if chain[0].kind == CALL else ""
    return f"ranks wait for each other in a circle: {waits}{own}"
