"""The picture of a timeline (``Trace.plot``): one band per rank, drawn with matplotlib.

In each band the upper row is compute and the lower row communication, so that time lost to
communication shows as a gap in the upper row with its cause beneath; a peer's chunk that had come
by the time it was needed shows as GEMMs side by side.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fusedcomm.trace import Event, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers and in grey print.
COLOURS = {"gemm": "#0072B2", "reduce": "#009E73", "copy": "#E69F00", "wait": "#CC79A7"}
OTHER_COLOUR = "#DDDDDD"
LABELS = {
    "gemm": "GEMM",
    "reduce": "reduction",
    "copy": "copy between ranks",
    "wait": "waiting for a peer",
}
# Height of each row inside a rank's band of height 1, as (bottom, height).
ROWS = {"communication": (0.06, 0.34), "compute": (0.43, 0.34), "regions": (0.81, 0.14)}
MANY_EVENTS_PER_RANK = 60
ZOOM_EVENTS_PER_RANK = 20
FIGURE_WIDTH_INCHES = 14.0


def draw(
    trace: Trace,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    window_ms: tuple[float, float] | None = None,
    zoom: tuple[float, float] | str | None = "auto",
) -> None:
    """Write the picture; the arguments are those of :meth:`fusedcomm.trace.Trace.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "a timeline picture needs matplotlib: pip install fusedcomm[cli]"
        ) from missing
    if not trace.events:
        raise ValueError("the trace has no events to draw: did an op run while it was open?")
    ranks = sorted({event.rank for event in trace.events})
    origin = min(event.start_ns for event in trace.events)
    end_ns = max(event.end_ns for event in trace.events)
    window = _checked("window_ms", window_ms) if window_ms else (0.0, (end_ns - origin) / 1e6)
    shown = [event for event in trace.events if _inside(event, origin, window)]
    detail = _zoom_window(shown, ranks, origin, zoom)

    panels = 1 if detail is None else 2
    height = panels * (0.75 * len(ranks) + 0.55) + 1.3
    # Figure, not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(FIGURE_WIDTH_INCHES, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    _draw_panel(axes[0], shown, ranks, origin, window)
    if detail is None:
        _write_names(axes[0], shown, ranks, origin, window)
    else:
        close = [event for event in shown if _inside(event, origin, detail)]
        _draw_panel(axes[1], close, ranks, origin, detail)
        _write_names(axes[1], close, ranks, origin, detail)
        axes[0].axvspan(*detail, facecolor="none", edgecolor="black", linewidth=1.2, zorder=5)
        axes[0].set_title("the whole timeline; the frame is enlarged below", fontsize=9)
        axes[1].set_title(f"enlarged: {detail[0]:.2f} to {detail[1]:.2f} ms", fontsize=9)
    axes[-1].set_xlabel("time, ms")
    figure.suptitle(title or f"Timeline of {len(ranks)} rank{'s' * (len(ranks) > 1)}")
    _draw_legend(figure, shown)
    figure.savefig(path)


def _draw_panel(
    axes: Axes, events: list[Event], ranks: list[int], origin: int, window: tuple[float, float]
) -> None:
    top = len(ranks) - 1  # rank 0 is the uppermost band
    for position, rank in enumerate(ranks):
        base = top - position
        if position % 2 == 0:
            axes.axhspan(base, base + 1, color="#F4F4F4", zorder=0)
        for kind in _kinds(events):
            mine = [event for event in events if event.rank == rank and event.kind == kind]
            if not mine:
                continue
            track = mine[0].track
            bottom, height = ROWS[track]
            colour = COLOURS.get(kind, OTHER_COLOUR)
            # Neighbouring GEMMs are kept apart by a white edge; where bars are thinner than an
            # edge it would hide them, and an edge of their own colour keeps them visible.
            apart = track != "communication" and len(mine) < MANY_EVENTS_PER_RANK
            axes.broken_barh(
                [((e.start_ns - origin) / 1e6, (e.end_ns - e.start_ns) / 1e6) for e in mine],
                (base + bottom, height),
                facecolors=colour,
                edgecolors="white" if apart else colour,
                linewidth=0.6,
                zorder=3,
            )
    axes.set_xlim(*window)
    axes.set_ylim(0, len(ranks))
    axes.set_yticks([top - p + 0.5 for p in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _write_names(
    axes: Axes, events: list[Event], ranks: list[int], origin: int, window: tuple[float, float]
) -> None:
    """Write each event's name into its bar where the bar is wide enough to hold it."""
    characters = 15.0 * FIGURE_WIDTH_INCHES  # that fit over the panel's width at this font size
    for event in events:
        start = max((event.start_ns - origin) / 1e6, window[0])
        end = min((event.end_ns - origin) / 1e6, window[1])
        room = int((end - start) / (window[1] - window[0]) * characters) - 1
        if room < min(3, len(event.name)):
            continue
        name = event.name if len(event.name) <= room else event.name[: room - 1] + "…"
        bottom, height = ROWS[event.track]
        axes.text(
            (start + end) / 2,
            len(ranks) - 1 - ranks.index(event.rank) + bottom + height / 2,
            name,
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if event.kind == "gemm" else "black",
            zorder=4,
            clip_on=True,
        )


def _draw_legend(figure: Any, events: list[Event]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=COLOURS.get(kind, OTHER_COLOUR), label=LABELS.get(kind, kind))
        for kind in _kinds(events)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))


def _kinds(events: list[Event]) -> list[str]:
    """The kinds that occur: the known ones in a fixed order, then the others."""
    present = {event.kind for event in events}
    return [kind for kind in COLOURS if kind in present] + sorted(present - COLOURS.keys())


def _inside(event: Event, origin: int, window: tuple[float, float]) -> bool:
    start, end = (event.start_ns - origin) / 1e6, (event.end_ns - origin) / 1e6
    return end >= window[0] and start <= window[1]


def _checked(argument: str, window: tuple[float, float]) -> tuple[float, float]:
    start, end = window
    if not start < end:
        raise ValueError(f"{argument} must be (start, end) in ms with start < end, got {window}")
    return float(start), float(end)


def _zoom_window(
    events: list[Event], ranks: list[int], origin: int, zoom: tuple[float, float] | str | None
) -> tuple[float, float] | None:
    """The part to enlarge, in ms from the trace's first event; None for no second panel."""
    if zoom is None:
        return None
    if not isinstance(zoom, str):
        return _checked("zoom", zoom)
    if zoom != "auto":
        chosen = [event for event in events if event.name == zoom]
        if not chosen:
            raise ValueError(f"zoom={zoom!r}: no event of that name in the part that is shown")
    else:
        own = sorted((e for e in events if e.rank == ranks[0]), key=lambda e: e.start_ns)
        own = [event for event in own if event.track != "regions"]
        if len(own) <= MANY_EVENTS_PER_RANK:
            return None
        middle = (len(own) - ZOOM_EVENTS_PER_RANK) // 2
        chosen = own[middle : middle + ZOOM_EVENTS_PER_RANK]
    start = (min(event.start_ns for event in chosen) - origin) / 1e6
    end = (max(event.end_ns for event in chosen) - origin) / 1e6
    margin = 0.02 * (end - start)
    return start - margin, end + margin
