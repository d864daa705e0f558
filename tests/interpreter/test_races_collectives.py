"""The collectives' kernels are free of races, and a fault planted in one is found."""

from __future__ import annotations

import pytest

from fusedcomm.testing import races
from tests.interpreter.collective_race_calls import calls, faulty_calls

TWO_SHOT, RING = "all_reduce two_shot", "all_reduce ring"
OPS = (
    "all_reduce one_shot",
    "all_reduce one_shot in place",
    TWO_SHOT,
    f"{TWO_SHOT} in place",
    RING,
    f"{RING} in place",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size, size, same_slot", [(2, 900, True), (3, 40, False)])
def test_a_collective_is_clean(pools, op, world_size, size, same_slot):
    pool = pools(world_size, TRITON_INTERPRET="1")
    recordings = pool.run(races.recorded, calls, world_size, op, size, same_slot, timeout_s=120)
    assert races.check(recordings) == []
    for events in (recording.events for recording in recordings):
        assert {event.kind for event in events} >= {"read", "write", "acquire", "release"}


@pytest.mark.parametrize(
    "fault, op, world_size",
    [
        ("no wait", "all_gather", 2),
        ("no wait", "reduce_scatter", 2),
        ("no wait", "broadcast", 2),
        ("signal before store", "all_gather", 2),
        ("signal before store", "broadcast", 2),
        ("signal before store", "all_reduce one_shot", 2),
        ("no wait for the last source", "reduce_scatter", 3),
        ("no wait for the last source", TWO_SHOT, 3),
        ("no wait for the result", TWO_SHOT, 2),
        ("one launch in place", "all_reduce one_shot in place", 3),
        ("ring: no wait", RING, 3),
        ("ring: no wait for the result", RING, 2),
        ("ring: signals one step early", RING, 2),
    ],
)
def test_a_fault_is_found(pools, fault, op, world_size):
    pool = pools(world_size, TRITON_INTERPRET="1")
    found = races.find(pool, faulty_calls, world_size, op, 600, fault)
    assert found
    assert all({race.first.kind, race.second.kind} & {"write"} for race in found)
