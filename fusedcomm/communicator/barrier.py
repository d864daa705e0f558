"""Ranks that share memory wait for each other."""

from __future__ import annotations

from fusedcomm.board import ControlBlock
from fusedcomm.waiting import Awaited, Watch, following


class Barrier:
    """One flag for each ordered pair of ranks, in the control block of the one that waits."""

    def __init__(self, watch: Watch, blocks: dict[int, ControlBlock]) -> None:
        self._watch = watch
        self._words = {rank: block.words for rank, block in blocks.items()}
        self._count = 0

    def wait(self) -> None:
        """Within a call: wait until every rank is in it."""
        rank = self._watch.rank
        peers = [peer for peer in self._words if peer != rank]
        self._count = following(self._count)
        self._watch.fence()
        for peer in peers:
            self._words[peer][ControlBlock.barrier_index(rank)] = self._count
        awaited = Awaited("barrier", self._count, -1, "the arrival")
        for peer in peers:
            index = ControlBlock.barrier_index(peer)
            self._watch.wait(self._words[rank], index, self._count, peer, awaited)
            self._watch.compare(peer)

    def close(self) -> None:
        """Let go of the other ranks' memory."""
        self._words = {}
