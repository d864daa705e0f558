"""Finding races in recordings: what orders what, and which conflicting accesses nothing orders.

Order is kept in vector clocks: for every thread (a stream of a rank, or a program number of its
launches there), how many of its events come before. Two events are ordered if the clock of one
counts the other. What makes order:

- the events of one program, in their order;
- launches and the host's own steps on one stream of a rank, in their order; not the programs of
  one launch;
- a stream beside another, from where it forks on, and up to where it joins;
- a counter: the last of a launch's programs that count into it comes after all of the others.
  Which one is last is chance, so the others gain nothing;
- a flag: a wait comes after the *first* release that satisfies it. What it really saw may have been
  a later one, but in another run it would not have been; and if several ranks or programs might
  have raised the flag first, only what comes before all of these is certain. A flag that was high
  enough before the recording began gives no order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fusedcomm.testing.races.events import KINDS, Event, Range, Recording
from fusedcomm.testing.races.memory import Memory
from fusedcomm.waiting import reached

_Place = tuple[str, int]  # a flag: its memory, its first byte
_Index = tuple[int, int]  # an event: which recording, which event of it


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, at least one of them a write, that nothing orders.

    Attributes:
        memory: what people call the memory.
        range: the first bytes of it in question.
        count: how many such pairs there are at these two lines of code.
    """

    first: Event
    second: Event
    memory: str
    range: Range
    count: int = 1

    def __str__(self) -> str:
        start, end = self.range
        where = f"argument {self.first.buffer}, " if self.first.buffer else ""
        times = "" if self.count == 1 else f", {self.count} times"
        return (
            f"race on {where}{self.memory}, bytes {start}..{end}{times}: nothing orders\n"
            f"  {self.first}\n  {self.second}"
        )


def check(recordings: Sequence[Recording]) -> list[Race]:
    """The races in what all ranks recorded at the same time; one for each pair of lines of code.

    Raises:
        ValueError: a wait saw a value that no rank's recording has a release of.
    """
    return _Check(recordings).run()


def _thread(event: Event) -> object:
    return event.rank, event.stream, event.program


@dataclass
class _Stream:
    """Where the check stands on one stream of a rank, in a launch on it if there is one."""

    clock: np.ndarray
    launch: object = None
    programs: dict[int, np.ndarray] = field(default_factory=dict)


class _Rank:
    """Where the check stands in one rank's recording."""

    def __init__(self, number: int, recording: Recording, threads: dict[object, int]) -> None:
        self.number = number
        self.events = recording.events
        self.next = 0
        self._threads = threads
        self._streams: dict[str, _Stream] = {}

    def thread_of(self, event: Event) -> int:
        return self._threads[_thread(event)]

    def clock_of(self, event: Event) -> np.ndarray:
        """The clock of the event's program, which starts when its launch does."""
        if event.stream not in self._streams:
            self._streams[event.stream] = _Stream(np.zeros(len(self._threads), dtype=np.int64))
        stream = self._streams[event.stream]
        if event.launch != stream.launch:
            for clock in stream.programs.values():
                np.maximum(stream.clock, clock, out=stream.clock)
            stream.programs.clear()
            stream.launch = event.launch
        if event.launch is None:
            return stream.clock
        return stream.programs.setdefault(self.thread_of(event), stream.clock.copy())


