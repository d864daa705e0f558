"""The Chrome trace format of a timeline (``Trace.save``), which https://ui.perfetto.dev opens.

One process per rank; in it a track for regions, one for compute and one for communication; slices
for events, and arrows from the event that raised a flag to the wait for it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fusedcomm.trace import TRACK_ORDER, Event, Plan, Trace


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The content of the file, as JSON values. Times are microseconds from the first event."""
    origin = min((event.start_ns for event in trace.events), default=0)
    rows: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str, int], int] = {}
    placed = _place(trace.events)
    for event, lane in placed:
        key = (event.rank, event.track, lane)
        if key not in tracks:
            tracks[key] = len(TRACK_ORDER) * lane + TRACK_ORDER.index(event.track)
        rows.append(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": tracks[key],
                "ts": (event.start_ns - origin) / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "name": event.name,
                "cat": event.kind,
                "args": event.info,
            }
        )
    names: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in trace.events}):
        names.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
        names.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for (rank, track, lane), tid in sorted(tracks.items()):
        title = f"{track} {lane + 1}" if lane else track
        names.append(_metadata("thread_name", rank, tid, name=title))
        names.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
    plans: dict[Plan, int] = {}
    for plan in trace.plans:
        plan = replace(plan, chunks=str(plan.chunks))
        plans[plan] = plans.get(plan, 0) + 1
    return {
        "traceEvents": names + rows + _arrows(placed, tracks, origin),
        "displayTimeUnit": "ms",
        "otherData": {"plans": [asdict(plan) | {"calls": calls} for plan, calls in plans.items()]},
    }


def _place(events: list[Event]) -> list[tuple[Event, int]]:
    """Give each event a lane of its rank's track, so that those of one lane lie apart or nest.

    One thread's events always fit in lane 0; further lanes are for events of other threads.
    """
    placed = []
    lanes: dict[tuple[int, str], list[list[int]]] = {}  # per lane, the ends of what is still open
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        stacks = lanes.setdefault((event.rank, event.track), [])
        for stack in stacks:
            while stack and stack[-1] <= event.start_ns:
                stack.pop()
        fits = (lane for lane, stack in enumerate(stacks) if not stack or event.end_ns <= stack[-1])
        lane = next(fits, len(stacks))
        if lane == len(stacks):
            stacks.append([])
        stacks[lane].append(event.end_ns)
        placed.append((event, lane))
    return placed


def _arrows(
    placed: list[tuple[Event, int]], tracks: dict[tuple[int, str, int], int], origin: int
) -> list[dict[str, Any]]:
    """Flow events from the span that raised a flag to each wait for it.

    A flag's value may come again (another workspace, a wrapped epoch): the last signal before the
    wait ended is the one that it saw.
    """
    signals: dict[str, list[tuple[Event, int]]] = {}
    for event, lane in placed:
        if "signal" in event.info:
            signals.setdefault(str(event.info["signal"]), []).append((event, lane))
    arrows: list[dict[str, Any]] = []
    for event, lane in placed:
        if "awaits" not in event.info:
            continue
        candidates = signals.get(str(event.info["awaits"]), [])
        seen = [c for c in candidates if c[0].end_ns <= event.end_ns]
        if not seen:
            continue
        source, source_lane = max(seen, key=lambda c: c[0].end_ns)
        number = len(arrows) // 2
        for phase, end, end_lane in (("s", source, source_lane), ("f", event, lane)):
            arrows.append(
                {
                    "ph": phase,
                    "id": number,
                    "pid": end.rank,
                    "tid": tracks[end.rank, end.track, end_lane],
                    # An arrow is tied to the slice around its time: just inside the slice's end.
                    "ts": (max(end.start_ns, end.end_ns - 1) - origin) / 1e3,
                    "name": "signal",
                    "cat": "signal",
                }
                | ({"bp": "e"} if phase == "f" else {})
            )
    return arrows


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
