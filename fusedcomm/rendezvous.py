"""How the ranks of a group find each other: the group's store, then sockets, then shared memory.

First every rank says in the store where it is, from which all compute which of them can share
memory (``fusedcomm.place``). Those that can then meet (``meet``):

Every rank posts a card in the group's store, with the name of its listener and its process. For
each pair the higher rank connects to the lower one, both send their control block, and are done
with each other when they have the other's. A connection that breaks before that is made anew, from
the peer's latest card: so ranks may fail here and try again, in any order, and still meet. A rank
takes its card back when it is done with all others (who then have read it); one that fails by
itself leaves a card that says so.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fusedcomm import board
from fusedcomm.board import ControlBlock
from fusedcomm.errors import AbortedError, FusedcommError, PeerLostError, PeerTimeoutError
from fusedcomm.place import STORE_POLL_S, TAKEN_BACK, Place, check_time, store_errors
from fusedcomm.symmetric.links import POLL_S, Links, Listener, open_connection
from fusedcomm.symmetric.shm import Segment
from fusedcomm.waiting import failure, state_of


class Card(NamedTuple):
    """What a rank tells the others: its listener, its process, and why it failed, if it did."""

    listener: str
    pid: int
    failed: str = ""


#: By store, place and rank: the last listener of a rank that this process has met, or has been told
#: of that it failed. A retry waits for a new card; older ones do not come again.
_through: WeakKeyDictionary[dist.Store, dict[str, dict[int, str]]] = WeakKeyDictionary()


def meet(place: Place, timeout_s: float) -> tuple[Links, dict[int, ControlBlock]]:
    """Connect ranks that can share memory, and map their control blocks; collective.

    Raises:
        PeerTimeoutError, PeerLostError: a rank did not come, or died.
        SharedMemoryError: there is no memory for the control block.
    """
    meeting = _Meeting(place, timeout_s)
    try:
        with store_errors():
            return meeting.run()
    except BaseException as error:
        meeting.fail(error)
        if isinstance(error, OSError) and not isinstance(error, FusedcommError):
            raise FusedcommError(f"cannot connect to the other ranks: {error}") from error
        raise
    finally:
        meeting.end()


def stay_alone(place: Place) -> tuple[Links, dict[int, ControlBlock]]:
    """What ``meet`` returns, for a rank that meets nobody."""
    segment = Segment.create("control", ControlBlock.size(1))
    segment.release_descriptor()
    return Links(place.rank), {place.rank: ControlBlock(segment, 1)}


class _Meeting:
    def __init__(self, place: Place, timeout_s: float) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self._store = place.store
        self._key = place.key
        self._through = _through.setdefault(place.store, {}).setdefault(place.key, {})
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._links = Links(self.rank)
        self._listener: Listener | None = None
        self._own: Segment | None = None
        self._cards: dict[int, Card] = {}
        self._card = Card(f"none-{secrets.token_hex(8)}", os.getpid())
        self._failed = False
        self._unsent: set[int] = set()

    def run(self) -> tuple[Links, dict[int, ControlBlock]]:
        """Meet all ranks."""
        listener = self._listener = Listener()
        own = self._own = Segment.create("control", ControlBlock.size(self.world_size))
        blocks = {self.rank: ControlBlock(own, self.world_size)}
        self._card = Card(listener.name, os.getpid())
        self._post(self._card)
        pause = STORE_POLL_S
        while missing := [
            rank for rank in range(self.world_size) if rank not in blocks or rank in self._unsent
        ]:
            for peer in missing:
                self._read_card(peer)
                if peer < self.rank and not self._links.connected(peer):
                    self._connect(peer)
            if self._await_news(listener, missing, pause):
                pause = STORE_POLL_S
            else:
                pause = min(2 * pause, POLL_S)
            self._accept(listener, blocks)
            for peer in list(self._unsent):
                self._send(peer)
            for peer in missing:
                self._receive(peer, blocks)
                if peer not in blocks and not self._links.alive(peer):
                    raise PeerLostError(
                        f"rank {self.rank} was making a communicator, but rank {peer} died"
                    )
            for block in blocks.values():
                if block.state > board.CLOSED:
                    raise failure(block)
            check_time(self.rank, missing[0], self._start, self._timeout_s)
        # Who fails from here on says so in its block.
        self._through.update((peer, card.listener) for peer, card in self._cards.items())
        return self._links, blocks

    def _post(self, card: Card) -> None:
        self._store.set(self._card_key(self.rank), json.dumps(card._asdict()))

    def _await_news(self, listener: Listener, missing: list[int], timeout_s: float) -> bool:
        """Wait a while for a connection or a message."""
        poll = select.poll()
        poll.register(listener.socket, select.POLLIN)
        for peer in missing:
            if self._links.connected(peer):
                poll.register(self._links.fileno(peer), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def _read_card(self, peer: int) -> None:
        """Learn the peer's latest card, unless its present one still serves."""
        card = None if self._links.connected(peer) else self._stored_card(peer)
        if card is None:
            return
        if card.failed:
            if card.listener != self._through.get(peer):
                raise AbortedError(f"rank {peer} failed while making a communicator: {card.failed}")
        elif self._cards.get(peer) != card:
            self._cards[peer] = card
            self._links.watch(peer, card.pid)

    def _stored_card(self, rank: int) -> Card | None:
        if not self._store.check([self._card_key(rank)]):
            return None
        text = self._store.get(self._card_key(rank)).decode()
        return None if text == TAKEN_BACK else Card(**json.loads(text))

    def _connect(self, peer: int) -> None:
        card = self._cards.get(peer)
        if card is None:
            return
        try:
            self._links.add(peer, open_connection(card.listener))
        except ConnectionError:
            return  # An old card: its listener is closed, a new card will come.
        self._send(peer)

    def _accept(self, listener: Listener, blocks: dict[int, ControlBlock]) -> None:
        """Accept what has come from the ranks above.

        A rank that comes a second time has either failed in between, or is done with this meeting
        and comes for the next: then its block lies in the first connection, and it must try again.
        """
        while True:
            try:
                connection, pid = listener.accept()
            except BlockingIOError:
                return
            for peer in range(self.rank + 1, self.world_size):
                self._receive(peer, blocks)
                self._read_card(peer)
            named = [peer for peer, card in self._cards.items() if card.pid == pid]
            if len(named) == 1 and named[0] > self.rank and named[0] not in blocks:
                self._links.add(named[0], connection)
                self._send(named[0])
            else:
                connection.close()

    def _send(self, peer: int) -> None:
        assert self._own is not None
        self._unsent.discard(peer)
        try:
            if not self._links.send(peer, b"control", self._own.descriptor):
                self._unsent.add(peer)
        except ConnectionError:
            self._links.drop(peer)

    def _receive(self, peer: int, blocks: dict[int, ControlBlock]) -> None:
        """Take the peer's control block if it is there; let go of a broken connection."""
        connected = self._links.connected(peer)
        if peer in blocks or not connected or not self._links.pending(peer, 0.0):
            return
        try:
            _, descriptor = self._links.receive(peer)
        except ConnectionError:
            self._links.drop(peer)
            return
        size = ControlBlock.size(self.world_size)
        blocks[peer] = ControlBlock(Segment.attach(descriptor, size), self.world_size)

    def _card_key(self, rank: int) -> str:
        return f"{self._key}/card/{rank}"

    def fail(self, error: BaseException) -> None:
        """Tell the others that nothing will come of it, once each: by a card, then by the block."""
        told = isinstance(error, (PeerLostError, PeerTimeoutError, AbortedError))
        with suppress(dist.DistError):  # of a store that is gone
            if not told:
                self._post(self._card._replace(failed=repr(error)))
            for rank in range(self.world_size):
                card = self._stored_card(rank)
                if card is not None and card.failed:
                    self._through[rank] = card.listener
            self._failed = not told
        if self._own is not None:
            reason = f"rank {self.rank} failed while making a communicator: {error!r}"
            ControlBlock(self._own, self.world_size).set_state(state_of(error), reason)
        self._links.close()

    def end(self) -> None:
        """Take back what was only for meeting."""
        if self._listener is not None:
            self._listener.close()
        if self._own is not None:
            self._own.release_descriptor()
        if not self._failed:
            with suppress(dist.DistError):
                # Not deleted: a rank between check and get would block in the store.
                self._store.set(self._card_key(self.rank), TAKEN_BACK)
