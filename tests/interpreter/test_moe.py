"""The kernels of the mixture of experts, run by the interpreter, against a dense loop.

Half of the calls have a capacity, as it is then that no host may look at the routing.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch

from fusedcomm.engines.triton import config
from tests.conftest import Pools
from tests.ranks.moe_cases import OPS, Case
from tests.ranks.test_moe import check, exact
from tests.ranks.test_moe_limits import dropped


def cases(world_size: int) -> list[Case]:
    """What the host engine is tried on, thinned: the kernels have the same plans."""
    room = {"capacity": 90, "max_tokens": 20}
    found = [
        Case(op, routing=routing, options=room if number % 2 else {})
        for number, (routing, op) in enumerate(
            product(("random", "one expert", "duplicates", "sentinels", "none"), OPS)
        )
    ]
    found += [Case(op, (0, 7), routing="sentinels", bias=True, options=room) for op in OPS]
    found += [Case(op, (7, 0, 0), k=5, experts=5, options={"capacity": 70}) for op in OPS]
    found += [Case(op, (3,), k=1, experts=1) for op in OPS]
    found += [Case(op, (8, 5), k=3, experts=7, options=room) for op in OPS]
    found += [Case(op, (0,), options=room) for op in OPS]
    found += [Case(op, routing="sentinels", options={"save_rows": False}) for op in OPS]
    found += [
        Case(op, (20, 9), dtype=dtype, bias=True, routing="sentinels", options={"align": 4})
        for op, dtype in product(OPS, (torch.bfloat16, torch.float16))
    ]
    found += [Case(op, options={"align": 8, "capacity": 140, "max_tokens": 50}) for op in OPS]
    owners = tuple((e * 2 + 1) % world_size for e in range(8))
    found += [Case(op, owners=owners, weighted=False) for op in OPS]
    found += [
        Case(activation=activation, layout=layout, transposed=layout == "interleaved", bias=True)
        for activation, layout in (
            ("geglu", "gate_up"),
            ("geglu_tanh", "interleaved"),
            ("gpt_oss", "interleaved"),
            ("relu2", "gate_up"),
        )
    ]
    found += [Case(hidden=72, ffn=40, bias=True, options={"align": 4})]  # edges of tiles
    return [replace(case, engine="triton") for case in found]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_a_dense_loop(pools: Pools, world_size: int) -> None:
    chosen = cases(2) if world_size == 2 else cases(world_size)[:: 3 if world_size == 3 else 5]
    pools(world_size, TRITON_INTERPRET="1").run(check, chosen, timeout_s=400)


def check_many_tiles(rank: int) -> None:
    """Several pieces a segment, several tiles an expert, several blocks a piece."""
    with mock.patch.object(config, "_INTERPRETED", 16):
        check(
            rank,
            [
                Case(op, (1100, 20), k=1, experts=2, hidden=24, ffn=20, engine="triton")
                for op in OPS
            ],
        )


def test_pieces_and_tiles(pools: Pools) -> None:
    pools(2, TRITON_INTERPRET="1").run(check_many_tiles, timeout_s=400)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_come_back_exactly_and_plans_are_replayed(pools: Pools, world_size: int) -> None:
    pools(world_size, TRITON_INTERPRET="1").run(exact, "triton", world_size, timeout_s=100)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_finds_no_room_is_dropped_and_counted(pools: Pools, world_size: int) -> None:
    found = pools(world_size, TRITON_INTERPRET="1").run(dropped, "triton", world_size)
    assert all(sum(counts) > 0 for counts in zip(*found, strict=True))
