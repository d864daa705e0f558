"""What the mixture of experts must stand, on the kernels: extents, groups, late ranks, channels."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.engines.triton import moe
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.testing import RankError
from tests.conftest import Pools
from tests.interpreter.race_faults import _kernels
from tests.ranks.moe_cases import OPS, Case
from tests.ranks.test_moe import check, forms
from tests.ranks.test_moe_together import in_flight
from tests.ranks.test_skew import same_slot

SMALL = {"ffn": 8, "engine": "triton"}


def tokens_and_choices() -> list[Case]:
    """Tokens at the edges of blocks; many choices, as many as experts, more than ranks."""
    found = [
        Case(op, (t, 3), k=1, experts=2, **SMALL)
        for op, t in (("pair", 127), ("moe_ffn", 128), ("moe_ffn", 129))
    ]
    found += [Case(op, (1, 2), k=8, experts=8, **SMALL) for op in OPS]
    found += [Case(op, (4, 3), k=10, experts=64, routing="sentinels", **SMALL) for op in OPS]
    found += [Case(op, (9, 20), k=1, experts=256, routing="sentinels", **SMALL) for op in OPS]
    found += [Case(op, (5, 8), k=3, experts=7, routing="one rank", **SMALL) for op in OPS]
    return found


def features() -> list[Case]:
    return [
        Case(op, (2, 3), k=1, experts=2, hidden=hidden, routing="random", **SMALL)
        for op, hidden in product(OPS, (72, 2880, 7168))
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tokens_and_choices(pools: Pools, world_size: int) -> None:
    chosen = tokens_and_choices() if world_size == 2 else tokens_and_choices()[3::2]
    pools(world_size, TRITON_INTERPRET="1").run(check, chosen, timeout_s=400)


def test_features(pools: Pools) -> None:
    pools(2, TRITON_INTERPRET="1").run(check, features(), timeout_s=400)


def test_leading_dimensions_strides_and_dtypes(pools: Pools) -> None:
    pools(2, TRITON_INTERPRET="1").run(forms, "triton", timeout_s=200)


def test_several_in_flight(pools: Pools) -> None:
    pools(3, TRITON_INTERPRET="1").run(in_flight, "triton", timeout_s=200)


CALLS = [
    Case("moe_ffn", (5, 3), routing="sentinels", **SMALL),
    Case("pair", (3, 9), experts=5, k=3, options={"align": 4}, **SMALL),
    Case("moe_ffn", (6, 0), hidden=8, routing="one rank", bias=True, **SMALL),
]


def two_groups(rank: int) -> None:
    halves = [dist.new_group([3, 0], use_local_synchronization=False), dist.new_group([1, 2])]
    mine = halves[0] if rank in (0, 3) else halves[1]
    check(rank, CALLS, mine)
    check(rank, CALLS[:2])
    check(rank, CALLS[::-1], mine)


def test_two_groups_at_once(pools: Pools) -> None:
    pools(4, TRITON_INTERPRET="1").run(two_groups, timeout_s=200)


#: Longer than several calls of ``replayed`` take.
LATE_S = 0.6


def take_late(launch: Launch, *arguments: Any) -> None:
    launch.call(lambda: time.sleep(LATE_S))
    take(launch, *arguments)


take = moe.take_rows


def replayed(rank: int, channel: str) -> None:
    """One plan again and again on one slot, one rank late to take the rows that have come: nothing
    but consumed holds the others back."""
    comm = fc.Communicator.of(channel=channel, timeout_s=20)
    ids = torch.arange(6).view(6, 1)
    d = fc.dispatch(torch.zeros(6, 8), ids, None, 6, group=comm, engine="triton")
    for who in range(comm.world_size):
        late = mock.patch.object(moe, "take_rows", take_late) if rank == who else nullcontext()
        with same_slot(), late:
            for number in range(1, 5):
                value = float(100 * who + number)
                y = fc.dispatch(torch.full((6, 8), value), plan=d).x
                assert bool((y == value).all()), f"rank {who} late"
    comm.close()


def replayed_without_consumed(rank: int) -> None:
    change = ("ok = wait_at_least(flag, epoch - 1, limit, record, CONSUMED, reader, -1) & ok", "")
    with _kernels("signals", change)():
        replayed(rank, "late, unheld")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_changes_nothing(pools: Pools, world_size: int) -> None:
    pools(world_size, TRITON_INTERPRET="1").run(replayed, "late", timeout_s=100)


def test_a_forgotten_wait_for_the_reader_is_found(pools: Pools) -> None:
    with pytest.raises(RankError, match=r"AssertionError: rank \d late"):
        pools(2, TRITON_INTERPRET="1").run(replayed_without_consumed, timeout_s=100)
