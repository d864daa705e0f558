"""The kernels of the mixture of experts over several domains, run by the interpreter."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import fusedcomm as fc
from fusedcomm.engines.across import border
from fusedcomm.planning.moe import is_across
from tests.conftest import Pools
from tests.ranks.moe_cases import Case
from tests.ranks.test_domains_tensor_parallel import INTERLEAVED, TWO_OF_TWO
from tests.ranks.test_moe_domains import (
    as_in_one_domain,
    beside,
    check_crossing,
    check_two_levels,
    crossing,
    frozen,
    workspace_bytes,
)
from tests.ranks.test_moe_limits import dropped
from tests.ranks.test_moe_placement import check_on_kernels

THREE_OF_TWO = "0,3;4,1;2,5"
ROOM = {"align": 4, "capacity": 90, "max_tokens": 9}


def cases() -> list[Case]:
    """What the host engine is tried on, thinned: with the kernels of one domain all is tried."""
    found = [
        Case("moe_ffn", (5, 0, 9, 1), k=3, routing="sentinels", bias=True, options=ROOM),
        Case("pair", (5, 0, 9, 1), k=3, routing="sentinels", options=ROOM),
        Case("moe_ffn", (4, 7), k=3, experts=7, routing="duplicates", options={"save_rows": False}),
        Case("pair", (4, 7), k=3, experts=7, routing="duplicates", options={"save_rows": False}),
        # A domain without experts, and a rank.
        Case("moe_ffn", (3, 6), routing="one expert", owners=(0, 0, 2, 2, 0, 2, 2, 2)),
        Case("pair", (3,), k=1, experts=1, weighted=False),
        Case("moe_ffn", (7, 2), dtype=torch.bfloat16, bias=True, options={"align": 4}),
        Case("pair", (7, 2), dtype=torch.bfloat16, bias=True, options={"align": 4}),
        Case("moe_ffn", (2, 3), routing="none"),
        Case(
            "moe_ffn", (6, 2), activation="gpt_oss", layout="interleaved", transposed=True,
            bias=True, weighted=False,
        ),
    ]  # fmt: skip
    return [replace(case, engine="triton") for case in found]


@pytest.mark.parametrize(("domains", "which"), [(INTERLEAVED, 0), (TWO_OF_TWO, 1)])
def test_against_a_dense_loop(pools: Pools, domains: str, which: int) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=domains)
    chosen = cases()[:4] if which else cases()[4:] + cases()[:1]
    pool.run(check_two_levels, chosen, "triton", timeout_s=400)


def test_three_domains(pools: Pools) -> None:
    pool = pools(6, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=THREE_OF_TWO)
    case = Case("moe_ffn", (2, 0, 3), k=4, experts=11, engine="triton", options={"max_tokens": 3})
    pool.run(check_two_levels, [case], "triton", timeout_s=400)


@pytest.mark.parametrize("domains", [INTERLEAVED, TWO_OF_TWO])
def test_rows_are_those_of_one_domain(pools: Pools, domains: str) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=domains)
    pool.run(as_in_one_domain, "triton", timeout_s=200)


def test_what_finds_no_room_is_dropped_and_counted(pools: Pools) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    found = pool.run(dropped, "triton", 4, [(4, 8)], timeout_s=200)
    assert all(sum(counts) > 0 for counts in zip(*found, strict=True))


def test_a_token_crosses_once_per_domain(pools: Pools) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=INTERLEAVED)
    check_crossing(pool.run(crossing, "triton", timeout_s=200)[0], 4, 2)


@pytest.mark.parametrize("limits", [{}, {"capacity": 128, "max_tokens": 32}], ids=str)
def test_memory_is_what_the_formula_says(pools: Pools, limits: dict[str, int]) -> None:
    """Rows of the own domain and of the other one go through the same memory, one by one."""
    k, row, local, n, g = 4, 2 * 64, 2, 2, 2
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    for held, received in pool.run(workspace_bytes, "triton", limits, timeout_s=100):
        # Half of a rank's 24 k choices are for either domain, and half of its rows come from there.
        sent = (n - 1) * k * limits["max_tokens"] if limits else 24 * k // 2
        assert held["moe rows"]["data"] == 2 * limits.get("capacity", received // 2) * row
        assert held["moe returns"]["data"] == 2 * sent * row
        words = 2 * (1 + g * ((4 * local + 1) + 1))
        for kind in ("moe rows", "moe returns"):
            assert held[kind]["flags"] == 4096 * -(-128 * words // 4096)


def test_beside(pools: Pools) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    pool.run(beside, "triton", timeout_s=200)


def test_some_gradients(pools: Pools) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=INTERLEAVED)
    pool.run(frozen, "triton", timeout_s=200)


def test_a_placed_layer(pools: Pools) -> None:
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    pool.run(check_on_kernels, [3, 0, 3, 2, 0, 3, 1], timeout_s=200)


def traced(rank: int) -> None:
    """Compilers are told the shapes of two levels where calls are carried out so."""
    comm, cpu = fc.Communicator.of(), torch.device("cpu")
    found = {e: is_across(comm, cpu, torch.float32, e) for e in ("triton", "host", "auto", "plain")}
    assert found == {"triton": True, "host": True, "auto": True, "plain": False}


def test_shapes_for_compilers(pools: Pools) -> None:
    pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(traced, timeout_s=100)


def captured(rank: int) -> None:
    """What the host reads cannot be captured, and nothing is sent before that is said."""
    x, ids = torch.ones(2, 8), torch.tensor([[0], [3]])
    options = {"capacity": 8, "max_tokens": 2, "engine": "triton"}
    d = fc.dispatch(x, ids, None, 4, **options)
    for call in (
        lambda: fc.dispatch(x, ids, None, 4, **options),
        lambda: fc.dispatch(x, plan=d),
        lambda: fc.combine(d.x, d),
    ):
        with (
            mock.patch.object(border, "is_capturing", lambda: True),
            pytest.raises(ValueError, match="experts over several domains cannot be captured"),
        ):
            call()
    torch.testing.assert_close(fc.combine(d.x, d), x)


def test_a_capture_is_refused(pools: Pools) -> None:
    pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(captured, timeout_s=100)
