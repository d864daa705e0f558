"""Point-to-point transfers of CPU ranks: a bounded buffer per ordered pair of ranks.

The sender makes a pair's memory at its first send and hands it to the receiver, with whom alone it
is agreed. It is a ring of ``PARTS`` parts, used one after the other by all messages of the pair::

    written                  parts that the sender has filled, an int32 counter; the pair's epoch
    emptied                  parts that the receiver has read
    heads[part]              of a message's first part: dtype and shape, for comparison
    data[part]               ``PART_BYTES`` each

The sender fills a part when ``emptied >= number + 1 - PARTS``, then sets ``written``; the receiver
reads it when ``written >= number + 1``, then sets ``emptied``. Both cut a message in the same way,
from its size and the part it begins with, so that nothing else need be said. Counters are never
reset; comparisons wrap around.

Messages of one pair are received in the order in which they were sent. All transfers that have been
begun go on whenever this rank waits for anything on its communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from fusedcomm.board import FLAG_STRIDE, ControlBlock
from fusedcomm.circles import SEND
from fusedcomm.errors import MismatchError
from fusedcomm.symmetric.shm import Segment
from fusedcomm.waiting import PAIR, Awaited, Watch

PARTS = 32
PART_BYTES = 1 << 16
#: What may be sent before the receiver has come.
BUFFER_BYTES = PARTS * PART_BYTES
#: Parts that are copied, and signalled, at once: large enough to hide Python's own time.
_BURST = 8

_WRITTEN, _EMPTIED = 0, FLAG_STRIDE // 4
_HEADS, _HEAD = 2 * FLAG_STRIDE, 256
_DATA = 3 * 4096
_SIZE = _DATA + BUFFER_BYTES


def wrapped(number: int) -> int:
    """A count as the int32 counter shows it."""
    return (number + 0x80000000) % 0x100000000 - 0x80000000


class Transfer:
    """A message under way. ``wait`` ends it; the tensor may not be used for anything before."""

    def __init__(self, pairs: Pairs, kind: int, peer: int, data: Tensor, text: str) -> None:
        """Begin it.

        Args:
            kind: ``SEND`` or ``RECV``.
            data: the message, flat and contiguous, as bytes.
            text: dtype and shape, to be equal on both ranks.
        """
        self.kind, self.peer, self.text = kind, peer, text
        self._pairs = pairs
        self._data = data
        self._moved = 0
        self._begun = False
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether it is over; also lets all transfers go on."""
        if not self._finished:
            self._pairs.progress()
        return self._finished

    def wait(self) -> None:
        """Wait until it is over: a sent tensor may be changed, a received one is there."""
        if not self._finished:
            self._pairs.wait(self)

    def advance(self, ring: _Ring) -> bool:
        """Move as many parts as can be; returns whether any was."""
        moved = False
        while not self._finished:
            left = self._data.numel() - self._moved
            place = ring.number % PARTS
            parts = max(1, min(-(-left // PART_BYTES), _BURST, PARTS - place))
            if not ring.ready(parts):
                break
            if not self._begun:
                self._begun = True
                ring.head(place, self.text)
            count = min(left, parts * PART_BYTES)
            ring.copy(place, self._data[self._moved : self._moved + count])
            self._moved += count
            ring.finish(parts)
            self._finished = self._moved == self._data.numel()
            moved = True
        return moved


class _Ring:
    """One side's view of an ordered pair's memory."""

    #: The counter that this side sets.
    _OWN: int

    def __init__(self, watch: Watch, segment: Segment, peer: int) -> None:
        self._watch, self._segment, self._peer = watch, segment, peer
        #: Parts gone by; on both sides it begins with the first epoch.
        self.number = segment.words[self._OWN]
        self.queue: deque[Transfer] = deque()

    def ready(self, parts: int) -> bool:
        """Whether so many parts may be used now."""
        raise NotImplementedError

    def head(self, place: int, text: str) -> None:
        """Say, or compare, what the message that begins in part ``place`` is."""
        raise NotImplementedError

    def copy(self, place: int, part: Tensor) -> None:
        """Copy bytes of the message into, or out of, the parts from ``place`` on."""
        raise NotImplementedError

    def finish(self, parts: int) -> None:
        """Tell the other side that so many parts are done."""
        self.number += parts
        self._watch.fence()
        self._segment.words[self._OWN] = wrapped(self.number)

    def advance(self) -> bool:
        """Let the transfers of this pair go on, one after the other."""
        moved = False
        while self.queue:
            moved |= self.queue[0].advance(self)
            if not self.queue[0]._finished:
                break
            self.queue.popleft()
        return moved


class _Sending(_Ring):
    _OWN = _WRITTEN

    def ready(self, parts: int) -> bool:
        wanted = wrapped(self.number + parts - PARTS)
        return self._watch.poll(self._segment.words, _EMPTIED, wanted)

    def head(self, place: int, text: str) -> None:
        encoded = ControlBlock.fit(text, _HEAD - 4).encode()
        start = _HEADS + place * _HEAD
        self._segment.bytes[start + 4 : start + 4 + len(encoded)] = encoded
        self._segment.bytes[start : start + 4] = len(encoded).to_bytes(4, "little")

    def copy(self, place: int, part: Tensor) -> None:
        _data(self._segment, place, part).copy_(part)


class _Receiving(_Ring):
    _OWN = _EMPTIED

    def ready(self, parts: int) -> bool:
        return self._watch.poll(self._segment.words, _WRITTEN, wrapped(self.number + parts))

    def head(self, place: int, text: str) -> None:
        start = _HEADS + place * _HEAD
        length = int.from_bytes(self._segment.bytes[start : start + 4], "little")
        theirs = bytes(self._segment.bytes[start + 4 : start + 4 + length]).decode()
        mine = ControlBlock.fit(text, _HEAD - 4)
        if theirs != mine:
            raise MismatchError(
                f"ranks disagree on a message: rank {self._peer} sends [{theirs}] to rank "
                f"{self._watch.rank}, which receives [{mine}]"
            )

    def copy(self, place: int, part: Tensor) -> None:
        part.copy_(_data(self._segment, place, part))


def _data(segment: Segment, place: int, part: Tensor) -> Tensor:
    return segment.tensor(_DATA + place * PART_BYTES, (part.numel(),), part.dtype)


class Pairs:
    """All point-to-point transfers of one rank on one communicator."""

    def __init__(self, watch: Watch, first_epoch: int) -> None:
        self._watch = watch
        self._first_epoch = first_epoch
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        #: Receives from ranks that have sent nothing yet.
        self._early: dict[int, deque[Transfer]] = {}
        watch.buffer_bytes = BUFFER_BYTES

    def begin(self, kind: int, peer: int, data: Tensor, text: str) -> Transfer:
        """Begin a transfer; see ``Transfer``."""
        transfer = Transfer(self, kind, peer, data, text)
        if kind == SEND:
            ring = self._sending.get(peer)
            if ring is None:
                ring = self._sending[peer] = self._open(peer)
            ring.queue.append(transfer)
        elif peer in self._receiving:
            self._receiving[peer].queue.append(transfer)
        else:
            self._early.setdefault(peer, deque()).append(transfer)
        self._watch.background = self.progress
        self.progress()
        return transfer

    def progress(self) -> bool:
        """Let every transfer go on as far as it can; returns whether any did."""
        moved = False
        for peer in list(self._early):
            found = self._watch.receive_pair(peer)
            if found is not None:
                segment = Segment.attach(found, _SIZE)
                self._receiving[peer] = _Receiving(self._watch, segment, peer)
                self._receiving[peer].queue = self._early.pop(peer)
        for ring in (*self._sending.values(), *self._receiving.values()):
            if ring.queue:
                moved |= ring.advance()
        if not self._early and not any(
            ring.queue for ring in (*self._sending.values(), *self._receiving.values())
        ):
            self._watch.background = None
        return moved

    def wait(self, transfer: Transfer) -> None:
        """Let all transfers go on until this one is over."""
        sending = transfer.kind == SEND
        op, what = ("send", "room in the buffer") if sending else ("recv", "data")
        awaited = Awaited(op, self._number(transfer), -1, what)
        self._watch.wait_until(
            lambda: transfer._finished, self.progress, transfer.kind, transfer.peer, awaited
        )

    def _number(self, transfer: Transfer) -> int:
        rings = self._sending if transfer.kind == SEND else self._receiving
        ring = rings.get(transfer.peer)
        return 0 if ring is None else ring.number

    def _open(self, peer: int) -> _Sending:
        """Make a pair's memory and hand it to the receiver, which takes it when it receives."""
        segment = Segment.create("pair", _SIZE)
        if self._first_epoch:  # new memory is zero
            segment.words[_WRITTEN] = segment.words[_EMPTIED] = self._first_epoch
        awaited = Awaited("send", 0, -1, "taking over the pair's memory")
        try:
            self._watch.send(peer, PAIR, segment.descriptor, awaited)
        finally:
            segment.release_descriptor()
        return _Sending(self._watch, segment, peer)

    def segments(self) -> Iterator[tuple[int, int, Segment]]:
        """The pairs' memory: sender, receiver, segment."""
        own = self._watch.rank
        for peer, sending in self._sending.items():
            yield own, peer, sending._segment
        for peer, receiving in self._receiving.items():
            yield peer, own, receiving._segment

    def close(self) -> None:
        """Let go of the memory."""
        self._sending.clear()
        self._receiving.clear()
        self._early.clear()
