"""Collectives and messages on the host engine are free of races; a planted fault is found."""

from __future__ import annotations

import pytest

from fusedcomm.pairs import PARTS
from fusedcomm.testing import races
from tests.conftest import Pools
from tests.ranks.race_collectives import (
    OPERATIONS,
    calls,
    faulty_calls,
    faulty_messages,
    messages,
)

#: Parts of a message: one, as many as the buffer has, and a number that does not divide it.
SIZES = (1, PARTS, PARTS // 2 + 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("slot_bytes", "same_slot", "round_"),
    [(1 << 20, True, False), (1 << 20, False, False), (64, False, False), (64, False, True)],
    ids=["one slot", "slots in turn", "pieces", "banks"],
)
def test_collectives_are_clean(
    pools: Pools, world_size: int, slot_bytes: int, same_slot: bool, round_: bool
) -> None:
    if world_size == 4 and not same_slot:
        pytest.skip("three ranks show it; four are for halving and doubling")
    recordings = pools(world_size).run(
        races.recorded, calls, tuple(OPERATIONS), slot_bytes, same_slot, round_, timeout_s=120
    )
    assert races.check(recordings) == []
    for recording in recordings:
        kinds = {event.kind for event in recording.events}
        assert kinds == {"read", "write", "acquire", "release"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_are_clean(pools: Pools, world_size: int) -> None:
    recordings = pools(world_size).run(races.recorded, messages, SIZES, timeout_s=120)
    found = races.check(recordings)
    assert not found, "\n".join(map(str, found))
    assert all(len(recording.events) > 100 for recording in recordings)


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        *(("no wait", name) for name in OPERATIONS if name != "all_to_all counts"),
        ("signal before write", "all_reduce one_shot"),
        ("signal before write", "all_gather"),
        ("signal before write", "broadcast"),
        ("bank told late", "all_gather"),
        ("slot used early", "all_reduce one_shot"),
        ("slot used early", "all_reduce ring"),
        ("slot used early", "reduce_scatter"),
        ("slot used early", "all_to_all"),
        ("slot used early", "broadcast"),
        ("consumed before reading", "all_reduce one_shot"),
        ("consumed before reading", "all_gather"),
        ("left in place too early", "in place"),
    ],
)
def test_a_fault_is_found(pools: Pools, fault: str, operation: str) -> None:
    arguments = ((operation,), 1 << 20, True, "bank" in fault)
    found = races.find(pools(3), faulty_calls, f"host: {fault}", *arguments)
    assert found, f"{fault} in {operation} was not found"
    assert all(race.memory.startswith(("workspace", "symmetric tensor")) for race in found)


@pytest.mark.parametrize("fault", ["written before", "emptied before", "no room awaited"])
def test_a_fault_in_messages_is_found(pools: Pools, fault: str) -> None:
    found = races.find(pools(2), faulty_messages, fault)
    assert found
    assert all(race.memory.startswith("messages from rank") for race in found), found
