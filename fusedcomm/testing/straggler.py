"""Deliberate delays: one rank falls behind at one point of the protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusedcomm import protocol

#: The points of the protocol, as ``protocol.set_recorder`` names them.
EVENTS = ("begin", "write", "signal", "wait", "read", "consumed")


@contextmanager
def straggler(rank: int, event: str, seconds: float, *, nth: int | None = None) -> Iterator[None]:
    """Delays ``rank`` at ``event`` by ``seconds``, every time or only the ``nth`` time (from 0).

    Entered on every rank alike; where this process does not act as ``rank`` it does nothing. It
    counts the events inside the block. The delay comes before the step itself, except for "wait",
    whose delay follows the waiting.

        with straggler(1, "signal", 0.2):
            y = fc.all_gather_linear(x, weight)

    Raises:
        ValueError: there is no such event.
        AssertionError: this process acted as ``rank`` in the block, but was never delayed.
    """
    if event not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, got {event!r}")
    acted = False
    passed = 0

    def delay(name: str, **info: Any) -> None:
        nonlocal acted, passed
        if info["rank"] == rank:
            acted = True
            if name == event:
                if nth in (None, passed):
                    time.sleep(seconds)
                passed += 1
        if previous is not None:
            previous(name, **info)

    previous = protocol.set_recorder(delay)
    try:
        yield
    finally:
        protocol.set_recorder(previous)
    if acted and (passed == 0 or (nth is not None and passed <= nth)):
        wanted = "one" if nth is None else f"number {nth}"
        raise AssertionError(
            f"rank {rank} passed {passed} {event!r} events and never {wanted}: it was not delayed"
        )
