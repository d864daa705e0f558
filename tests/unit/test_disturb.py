"""A disturbance strikes the rank, the event and the occurrence that it names, and no other."""

from __future__ import annotations

import pytest

from fusedcomm import protocol
from fusedcomm.testing import disturb, straggler


def step(event: str, rank: int) -> None:
    """What the protocol does at each of its steps."""
    recorder = protocol.set_recorder(None)
    protocol.set_recorder(recorder)
    if recorder is not None:
        recorder(event, op="op", rank=rank, peer=0, slot=0, epoch=1, chunk=0)


def test_strikes_every_time() -> None:
    struck: list[str] = []
    with disturb(1, "signal", lambda: struck.append("x")):
        for rank in (0, 1, 1):
            for event in ("begin", "signal"):
                step(event, rank)
    assert struck == ["x", "x"]


def test_strikes_the_nth_time_only() -> None:
    heard: list[str] = []
    with disturb(1, "read", lambda: heard.append("struck"), nth=1):
        for name in ("first", "second", "third"):
            step("read", 1)
            heard.append(name)
    assert heard == ["first", "struck", "second", "third"]


def test_does_nothing_on_other_ranks_and_outside_its_block() -> None:
    struck: list[str] = []
    with disturb(1, "signal", lambda: struck.append("x")):
        step("signal", 0)
    step("signal", 1)
    assert struck == []


def test_passes_events_on_to_an_earlier_recorder() -> None:
    heard: list[str] = []
    outermost = protocol.set_recorder(lambda event, **info: heard.append(event))
    try:
        with disturb(0, "wait", lambda: None), straggler(0, "read", 0.0):
            step("wait", 0)
            step("read", 0)
        step("consumed", 0)
    finally:
        protocol.set_recorder(outermost)
    assert heard == ["wait", "read", "consumed"]


@pytest.mark.parametrize(("nth", "passes"), [(None, 0), (0, 0), (2, 2)])
def test_says_so_when_it_never_struck(nth: int | None, passes: int) -> None:
    with pytest.raises(AssertionError, match="rank 1 was not disturbed"):
        with disturb(1, "signal", lambda: None, nth=nth):
            step("begin", 1)
            for _ in range(passes):
                step("signal", 1)


def test_rejects_an_unknown_event() -> None:
    with pytest.raises(ValueError, match="event must be one of begin, write"):
        with straggler(0, "signals", 1.0):
            pass
