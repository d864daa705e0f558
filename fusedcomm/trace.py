"""Timelines: what each rank computed, copied and waited for, and which plan each op took.

The engines mark their work with :func:`span` and their choices with :func:`record_plan`; both
return at once unless a :func:`trace` is open in this process:

    with fc.trace() as t:
        y = fc.all_gather_linear(x, weight)
    merged = t.gather()             # collective: the events of every rank, the same on all ranks
    merged.save("timeline.json")    # open in https://ui.perfetto.dev
    merged.plot("timeline.png")     # needs matplotlib

Times are ``time.perf_counter_ns`` (CLOCK_MONOTONIC on Linux), so they are comparable between the
processes of one machine; between machines they are not.

Inside the library write ``from fusedcomm.trace import span``: the package attribute
``fusedcomm.trace`` is the function :func:`trace`, not this module.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

#: The row of a rank's timeline that a kind of event is drawn in; other kinds go to "regions".
TRACKS = {
    "gemm": "compute",
    "reduce": "compute",
    "copy": "communication",
    "wait": "communication",
}
TRACK_ORDER = ("regions", "compute", "communication")


@dataclass(frozen=True)
class Event:
    """Something that took time on one rank.

    ``kind`` is "gemm", "reduce", "copy" or "wait"; any other kind is a region around such events
    (a layer, a phase). ``start_ns`` and ``end_ns`` are ``time.perf_counter_ns``. ``info`` holds
    what the caller of :func:`span` had to say; three keys have a meaning here: ``signal`` and
    ``awaits`` (an arrow leads from the event that raised a flag to the wait for the same value)
    and ``error`` (the exception's name, when the span was left by one).
    """

    rank: int
    kind: str
    name: str
    start_ns: int
    end_ns: int
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def track(self) -> str:
        """The row it is drawn in: "compute", "communication" or "regions"."""
        return TRACKS.get(self.kind, "regions")


@dataclass(frozen=True)
class Plan:
    """How one call of an op was carried out: which engine, how many chunks, and why."""

    op: str
    engine: str
    chunks: Any
    reason: str


@dataclass
class Trace:
    """The events and plans recorded while a :func:`trace` was open, in the order they ended.

    ``rank`` labels the events of this process (its rank in the default group, or 0).
    """

    rank: int = 0
    events: list[Event] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    merged: bool = False

    def gather(self, group: Any = None) -> Trace:
        """Merge the events of all ranks, sorted by start; the same on every rank. Collective.

        ``group`` is a ProcessGroup, a 1-D DeviceMesh or None (the default group). Each process's
        events are labelled with its rank in ``group``. ``plans`` are those of the group's first
        rank: plans are equal on all ranks. Without an initialised process group it is a sorted
        copy, and a merged trace is returned as it is.
        """
        if self.merged:
            return self
        members = [(self.events, self.plans)]
        labels = [self.rank]
        dist = _initialised_distributed()
        if dist is not None:
            group = group.get_group() if hasattr(group, "get_group") else group
            world_size = dist.get_world_size(group)
            members = [([], [])] * world_size
            labels = list(range(world_size))
            dist.all_gather_object(members, (self.events, self.plans), group=group)
        elif group is not None:
            raise ValueError("gather(group=...) needs an initialised torch.distributed")
        events = [
            event if event.rank == rank else replace(event, rank=rank)
            for rank, (theirs, _) in zip(labels, members, strict=True)
            for event in theirs
        ]
        events.sort(key=lambda event: (event.start_ns, -event.end_ns, event.rank))
        return Trace(rank=self.rank, events=events, plans=list(members[0][1]), merged=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON), which https://ui.perfetto.dev opens.

        One process per rank, in it one track for compute and one for communication; ``info`` is
        shown as the arguments of an event, the plans lie under "otherData".
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_chrome(), file, default=str)

    def to_chrome(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes. Times are microseconds from 0."""
        from fusedcomm.trace_chrome import to_chrome

        return to_chrome(self)

    def plot(
        self,
        path: str | os.PathLike[str],
        *,
        title: str | None = None,
        window_ms: tuple[float, float] | None = None,
        zoom: tuple[float, float] | str | None = "auto",
    ) -> None:
        """Draw the timeline: one band per rank, colours by kind, time in ms from the first event.

        ``window_ms`` (start, end) limits the picture to a part of the time. ``zoom`` adds a second
        panel that enlarges a part of the first: (start, end) in ms, the name of an event (all
        events of that name, on all ranks, span the part), "auto" (about twenty events per rank
        from the middle, when there are many) or None. The file's ending gives the format.

        Raises ImportError when matplotlib is missing and ValueError when there is nothing to draw.
        """
        from fusedcomm.trace_plot import draw

        draw(self, path, title=title, window_ms=window_ms, zoom=zoom)


# The traces open in this process, outermost first. Replaced as a whole, never changed in place, so
# that a span may keep the tuple it found. Process-wide on purpose: autograd runs backward in
# threads of its own, and their work belongs to the trace that the user opened.
_open: tuple[Trace, ...] = ()
_lock = threading.Lock()
_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the events and plans of this process (all its threads) until the block ends.

    Traces may be nested: each records everything that happens while it is open.
    """
    global _open
    dist = _initialised_distributed()
    recorded = Trace(rank=dist.get_rank() if dist is not None else 0)
    with _lock:
        _open = (*_open, recorded)
    try:
        yield recorded
    finally:
        with _lock:
            _open = tuple(other for other in _open if other is not recorded)


def span(kind: str, name: str, **info: Any) -> AbstractContextManager[None]:
    """Mark the block as one event of the open traces; does nothing when none is open.

    ``info`` is kept with the event, except ``rank``, which replaces this process's rank. An
    exception passes through and is noted as ``info["error"]``.
    """
    if not _open:
        return _NOTHING
    return _Span(_open, kind, name, info)


def is_open() -> bool:
    """Whether a trace is open; where every microsecond counts, spans are named only then."""
    return bool(_open)


def record_plan(op: str, engine: str, chunks: Any, reason: str) -> None:
    """Note in the open traces how a call of ``op`` is carried out; nothing when none is open."""
    for recorded in _open:
        recorded.plans.append(Plan(op, engine, chunks, reason))


class _Span:
    __slots__ = ("traces", "kind", "name", "info", "start_ns")

    def __init__(self, traces: tuple[Trace, ...], kind: str, name: str, info: dict[str, Any]):
        self.traces, self.kind, self.name, self.info = traces, kind, name, info

    def __enter__(self) -> None:
        self.start_ns = time.perf_counter_ns()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = time.perf_counter_ns()
        if exc_type is not None:
            self.info["error"] = exc_type.__name__
        rank = self.info.pop("rank", None)
        for recorded in self.traces:
            label = recorded.rank if rank is None else rank
            event = Event(label, self.kind, self.name, self.start_ns, end_ns, self.info)
            recorded.events.append(event)  # append is atomic: threads need no lock


def _initialised_distributed() -> Any:
    """torch.distributed if this process has imported and initialised it, else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist
