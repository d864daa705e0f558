"""The kernels are free of races, and a fault planted in one is found."""

from __future__ import annotations

import pytest

from fusedcomm.testing import races
from tests.interpreter.race_calls import Setting, calls, faulty_calls

#: What every operation, forward and backward, launches; but for the all-reduce.
KERNELS = {
    *("begin", "end", "push_kernel", "consume_kernel", "weight_grad_kernel"),
    *("produce_kernel", "reduce_kernel"),
}
GATHER, SCATTER, REDUCE = "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"


@pytest.mark.parametrize(
    "world_size, settings",
    [
        (2, {}),
        (2, {"tokens": 37, "pieces": 2, "same_slot": False, "one_shot": False}),
        (3, {"tokens": 2, "one_shot": False}),
    ],
    ids=["two ranks", "two pieces", "three ranks, one of them empty"],
)
def test_every_kernel_is_clean(pools, world_size, settings):
    pool = pools(world_size, TRITON_INTERPRET="1")
    setting = Setting("triton", **settings)
    ops = (GATHER, SCATTER, REDUCE)
    recordings = pool.run(races.recorded, calls, world_size, setting, ops, timeout_s=120)
    assert races.check(recordings) == []
    for events in (recording.events for recording in recordings):
        kernels = {event.launch.kernel for event in events if event.launch}
        assert kernels == KERNELS | {"one_shot_kernel" if setting.one_shot else "two_shot_kernel"}
        assert {event.kind for event in events} >= {"read", "write", "acquire", "release", "count"}


@pytest.mark.parametrize("op", ["two channels", "wrap-around"])
def test_other_communicators_are_clean(pools, op):
    pool = pools(2, TRITON_INTERPRET="1")
    assert races.find(pool, calls, 2, Setting("triton", tokens=4), (op,)) == []


FORWARD_GATHER, FORWARD_SCATTER = f"{GATHER}, forward", f"{SCATTER}, forward"
LONG = {"tokens": 140, "inner": 8, "outer": 8}  # more than one program pushes a piece
TWO_SHOT = {"one_shot": False}
PUSH, PRODUCE = {"push_kernel", "consume_kernel"}, {"produce_kernel", "reduce_kernel"}


@pytest.mark.parametrize(
    "fault, op, settings, kernels",
    [
        ("begin: slot used early", FORWARD_GATHER, {}, PUSH),
        ("begin: slot used early", FORWARD_SCATTER, {}, PRODUCE),
        ("begin: slot used early", REDUCE, {}, {"one_shot_kernel"}),
        ("gather: no wait", FORWARD_GATHER, {}, PUSH),
        ("gather: no wait", SCATTER, {}, {"push_kernel", "weight_grad_kernel"}),
        ("gather: signal before store", FORWARD_GATHER, {}, PUSH),
        ("gather: no counter", FORWARD_GATHER, LONG, PUSH),
        ("gather: counter one short", FORWARD_GATHER, LONG, PUSH),
        ("scatter: no wait", FORWARD_SCATTER, {}, PRODUCE),
        ("scatter: signal before store", FORWARD_SCATTER, {}, PRODUCE),
        ("scatter: no counter", FORWARD_SCATTER, {}, PRODUCE),
        ("scatter: every program signals", FORWARD_SCATTER, {}, PRODUCE),
        ("scatter: relaxed signal", FORWARD_SCATTER, {}, PRODUCE),
        ("scatter: shared flags", "two channels", {}, PRODUCE),
        ("one shot: no wait", REDUCE, {}, {"one_shot_kernel"}),
        ("one shot: signal before store", REDUCE, {}, {"one_shot_kernel"}),
        ("two shot: no wait for the result", REDUCE, TWO_SHOT, {"two_shot_kernel"}),
        ("two shot: result signalled before its store", REDUCE, TWO_SHOT, {"two_shot_kernel"}),
    ],
)
def test_a_fault_is_found(pools, fault, op, settings, kernels):
    pool = pools(2, TRITON_INTERPRET="1")
    found = races.find(pool, faulty_calls, 2, Setting("triton", **settings), (op,), fault)
    pairs = [
        {event.launch.kernel for event in (race.first, race.second) if event.launch}
        for race in found
    ]
    assert kernels in pairs, list(map(str, found))
    assert all(race.memory.startswith("workspace") for race in found)
    assert all({race.first.kind, race.second.kind} == {"read", "write"} for race in found)
