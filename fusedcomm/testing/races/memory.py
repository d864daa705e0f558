"""One piece of memory, and each thread's last accesses to each part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fusedcomm.testing.races.events import KINDS, Event, Range


class Memory:
    """Shadows of a memory: for every cell and thread, the last access of each sort.

    A cell is what lies between two neighbouring bounds of any accesses, so that each access covers
    whole cells.
    """

    def __init__(self, ranges: Sequence[Range], threads: int) -> None:
        """
        Args:
            ranges: of all accesses to come.
            threads: how many threads there are.
        """
        self._bounds = np.unique(np.array(ranges, dtype=np.int64))
        # Sort of access (whether it writes, whether it is atomic), thread, cell -> number of the
        # event, and its position in its thread. Positions count from 1: 0 is no access.
        shape = (2, 2, threads, len(self._bounds))
        self._last = np.zeros(shape, dtype=np.int64)
        self._position = np.zeros(shape, dtype=np.int64)
        self._events: list[Event] = []

    def access(self, event: Event, thread: int, clock: np.ndarray) -> Iterator[tuple[Event, Range]]:
        """Note an access, and yield those before it that ``clock`` does not count, and where.

        Args:
            clock: for every thread, how many of its events come before this one, itself included.
        """
        writes, atomic = KINDS[event.kind]
        cells = self._cells(event.ranges)
        for other_writes in (False, True):
            for other_atomic in (False, True):
                if not (writes or other_writes) or (atomic and other_atomic):
                    continue
                sort = (int(other_writes), int(other_atomic))
                before = self._position[sort][:, cells]
                raced = before > clock[:, None]
                if raced.any():
                    numbers = np.where(raced, self._last[sort][:, cells], -1)
                    for number in np.unique(numbers[raced]):
                        cell = cells[(numbers == number).any(axis=0)][0]
                        piece = (int(self._bounds[cell]), int(self._bounds[cell + 1]))
                        yield self._events[number], piece
        self._events.append(event)
        self._last[int(writes), int(atomic), thread, cells] = len(self._events) - 1
        self._position[int(writes), int(atomic), thread, cells] = clock[thread]

    def _cells(self, ranges: Sequence[Range]) -> np.ndarray:
        ends = np.searchsorted(self._bounds, np.array(ranges, dtype=np.int64))
        return np.concatenate([np.arange(first, end) for first, end in ends])
