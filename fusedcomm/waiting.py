"""Bounded waits: nothing hangs, whatever the other ranks do.

A wait ends when its flag is up, or with the error that says why it never will be: the awaited rank
died or closed, ranks disagree about the current call, a rank failed, or the time is over. The
looks at the other ranks happen every 50 ms; between them the core is given away, for there may be
more ranks than cores.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from fusedcomm import board, circles
from fusedcomm.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    FusedcommError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
)
from fusedcomm.symmetric.fence import make_fence
from fusedcomm.symmetric.links import POLL_S, Links

#: The message with which an ordered pair's memory comes; others belong to calls of all ranks.
PAIR = b"pair"

_STATE_OF: dict[type[BaseException], int] = {
    PeerLostError: board.LOST,
    PeerTimeoutError: board.TIMED_OUT,
    MismatchError: board.MISMATCHED,
    CapacityError: board.FULL,
}
_ERROR_OF = {state: error for error, state in _STATE_OF.items()}

#: Looks at a flag before the first system call: a few microseconds.
_SPINS = 64
#: Seconds of yielding, for a short wait; after that the rank sleeps between looks.
_YIELD_S = 2e-3
_NAP_S = 50e-6
#: How long after torch.distributed's error a death is looked for.
_DEATH_S = 2.0


def state_of(error: BaseException) -> int:
    """The state in which an error leaves a rank's control block."""
    return _STATE_OF.get(type(error), board.ABORTED)


def failure(block: board.ControlBlock) -> BaseException:
    """The error that a failed rank's control block stands for, on the others."""
    return _ERROR_OF.get(block.state, AbortedError)(block.reason)


def reached(flag: int, wanted: int) -> bool:
    """Whether ``flag`` is at or past ``wanted``, both int32 counters that may wrap around."""
    return (flag - wanted) & 0xFFFFFFFF < 0x80000000


def following(epoch: int) -> int:
    """The int32 counter after ``epoch``."""
    return (epoch + 0x80000001) % 0x100000000 - 0x80000000


