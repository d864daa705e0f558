"""Disturbing one rank at one point of the protocol: a delay, a death, anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from fusedcomm import protocol

#: The points of the protocol, as ``protocol.set_recorder`` names them.
EVENTS = ("begin", "write", "signal", "wait", "read", "consumed")


def straggler(
    rank: int, event: str, seconds: float, *, nth: int | None = None
) -> AbstractContextManager[None]:
    """Delays ``rank`` at ``event`` by ``seconds``; for the rest see ``disturb``.

    with straggler(1, "signal", 0.2):
        y = fc.all_gather_linear(x, weight)
    """
    return disturb(rank, event, partial(time.sleep, seconds), nth=nth)


@contextmanager
def disturb(
    rank: int, event: str, action: Callable[[], object], *, nth: int | None = None
) -> Iterator[None]:
    """Calls ``action()`` when ``rank`` comes to ``event``: every time, or only the ``nth``, from 0.

    It is entered on all ranks alike and does nothing on the others. Events are counted from the
    beginning of the block. ``action`` runs before the step itself, except at "wait", where it runs
    after the waiting. To lose a rank: ``partial(os.kill, os.getpid(), signal.SIGKILL)``.

    Raises:
        ValueError: there is no such event.
        AssertionError: this process acted as ``rank`` in the block, but never came to the event.
    """
    if event not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, got {event!r}")
    steps = 0  # of this rank, of any kind
    passed = 0  # of the kind in question

    def recorder(name: str, **info: Any) -> None:
        nonlocal steps, passed
        if info["rank"] == rank:
            steps += 1
            if name == event:
                passed += 1
                if nth is None or nth == passed - 1:
                    action()
        if previous is not None:
            previous(name, **info)

    previous = protocol.set_recorder(recorder)
    try:
        yield
    finally:
        protocol.set_recorder(previous)
    if steps and passed <= (nth or 0):
        raise AssertionError(
            f"rank {rank} was not disturbed: of {steps} steps, {passed} were {event!r}"
            + ("" if nth is None else f", number {nth} (from 0) was wanted")
        )