class _Check:
    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._names: dict[str, str] = {}
        threads: dict[object, int] = {}
        for recording in recordings:
            self._names |= recording.names
            for event in recording.events:
                threads.setdefault(_thread(event), len(threads))
        self._ranks = [_Rank(i, r, threads) for i, r in enumerate(recordings)]
        self._position = np.zeros(len(threads), dtype=np.int64)
        self._clocks: dict[_Index, np.ndarray] = {}  # of releases and counts gone by
        self._releases = _by_place(recordings)
        self._rounds = dict(_rounds(recordings))
        self._memories = _memories(recordings, len(threads))
        self._found: dict[object, Race] = {}

    def run(self) -> list[Race]:
        while any(rank.next < len(rank.events) for rank in self._ranks):
            before = [rank.next for rank in self._ranks]
            for rank in self._ranks:
                self._advance(rank, forced=False)
            if before == [rank.next for rank in self._ranks]:
                # Whoever might have raised a flag waits, in turn, for what came after that wait.
                if not any(self._advance(rank, forced=True) for rank in self._ranks):
                    stuck = next(r for r in self._ranks if r.next < len(r.events))
                    raise ValueError(f"nothing that was recorded ends {stuck.events[stuck.next]}")
        return list(self._found.values())

    def _advance(self, rank: _Rank, forced: bool) -> bool:
        """Go on in a recording until a wait whose releases are still to come."""
        moved = False
        while rank.next < len(rank.events):
            event = rank.events[rank.next]
            clock, thread = rank.clock_of(event), rank.thread_of(event)
            if event.kind == "acquire":
                learned = self._learned(event, clock, forced)
                if learned is None:
                    break
                np.maximum(clock, learned, out=clock)
                forced = False
            self._position[thread] += 1
            clock[thread] = self._position[thread]
            index = (rank.number, rank.next)
            for other in self._rounds.get(index, ()):
                np.maximum(clock, self._clocks[other], out=clock)
            if event.kind in ("release", "count"):
                self._clocks[index] = clock.copy()
            self._access(event, thread, clock)
            rank.next += 1
            moved = True
        return moved

    def _learned(self, wait: Event, clock: np.ndarray, forced: bool) -> np.ndarray | None:
        """The least that an ended wait tells of other threads; None if that is to be seen yet."""
        nothing = np.zeros_like(clock)
        releases = self._releases[wait.memory, wait.ranges[0][0]]
        known = {
            index: self._clocks[index]
            for index in releases.indices
            if index in self._clocks and self._precedes(index, clock)
        }
        first = list(releases.first(wait))
        if not first or any(index in known for index in first):
            return nothing
        if not known and releases.satisfied_before(wait):
            return nothing
        clocks = [self._clocks[index] for index in first if index in self._clocks]
        if len(clocks) < len(first) and not (forced and clocks):
            return None
        return np.minimum.reduce(clocks)

    def _precedes(self, index: _Index, clock: np.ndarray) -> bool:
        rank = self._ranks[index[0]]
        thread = rank.thread_of(rank.events[index[1]])
        return bool(self._clocks[index][thread] <= clock[thread])

    def _access(self, event: Event, thread: int, clock: np.ndarray) -> None:
        memory = self._memories[event.memory]
        for other, piece in memory.access(event, thread, clock):
            lines = frozenset([(other.where, other.kind), (event.where, event.kind)])
            race = self._found.get(lines)
            if race is None:
                name = self._names.get(event.memory, event.memory)
                self._found[lines] = Race(other, event, name, piece)
            else:
                self._found[lines] = replace(race, count=race.count + 1)


class _Releases:
    """All releases of one flag."""

    def __init__(self) -> None:
        self.events: list[tuple[_Index, Event]] = []  # by rank, then in their order

    @property
    def indices(self) -> list[_Index]:
        return [index for index, _ in self.events]

    def satisfied_before(self, wait: Event) -> bool:
        """Whether what the flag held when the recording began would have ended the wait."""
        written = {event.value for _, event in self.events}
        found = {event.before for _, event in self.events} - {None}
        initial = found - written or found
        return any(_ends(wait, value) for value in initial if value is not None)

    def first(self, wait: Event) -> Iterator[_Index]:
        """The releases one of which was the first to satisfy a wait.

        Of each rank the earliest, with those of the same launch by programs that are beside it.
        """
        earliest: dict[int, Event] = {}
        programs: set[object] = set()
        for index, event in self.events:
            if event.value is None or not _ends(wait, event.value):
                continue
            first = earliest.setdefault(index[0], event)
            beside = (event.rank, event.program)
            if event.launch == first.launch and beside not in programs:
                programs.add(beside)
                yield index


def _ends(wait: Event, value: int) -> bool:
    return value == wait.value if wait.wanted is None else reached(value, wait.wanted)


def _by_place(recordings: Sequence[Recording]) -> defaultdict[_Place, _Releases]:
    releases: defaultdict[_Place, _Releases] = defaultdict(_Releases)
    for number, recording in enumerate(recordings):
        for index, event in enumerate(recording.events):
            if event.kind == "release":
                place = event.memory, event.ranges[0][0]
                releases[place].events.append(((number, index), event))
    return releases


def _rounds(recordings: Sequence[Recording]) -> Iterator[tuple[_Index, list[_Index]]]:
    """For the last count of a round, all counts before it.

    A round is what one launch counts into one counter, until somebody writes it otherwise.
    """
    for number, recording in enumerate(recordings):
        rounds: dict[_Place, list[_Index]] = {}
        launch: object = None
        for index, event in enumerate(recording.events):
            if event.launch != launch:
                yield from _closed(rounds.values())
                rounds.clear()
                launch = event.launch
            if event.kind == "count":
                rounds.setdefault((event.memory, event.ranges[0][0]), []).append((number, index))
            elif KINDS[event.kind][0]:
                yield from _closed([rounds.pop((event.memory, event.ranges[0][0]), [])])
        yield from _closed(rounds.values())


def _closed(rounds: Iterable[list[_Index]]) -> Iterator[tuple[_Index, list[_Index]]]:
    for counts in rounds:
        if counts:
            *others, last = counts
            yield last, others


def _memories(recordings: Sequence[Recording], threads: int) -> dict[str, Memory]:
    """What is recorded of each memory, cut at all the bounds of accesses to it."""
    bounds: defaultdict[str, list[Range]] = defaultdict(list)
    for recording in recordings:
        for event in recording.events:
            bounds[event.memory].extend(event.ranges)
    return {name: Memory(ranges, threads) for name, ranges in bounds.items()}
