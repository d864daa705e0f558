"""One rank is late at one point of the protocol, while the others run on as far as they can.

The delays are longer than SLOTS calls take. Slots are taken in turn, and also the same one again
and again, as a captured CUDA graph does: there a missing wait shows that turns would hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest

import fusedcomm as fc
from fusedcomm.protocol import Call, Workspace
from fusedcomm.testing import RankError, straggler
from fusedcomm.testing.disturb import EVENTS
from tests.conftest import Pools
from tests.ranks.cases import OPS, Case, Local, Problem, call
from tests.ranks.checking import check_values, planned

LATE_S = 0.004

#: Consecutive calls with other data, of changing sizes: both workspaces are used by all of them.
CASES = [
    Case(op, (rows,), k=12, n=10, needs=needs, seed=seed)
    for seed, (rows, needs) in enumerate(((9, "xwb"), (4, "")))
    for op in OPS
]
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"min_chunk_rows": 1, "pieces": 2},
    {"min_chunk_rows": 1 << 30, "one_shot_bytes": 0},
)


@contextmanager
def same_slot() -> Iterator[None]:
    """Every call takes slot 0."""
    take = Workspace.take_slot

    def take_first(self: Workspace) -> int:
        self._next_slot = 0
        return take(self)

    with mock.patch.object(Workspace, "take_slot", take_first):
        yield


def run(rank: int, events: list[str], repeat: bool, channel: str = "skew") -> None:
    """All calls in a row, for every event and every rank that is late there."""
    comm = fc.Communicator.of(channel=channel, timeout_s=20)
    world_size = comm.world_size
    problems = [Problem.of(case, world_size) for case in CASES]
    for number, plan in enumerate(PLANS):
        for turn, event in enumerate(events):
            if world_size == 2 and len(events) > 1 and turn % len(PLANS) != number:
                continue  # Two ranks have fewer ways to be out of step: they take turns in this.
            for late in range(world_size):
                results: list[Local] = []
                with (
                    same_slot() if repeat else nullcontext(),
                    planned(**plan),
                    straggler(late, event, LATE_S),
                ):
                    for case, problem in zip(CASES, problems, strict=True):
                        results.append(call(case, problem, rank, world_size, comm))
                for case, problem, found in zip(CASES, problems, results, strict=True):
                    try:
                        check_values(case, problem, found, rank, world_size)
                    except AssertionError as error:
                        raise AssertionError(
                            f"rank {late} was late at each {event!r}, {plan}: {error}"
                        ) from None
    comm.close()


@pytest.mark.parametrize("repeat", [False, True], ids=["slots in turn", "one slot"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_changes_nothing(pools: Pools, world_size: int, repeat: bool) -> None:
    pools(world_size).run(run, list(EVENTS), repeat)


# These tests find what they are there to find


def nothing(*_: Any, **__: Any) -> None:
    """A wait that was forgotten."""


def run_without(rank: int, step: str, events: list[str]) -> None:
    with mock.patch.object(Call, step, nothing):
        run(rank, events, True, f"skew without {step}")


@pytest.mark.parametrize(
    ("step", "event"), [("wait", "write"), ("wait", "signal"), ("await_reader", "read")]
)
def test_a_forgotten_wait_is_found(pools: Pools, step: str, event: str) -> None:
    with pytest.raises(RankError, match=f"was late at each '{event}'"):
        pools(3).run(run_without, step, [event])
