"""The kernels are free of races, and a fault planted in one is found."""

from __future__ import annotations

import re

import pytest

from fusedcomm.testing import races
from tests.interpreter.race_calls import Setting, calls, faulty_calls

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
    found = races.find(pool, calls, world_size, setting, (GATHER, SCATTER, REDUCE))
    assert found == []


def test_two_communicators_are_clean(pools):
    pool = pools(2, TRITON_INTERPRET="1")
    assert races.find(pool, calls, 2, Setting("triton", tokens=4), ("two channels",)) == []


FORWARD_GATHER, FORWARD_SCATTER = f"{GATHER}, forward", f"{SCATTER}, forward"
LONG = {"tokens": 140, "inner": 8, "outer": 8}  # more than one program pushes a piece


@pytest.mark.parametrize(
    "fault, op, settings, first, second",
    [
        ("begin: slot used early", FORWARD_GATHER, {}, "consume_kernel", "push_kernel"),
        ("begin: slot used early", FORWARD_SCATTER, {}, "reduce_kernel", "produce_kernel"),
        ("begin: slot used early", REDUCE, {}, "one_shot_kernel", "one_shot_kernel"),
        ("gather: no wait", FORWARD_GATHER, {}, "push_kernel", "consume_kernel"),
        ("gather: no wait", SCATTER, {}, "push_kernel", "weight_grad_kernel"),
        ("gather: signal before store", FORWARD_GATHER, {}, "push_kernel", "consume_kernel"),
        ("gather: no counter", FORWARD_GATHER, LONG, "push_kernel", "consume_kernel"),
        ("gather: counter one short", FORWARD_GATHER, LONG, "push_kernel", "consume_kernel"),
        ("scatter: no wait", FORWARD_SCATTER, {}, "produce_kernel", "reduce_kernel"),
        ("scatter: signal before store", FORWARD_SCATTER, {}, "produce_kernel", "reduce_kernel"),
        ("scatter: no counter", FORWARD_SCATTER, {}, "produce_kernel", "reduce_kernel"),
        ("scatter: every program signals", FORWARD_SCATTER, {}, "produce_kernel", "reduce_kernel"),
        ("scatter: relaxed signal", FORWARD_SCATTER, {}, "produce_kernel", "reduce_kernel"),
        ("scatter: shared flags", "two channels", {}, "produce_kernel", "reduce_kernel"),
        ("one shot: no wait", REDUCE, {}, "one_shot_kernel", "one_shot_kernel"),
        ("one shot: signal before store", REDUCE, {}, "one_shot_kernel", "one_shot_kernel"),
        ("two shot: no wait for the result", REDUCE, {"one_shot": False}, "two_shot", "two_shot"),
        (
            "two shot: result signalled before its store",
            REDUCE,
            {"one_shot": False},
            "two_shot",
            "two_shot",
        ),
    ],
)
def test_a_fault_is_found(pools, fault, op, settings, first, second):
    pool = pools(2, TRITON_INTERPRET="1")
    found = races.find(pool, faulty_calls, 2, Setting("triton", **settings), (op,), fault)
    texts = [str(race) for race in found]
    pair = re.compile(f"workspace.*({first}.*{second}|{second}.*{first})", re.DOTALL)
    assert any(pair.search(text) for text in texts), texts