class Pending(Protocol):
    """What was begun and is to be waited for: torch.distributed's ``Work`` is."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class Awaited(NamedTuple):
    """What a wait is for; the words of its error message."""

    op: str
    epoch: int
    chunk: int
    what: str

    def __str__(self) -> str:
        where = "" if self.chunk < 0 else f", chunk {self.chunk}"
        return f"{self.what} in {self.op} (epoch {self.epoch}{where})"


class Watch:
    """What this rank knows of its peers: whether they live, and what they are doing."""

    def __init__(
        self, rank: int, blocks: dict[int, board.ControlBlock], links: Links, timeout_s: float
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.fence = make_fence()
        self.links = links
        #: What says that ranks outside of this watch have given up, and why; asked in each look.
        self.alarm: Callable[[], str | None] = lambda: None
        self.number = 0
        #: This rank's control block.
        self.own = blocks[rank]
        #: Tells the communicators of one group apart.
        self.channel = ""
        self._blocks = blocks
        self._text = ""
        # Where ranks share cores, looking again keeps the awaited one from running.
        self._spins = _SPINS if len(blocks) <= (os.cpu_count() or 1) else 0
        #: Lets transfers that are under way go on while this rank waits for something else.
        self.background: Callable[[], object] | None = None
        #: What a pair of ranks can have under way, for messages.
        self.buffer_bytes = 0
        self._circles = circles.Circles(rank, blocks)
        #: The last of each peer's calls that was compared with this rank's.
        self._agreed: defaultdict[int, int] = defaultdict(int)
        #: Messages that came while one of the other kind was awaited.
        self._held: defaultdict[tuple[int, bool], deque[tuple[bytes, int]]] = defaultdict(deque)

    @property
    def state(self) -> int:
        return self.own.state

    @property
    def reason(self) -> str:
        return self.own.reason

    def post(self, text: str) -> None:
        """Announce this rank's next call to all peers."""
        self.number += 1
        self._text = self.own.fit(text)
        self.own.post(self.number, self._text)

    def compare(self, peer: int) -> None:
        """Compare the peer's calls with this rank's, up to the current one.

        Mostly only the current one is new. But a rank that only gives in a call (the source of a
        broadcast) waits for nobody there, and compares in a later one.

        Raises:
            MismatchError: they differ.
        """
        block, first = self._blocks[peer], self._agreed[peer] + 1
        if first == self.number and block.agrees(first, self._text):
            self._agreed[peer] = first
            return
        if first < self.number:
            for number in range(max(first, self.number - board.BOARDS + 1), self.number):
                self._compare(block, peer, number, self.own.read(number))
        self._compare(block, peer, self.number, self._text)

    def _compare(self, block: board.ControlBlock, peer: int, number: int, text: str | None) -> None:
        same = None if text is None else block.agrees(number, text)
        if same:
            if number > self._agreed[peer]:
                self._agreed[peer] = number
        elif same is not None:
            raise MismatchError(
                f"ranks disagree on call {number}: rank {self.rank} is in "
                f"[{text}], rank {peer} in [{block.read(number)}]. Every rank of a group must "
                "issue the same calls, with the same global shapes and dtypes, in the same order."
            )

    def fail(self, error: BaseException) -> None:
        """Make the communicator unusable and let the peers' waits raise the same kind of error."""
        told = isinstance(error, AbortedError) or state_of(error) != board.ABORTED
        reason = f"rank {self.rank} failed in the middle of a call: {error!r}"
        self.own.set_state(state_of(error), str(error) if told else reason)

    def abort(self, reason: str) -> None:
        """Make the communicator unusable by a user's wish."""
        self.own.set_state(board.ABORTED, reason)

    def close(self) -> None:
        self.own.set_state(board.CLOSED, f"rank {self.rank} closed its communicator")

    def wait(self, words: memoryview, index: int, wanted: int, peer: int, awaited: Awaited) -> None:
        """Wait until the flag ``words[index]``, which ``peer`` sets, reaches ``wanted``.

        Raises:
            PeerLostError, PeerTimeoutError, MismatchError, AbortedError: it never will.
        """
        for _ in range(self._spins):
            if (words[index] - wanted) & 0xFFFFFFFF < 0x80000000:
                return
        self.wait_until(
            lambda: reached(words[index], wanted), self.background, circles.CALL, peer, awaited
        )

    def poll(self, words: memoryview, index: int, wanted: int) -> bool:
        """Whether the flag ``words[index]`` has reached ``wanted``; data may be used if so."""
        if (words[index] - wanted) & 0xFFFFFFFF >= 0x80000000:  # ``reached``, without a call
            return False
        self.fence()
        return True

    def wait_until(
        self,
        over: Callable[[], bool],
        progress: Callable[[], object] | None,
        kind: int,
        peer: int,
        awaited: Awaited,
    ) -> None:
        """Wait until ``over()``, which ``peer`` brings about, with the errors of ``wait``.

        Args:
            progress: what is to be done meanwhile, again and again.
            kind: what is waited in; see ``circles``.
        """
        start = time.monotonic()
        look = start + POLL_S
        while not over():
            if progress is not None:
                progress()
            now = time.monotonic()
            if now < start + _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
            if now >= look:
                gone = self._gone(peer)
                # A peer that finished its part and left is no fault: look once more.
                if progress is not None:
                    progress()
                if over():
                    return
                self._check(peer, awaited, start, gone, kind)
                look = now + POLL_S

    def await_call(self, peer: int, awaited: Awaited) -> None:
        """Wait until ``peer`` has begun its call of the same number, and compare the two."""
        start = time.monotonic()
        block = self._blocks[peer]
        while not block.posted(self.number):
            gone = self._gone(peer)
            if not block.posted(self.number):
                self._check(peer, awaited, start, gone)
                time.sleep(_NAP_S)
        self.compare(peer)

    def look(self, awaited: Awaited) -> None:
        """One look at every peer, before something is begun that needs them all."""
        start = time.monotonic()
        for peer in self.links.peers:
            self._check(peer, awaited, start, self._gone(peer), 0)

    def await_work(self, work: Pending, awaited: Awaited) -> None:
        """Wait for torch.distributed's collective of CPU ranks, with the errors of ``wait``."""
        relax = self.relaxer(awaited)
        while not work.is_completed():
            relax()
        work.wait()

    def relaxer(self, awaited: Awaited) -> Callable[[], None]:
        """What a wait for something that any peer may owe calls between two looks.

        A peer may have done its part and left while the last of it is under way here: only one
        that was gone at the look before is missed.
        """
        start = time.monotonic()
        look = start + POLL_S
        missing: set[int] = set()

        def relax() -> None:
            nonlocal look, missing
            now = time.monotonic()
            if now < start + _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
            if now < look:
                return
            gone = {peer: why for peer in self.links.peers if (why := self._gone(peer))}
            lost = next((peer for peer in gone if peer in missing), None)
            self._check(lost, awaited, start, None if lost is None else gone[lost])
            missing, look = set(gone), now + POLL_S

        return relax

    def _check(
        self,
        peer: int | None,
        awaited: Awaited,
        start: float,
        gone: str | None,
        kind: int = circles.CALL,
    ) -> None:
        """Raise if the wait for ``peer``, begun at ``start``, cannot succeed.

        Args:
            peer: None where nobody knows which of the others is missing.
            gone: why nothing more will come from it, if so.
            kind: what is waited in, see ``circles``; 0 if it is for no one rank.
        """
        whom = "the other ranks" if peer is None else f"rank {peer}"
        if self.own.state == board.CLOSED:
            raise ClosedError(f"{self.own.reason} while it waited for {awaited} of {whom}")
        blocks = self._blocks
        for other in blocks:
            if other != self.rank:
                self.compare(other)
        for block in blocks.values():
            state = block.state
            if state > board.CLOSED:
                raise failure(block)
        reason = self.alarm()
        if reason is not None:
            raise AbortedError(reason)
        if gone is not None:
            raise PeerLostError(f"rank {self.rank} waits for {awaited} of {whom}, but {gone}")
        if peer is not None and kind:
            chain = self._circles.look(start, kind, peer)
            if chain is not None:
                raise MismatchError(circles.describe(chain, self.buffer_bytes, self._text))
        if time.monotonic() - start > self.timeout_s:
            raise PeerTimeoutError(
                f"rank {self.rank} waited {self.timeout_s:g} s for {awaited} of {whom}"
            )

    def explained(self, error: RuntimeError, awaited: Awaited) -> FusedcommError:
        """Why torch.distributed failed. A dying peer's sockets close before its death shows."""
        start = time.monotonic()
        try:
            while self.links.peers and time.monotonic() < start + _DEATH_S:
                for peer in self.links.peers:
                    self._check(peer, awaited, start, self._gone(peer), 0)
                time.sleep(POLL_S / 5)
        except FusedcommError as found:
            return found
        return PeerLostError(f"torch.distributed failed for rank {self.rank} in {awaited}: {error}")

    def receive(self, peer: int, awaited: Awaited) -> tuple[bytes, int]:
        """The next message and descriptor of ``peer``, with the errors of ``wait``."""
        start = time.monotonic()
        held = self._held[peer, False]
        try:
            while not held:
                while not self.links.pending(peer, POLL_S):
                    gone = self._gone(peer)
                    if not self.links.pending(peer, 0.0):
                        self._check(peer, awaited, start, gone)
                self._take_message(peer)
            return held.popleft()
        except ConnectionError as error:
            self._check(peer, awaited, start, self._gone(peer) or str(error))
            raise

    def receive_pair(self, peer: int) -> int | None:
        """The descriptor of the memory in which ``peer`` sends to this rank, if it has come."""
        held = self._held[peer, True]
        try:
            while not held and self.links.connected(peer) and self.links.pending(peer, 0.0):
                self._take_message(peer)
        except ConnectionError:
            return None  # It is gone: the wait will say so.
        return held.popleft()[1] if held else None

    def _take_message(self, peer: int) -> None:
        message = self.links.receive(peer)
        self._held[peer, message[0] == PAIR].append(message)

    def send(self, peer: int, payload: bytes, descriptor: int, awaited: Awaited) -> None:
        """Send a message and a descriptor to ``peer``, with the errors of ``wait``."""
        start = time.monotonic()
        try:
            while not self.links.send(peer, payload, descriptor):
                # It is the kernel that has no room, and nothing that the peer could do.
                self._check(peer, awaited, start, self._gone(peer), 0)
                time.sleep(_NAP_S)
        except ConnectionError as error:
            gone = self._gone(peer) or f"rank {peer} is gone ({error})"
            self._check(peer, awaited, start, gone)
            raise

    def forget(self) -> None:
        """Let go of the peers' control blocks."""
        self._blocks = {self.rank: self.own}
        self._circles = circles.Circles(self.rank, self._blocks)
        self.background = None
        for messages in self._held.values():
            for _, descriptor in messages:
                os.close(descriptor)
        self._held.clear()

    @property
    def text(self) -> str:
        """This rank's current call, as on its board."""
        return self._text

    def _gone(self, peer: int) -> str | None:
        """Why nothing more will come from ``peer``, if so."""
        block = self._blocks.get(peer)
        if block is None or block.state == board.CLOSED:
            return f"rank {peer} closed its communicator"
        if not self.links.alive(peer):
            return f"rank {peer} died"
        return None
