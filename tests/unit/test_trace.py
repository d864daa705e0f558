"""Timelines: what is recorded, how it is merged, written and drawn. No processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusedcomm.trace import Event, Plan, Trace, record_plan, span, trace

MS = 1_000_000


def timeline(ranks: int = 3, layers: int = 30) -> Trace:
    """Per layer: a copy, a GEMM of the own chunk, a wait for the next rank's, and its GEMM."""
    events = []
    for rank in range(ranks):
        for layer in range(layers):
            at = (4 * layer) * MS + rank * 1000
            source = (rank + 1) % ranks
            events += [
                Event(rank, "layer", f"layer {layer}", at, at + 4 * MS),
                Event(rank, "copy", "copy in", at, at + MS, {"signal": (layer, rank)}),
                Event(rank, "gemm", f"chunk {rank}", at + MS, at + 2 * MS),
                Event(rank, "wait", "wait", at + 2 * MS, at + 3 * MS, {"awaits": (layer, source)}),
                Event(rank, "gemm", f"chunk {source}", at + 3 * MS, at + 4 * MS),
            ]
    return Trace(events=events, merged=True)


def test_records_events_and_plans_only_while_open() -> None:
    with span("gemm", "before"):
        record_plan("op", "host", 2, "before")
    with trace() as t:
        with span("gemm", "chunk 1", chunk=1, rank=5):
            pass
        with span("wait", "peer"):
            pass
        record_plan("all_gather_linear", "host", 2, "it is large")
    with span("gemm", "after"):
        record_plan("op", "host", 2, "after")
    assert [(e.rank, e.kind, e.name, e.info) for e in t.events] == [
        (5, "gemm", "chunk 1", {"chunk": 1}),
        (0, "wait", "peer", {}),
    ]
    first, second = t.events
    assert first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns
    assert t.plans == [Plan("all_gather_linear", "host", 2, "it is large")]


def test_a_span_costs_no_object_when_no_trace_is_open() -> None:
    assert span("gemm", "a", chunk=1) is span("wait", "b")


def test_nested_traces_each_record_what_happens_while_they_are_open() -> None:
    with trace() as outer:
        with span("gemm", "1"):
            pass
        with trace() as inner, span("gemm", "2"):
            pass
        with span("gemm", "3"):
            pass
    assert [e.name for e in inner.events] == ["2"]
    assert [e.name for e in outer.events] == ["1", "2", "3"]


def test_an_exception_passes_through_is_noted_and_closes_the_trace() -> None:
    with pytest.raises(KeyError), trace() as t, span("copy", "broken"):
        raise KeyError("x")
    assert t.events[0].info == {"error": "KeyError"}
    with span("gemm", "later"):
        pass
    assert len(t.events) == 1


def test_threads_record_into_the_trace_of_the_process() -> None:
    def work(number: int) -> None:
        for _ in range(200):
            with span("gemm", str(number)):
                pass

    with trace() as t:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(e.name for e in t.events) == sorted(str(n) for n in range(4) for _ in range(200))


def test_gather_without_processes_sorts_and_keeps_the_plans() -> None:
    late, early = Event(0, "gemm", "late", 5, 6), Event(0, "gemm", "early", 1, 2)
    merged = Trace(events=[late, early], plans=[Plan("op", "host", 1, "")]).gather()
    assert merged.events == [early, late]
    assert merged.plans == [Plan("op", "host", 1, "")]
    assert merged.gather() is merged
    with pytest.raises(ValueError, match="torch.distributed"):
        Trace().gather(group=object())


