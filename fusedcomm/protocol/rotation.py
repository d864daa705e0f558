"""Whether a rank writes into the same memory again, or goes round its banks.

Memory that stays in a cache which the ranks share is the fastest to write again. But where the
reader's core has another last-level cache, each line that it has read must be taken back from there
before it is written again, one after the other (measured: 27 ns a line, four times what a line
takes that is in no cache). Then it is better to write elsewhere, and to come back when the reader's
cache has dropped the old lines.

What an operating system says of caches does not help: ranks wander from core to core, and virtual
machines know nothing of the real ones. So each rank looks at how long it takes, for itself: where
its data lies it tells its readers with every signal.
"""

from __future__ import annotations

#: Slow calls in a row before a rank goes round: one may have been interrupted.
_SLOW = 2
#: Calls for which it goes round before it tries the same memory again: at first, and at most. The
#: number doubles each time that the same memory is still slow.
_FIRST, _MOST = 16, 256


class Rotation:
    """What one rank does in one workspace.

    Attributes:
        on: whether it goes round its banks.
    """

    __slots__ = ("on", "_calls", "_left", "_slow")

    def __init__(self) -> None:
        self.on = False
        self._calls = _FIRST
        self._left = self._slow = 0

    def judge(self, writing_s: float, whole_s: float) -> None:
        """Look at a call, or a part of one, in which memory was written that had just been read.

        Without misses, writing is at most four tenths of it: reading and adding are the rest. With
        them it is two thirds and more.

        Args:
            writing_s: seconds in which the rank wrote what others read.
            whole_s: seconds of all it did.
        """
        if self.on:
            self._left -= 1
            self.on = self._left > 0
            return
        if 2 * writing_s <= whole_s:
            self._slow, self._calls = 0, _FIRST
            return
        self._slow += 1
        if self._slow == _SLOW:
            self.on, self._slow, self._left = True, 0, self._calls
            self._calls = min(2 * self._calls, _MOST)
