"""A rank's control block: its state, its barrier flags and the board of its recent calls.

Each rank of a communicator owns one block, in shared memory of its own, that all its peers can
read::

    word 0                      state: RUNNING, CLOSED, or the kind of failure
    words 4 .. 7                a wait that takes long: kind, peer, number of the wait, beat
    byte 64                     reason: int32 length, UTF-8 text
    byte 2048 + 128 * source    barrier flag, set by ``source``
    after these                 BOARDS entries of 512 bytes: int64 call number, int32 length, text

An entry of the board is one call of this rank: operation, dtype, global shape, chunking. It is
written before the call raises its first flag; its call number is written last, so a reader that
sees its own number sees the text too.
"""

from __future__ import annotations

import functools
import hashlib
import threading

from fusedcomm.symmetric.shm import Segment

RUNNING, CLOSED, ABORTED, LOST, TIMED_OUT, MISMATCHED, FULL = range(7)

#: Entries on a board. A rank that is further ahead than this has long consumed what we compare.
BOARDS = 64
#: Bytes between two flags: one cache line pair, so that no flag's writer disturbs another's reader.
FLAG_STRIDE = 128
_REASON, _REASON_SPACE = 64, 1900
_BARRIER = 2048
_WAITING = 4
_ENTRY, _TEXT = 512, 12


@functools.lru_cache(maxsize=1024)
def _encoded(text: str) -> bytes:
    """An entry's text; the same few ones are posted again and again."""
    return text.encode()


class ControlBlock:
    """A view of one rank's control block."""

    def __init__(self, segment: Segment, world_size: int) -> None:
        self._words = segment.words
        self._bytes = segment.bytes
        self._numbers = segment.bytes.cast("q")
        self._boards = _BARRIER + FLAG_STRIDE * world_size
        self._lock = threading.Lock()

    @staticmethod
    def size(world_size: int) -> int:
        """Bytes that a block takes."""
        return _BARRIER + FLAG_STRIDE * world_size + BOARDS * _ENTRY

    @property
    def words(self) -> memoryview:
        return self._words

    @property
    def state(self) -> int:
        return self._words[0]

    @property
    def reason(self) -> str:
        return self._get_text(_REASON)

    def set_state(self, state: int, reason: str = "") -> None:
        """Enter a final state, on the owner; the first one stays, from whichever thread."""
        with self._lock:
            if self._words[0] == RUNNING:
                self._put_text(_REASON, reason, _REASON_SPACE)
                self._words[0] = state

    @staticmethod
    def barrier_index(source: int) -> int:
        """The word that ``source`` sets in this block when it arrives at a barrier."""
        return (_BARRIER + FLAG_STRIDE * source) // 4

    def set_waiting(self, kind: int, peer: int, number: int) -> None:
        """Say, on the owner, what it waits in and for whom; see ``circles``. Kind 0: nothing."""
        self._words[_WAITING] = 0
        self._words[_WAITING + 1] = peer
        self._words[_WAITING + 2] = number
        self._words[_WAITING] = kind

    def beat(self) -> None:
        """The owner looked once more, and still waits."""
        self._words[_WAITING + 3] = (self._words[_WAITING + 3] + 1) & 0x7FFFFFFF

    def waiting(self) -> tuple[int, int, int, int]:
        """Kind, peer, number and beat of the owner's present wait."""
        while True:
            number = self._words[_WAITING + 2]
            kind, peer, _, beat = self._words[_WAITING : _WAITING + 4]
            if number == self._words[_WAITING + 2]:
                return kind, peer, number, beat

    @staticmethod
    def fit(text: str, space: int = _ENTRY - _TEXT) -> str:
        """``text`` as an entry holds it: a longer one is cut, and told apart by its digest."""
        if 4 * len(text) <= space:  # UTF-8 takes at most 4 bytes a character
            return text
        encoded = text.encode()
        if len(encoded) <= space:
            return text
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        return f"{encoded[: space - 20].decode(errors='ignore')}… {digest}"

    def post(self, number: int, text: str) -> None:
        """Write call ``number`` on the board; ``text`` must ``fit``."""
        start = self._boards + number % BOARDS * _ENTRY
        encoded = _encoded(text)
        self._numbers[start // 8] = -1
        self._words[start // 4 + 2] = len(encoded)
        self._bytes[start + _TEXT : start + _TEXT + len(encoded)] = encoded
        self._numbers[start // 8] = number

    def read(self, number: int) -> str | None:
        """What the owner did in its call ``number``; None if that is to come or long ago."""
        start = self._boards + number % BOARDS * _ENTRY
        if self._numbers[start // 8] != number:
            return None
        text = self._get_text(start + 8)
        return text if self._numbers[start // 8] == number else None

    def agrees(self, number: int, text: str) -> bool | None:
        """Whether the owner's call ``number`` is ``text``; None if it is to come or long ago."""
        start = self._boards + number % BOARDS * _ENTRY
        if self._numbers[start // 8] != number:
            return None
        encoded, length = _encoded(text), self._words[start // 4 + 2]
        same = self._bytes[start + _TEXT : start + _TEXT + length] == encoded
        return same if self._numbers[start // 8] == number else None  # it was being rewritten

    def posted(self, number: int) -> bool:
        """Whether the owner has begun its call ``number``."""
        return self._numbers[(self._boards + number % BOARDS * _ENTRY) // 8] >= number

    def _put_text(self, start: int, text: str, space: int) -> None:
        encoded = text.encode()[: space - 4]
        self._words[start // 4] = len(encoded)
        self._bytes[start + 4 : start + 4 + len(encoded)] = encoded

    def _get_text(self, start: int) -> str:
        length = self._words[start // 4]
        return bytes(self._bytes[start + 4 : start + 4 + length]).decode(errors="replace")
