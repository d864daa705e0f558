"""The kernels of the mixture of experts are free of races, and a fault planted in one is found."""

from __future__ import annotations

import pytest

from fusedcomm.testing import races
from tests.interpreter.moe_race_calls import calls, faulty_calls
from tests.ranks.test_domains_tensor_parallel import TWO_OF_TWO


@pytest.mark.parametrize(
    "op, world_size, same_slot",
    [(op, *how) for op in ("pair", "moe_ffn") for how in ((2, True), (3, False))]
    + [("backward twice", 2, True)],
)
def test_every_kernel_is_clean(pools, op, world_size, same_slot):
    pool = pools(world_size, TRITON_INTERPRET="1")
    recordings = pool.run(races.recorded, calls, world_size, op, same_slot, timeout_s=200)
    assert races.check(recordings) == []
    used = {"push_rows_kernel", "await_kernel", "take_kernel", "sum_kernel"}
    used |= {"push_counts_kernel", "collect_kernel", "places_kernel"}
    if op != "pair":
        used |= {"up_kernel", "down_kernel", "row_blocks_kernel", "activation_grad_kernel"}
        used |= {"grouped_weight_grad_kernel", "grouped_bias_grad_kernel"}
    events = [event for recording in recordings for event in recording.events]
    assert used <= {event.launch.kernel for event in events if event.launch}
    assert {event.kind for event in events} >= {"read", "write", "acquire", "release", "count"}


@pytest.mark.parametrize("op, same_slot", [("pair", True), ("moe_ffn", False)])
def test_every_kernel_is_clean_inside_domains(pools, op, same_slot):
    """Where a call has its rows in two turns, on the next slot or on the same one."""
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    recordings = pool.run(races.recorded, calls, 4, op, same_slot, 5, timeout_s=200)
    assert races.check(recordings) == []
    events = [event for recording in recordings for event in recording.events]
    used = {event.launch.kernel for event in events if event.launch}
    assert {"push_rows_kernel", "await_kernel", "take_kernel", "sum_kernel"} <= used


@pytest.mark.parametrize(
    "fault, op",
    [
        ("counts not awaited", "pair"),
        ("counts signalled before they are written", "pair"),
        ("rows not awaited", "moe_ffn"),
        ("one flag for all pieces", "moe_ffn"),
        ("the end not awaited", "pair"),
        ("the first block signals", "pair"),
        ("the first tile signals", "moe_ffn"),
        ("gradients behind the end", "backward twice"),
    ],
)
def test_a_fault_is_found(pools, fault, op):
    pool = pools(2, TRITON_INTERPRET="1")
    found = races.find(pool, faulty_calls, 2, op, fault)
    assert any(race.memory.startswith("workspace moe") for race in found), list(map(str, found))
    assert all("write" in {race.first.kind, race.second.kind} for race in found)