def test_chrome_trace_has_a_process_per_rank_and_tracks_by_kind(tmp_path: Path) -> None:
    t = timeline(ranks=2, layers=1)
    t.plans += [Plan("op", "host", 2, "why")] * 3
    t.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    rows = content["traceEvents"]
    names = {(r["pid"], r["args"]["name"]) for r in rows if r["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    tracks = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    slices = [r for r in rows if r["ph"] == "X"]
    placed = {(r["cat"], tracks[r["pid"], r["tid"]]) for r in slices}
    assert placed == {
        ("layer", "regions"),
        ("gemm", "compute"),
        ("copy", "communication"),
        ("wait", "communication"),
    }
    assert min(r["ts"] for r in slices) == 0
    assert {r["dur"] for r in slices} == {1000.0, 4000.0}
    assert content["otherData"]["plans"] == [
        {"op": "op", "engine": "host", "chunks": "2", "reason": "why", "calls": 3}
    ]


def test_chrome_trace_arrows_lead_from_the_signal_to_the_wait() -> None:
    rows = timeline(ranks=2, layers=2).to_chrome()["traceEvents"]
    slices = [r for r in rows if r["ph"] == "X"]
    starts = {r["id"]: r for r in rows if r["ph"] == "s"}
    ends = {r["id"]: r for r in rows if r["ph"] == "f"}
    assert len(starts) == len(ends) == 4

    def slice_at(arrow: dict) -> dict:
        return next(
            s
            for s in slices
            if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
            and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
        )

    for number in starts:
        raised, seen = slice_at(starts[number]), slice_at(ends[number])
        assert raised["args"]["signal"] == seen["args"]["awaits"]
        assert raised["pid"] != seen["pid"]


def test_chrome_trace_arrow_takes_the_last_signal_before_the_wait_ended() -> None:
    events = [
        Event(0, "copy", "old", 0, 1 * MS, {"signal": "k"}),
        Event(0, "copy", "new", 2 * MS, 3 * MS, {"signal": "k"}),
        Event(1, "wait", "wait", 2 * MS, 4 * MS, {"awaits": "k"}),
        Event(0, "copy", "next", 5 * MS, 6 * MS, {"signal": "k"}),
        Event(1, "wait", "never raised", 2 * MS, 4 * MS, {"awaits": "other"}),
    ]
    rows = Trace(events=events).to_chrome()["traceEvents"]
    (start,) = (r for r in rows if r["ph"] == "s")
    assert 2000 < start["ts"] <= 3000


def test_chrome_trace_puts_events_that_cross_into_another_lane() -> None:
    crossing = [Event(0, "gemm", "a", 0, 10), Event(0, "gemm", "b", 5, 15)]
    nested = [Event(0, "gemm", "a", 0, 10), Event(0, "gemm", "b", 5, 10)]

    def lanes(events: list[Event]) -> set[int]:
        return {r["tid"] for r in Trace(events=events).to_chrome()["traceEvents"] if r["ph"] == "X"}

    assert len(lanes(crossing)) == 2
    assert len(lanes(nested)) == 1


@pytest.mark.parametrize(
    ("options", "panels"),
    [
        ({}, 2),
        ({"zoom": None}, 1),
        ({"zoom": "layer 12"}, 2),
        ({"zoom": (10.0, 14.0), "title": "prefill"}, 2),
        ({"window_ms": (0, 20)}, 1),
    ],
)
def test_plot_draws_one_band_per_rank(tmp_path: Path, options: dict, panels: int) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    timeline().plot(tmp_path / "t.png", **options)
    height, width, _ = imread(tmp_path / "t.png").shape
    timeline(ranks=6).plot(tmp_path / "six.png", **options)
    assert width > 1000
    band = (imread(tmp_path / "six.png").shape[0] - height) / 3
    assert band == pytest.approx(panels * 0.75 * 120, abs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zoom": "layer 99"}, "layer 99"),
        ({"zoom": (3, 3)}, "start < end"),
        ({"window_ms": (2, 1)}, "window_ms"),
    ],
)
def test_plot_says_what_is_wrong_with_its_arguments(
    tmp_path: Path, options: dict, message: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        timeline().plot(tmp_path / "t.png", **options)


def test_plot_of_nothing_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no events"):
        Trace().plot(tmp_path / "t.png")


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install fusedcomm\[cli\]"):
        timeline().plot(tmp_path / "t.png")


def test_the_module_imports_the_standard_library_alone() -> None:
    code = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('fusedcomm')\n"  # not the real one, which imports torch
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['fusedcomm'] = package\n"
        "import fusedcomm.trace\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
    )
    folder = Path(sys.modules["fusedcomm.trace"].__file__ or "").parent
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
