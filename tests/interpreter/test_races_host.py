"""The host engine is free of races, and a fault planted in its calls is found."""

from __future__ import annotations

import pytest

from fusedcomm.testing import races
from tests.interpreter.race_calls import EVERY_OP, Setting, calls, faulty_calls

GATHER, SCATTER = "all_gather_linear, forward", "linear_reduce_scatter, forward"
IN_PLACE, REDUCE = "all_gather_linear, in place", "linear_all_reduce"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"same_slot": False, "chunked": False, "one_shot": False},
        {"pieces": 2, "one_shot": False},
        {"tokens": 2},
    ],
    ids=["chunked", "whole", "two pieces", "empty shards"],
)
def test_every_operation_is_clean(pools, world_size, settings):
    pool = pools(world_size, TRITON_INTERPRET="1")
    setting = Setting("host", **settings)
    recordings = pool.run(races.recorded, calls, world_size, setting, EVERY_OP, timeout_s=120)
    assert races.check(recordings) == []
    for recording in recordings:
        kinds = {event.kind for event in recording.events}
        assert kinds == {"read", "write", "acquire", "release"}


@pytest.mark.parametrize(
    "fault, op, settings, functions",
    [
        ("no wait", GATHER, {}, {"gather", "linear_into"}),
        ("no wait", SCATTER, {}, {"add_linears", "reduce_scatter"}),
        ("no wait", REDUCE, {}, {"add_linears", "add_in_order"}),
        ("signal before write", GATHER, {}, {"gather", "linear_into"}),
        ("signal before write", SCATTER, {}, {"add_linears", "reduce_scatter"}),
        ("slot used early", GATHER, {}, {"gather", "linear_into"}),
        ("slot used early", SCATTER, {}, {"add_linears", "reduce_scatter"}),
        ("consumed before reading", GATHER, {}, {"gather", "linear_into"}),
        ("one signal for two pieces", GATHER, {"pieces": 2}, {"gather", "linear_into"}),
        ("one signal for two pieces", SCATTER, {"pieces": 2}, {"add_linears", "reduce_scatter"}),
        ("left in place too early", IN_PLACE, {}, {"_gather_in_place", "linear_into"}),
        ("shared flags", "two channels", {}, {"add_linears", "reduce_scatter"}),
    ],
)
def test_a_fault_is_found(pools, fault, op, settings, functions):
    pool = pools(2, TRITON_INTERPRET="1")
    found = races.find(pool, faulty_calls, 2, Setting("host", **settings), (op,), f"host: {fault}")
    pairs = [{race.first.where.split()[-1], race.second.where.split()[-1]} for race in found]
    assert functions in pairs, list(map(str, found))
    assert all(race.memory.startswith(("workspace", "symmetric tensor")) for race in found)
    assert all({race.first.kind, race.second.kind} == {"read", "write"} for race in found)
