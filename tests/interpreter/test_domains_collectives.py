"""The collectives' kernels inside the domains of a group: right, and every byte crosses once."""

from __future__ import annotations

import pytest
import torch

import fusedcomm as fc
from fusedcomm.testing import RankPool
from tests.conftest import Pools
from tests.ranks.collective_calls import HALVES, Checker
from tests.ranks.test_domains_collectives import (
    bits,
    check_bytes,
    crossing,
    errors,
    some_calls,
)
from tests.ranks.test_domains_tensor_parallel import INTERLEAVED, TWO_OF_TWO


def ranks(pools: Pools, domains: str = TWO_OF_TWO) -> RankPool:
    return pools(4, FUSEDCOMM_DOMAINS=domains, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    ("domains", "shapes"), [(TWO_OF_TWO, ((7, 2, 3), (0, 4))), (INTERLEAVED, ((3, 5), (8,)))]
)
def test_shapes(pools: Pools, domains: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    ranks(pools, domains).run(some_calls, "triton", shapes, timeout_s=200)


def check_dtypes(rank: int) -> None:
    checker = Checker(fc.Communicator.of(), "triton")
    for dtype in (*HALVES, torch.int16, torch.bool):
        op = "max" if dtype == torch.bool else "sum"
        checker.all_reduce((11,), dtype, op)
        checker.reduce_scatter((5,), 0, dtype, op)
        checker.all_gather((5,), 0, dtype)
        checker.all_to_all((2,), 1, dtype)
        checker.broadcast((3,), 2, dtype)
    checker.finish()


def test_dtypes(pools: Pools) -> None:
    ranks(pools).run(check_dtypes, timeout_s=200)


def test_bytes_across_are_those_of_the_table(pools: Pools) -> None:
    check_bytes(ranks(pools).run(crossing, 61, "triton", timeout_s=100)[0], 4, TWO_OF_TWO, 61)


def test_sums_are_equal_on_all_ranks(pools: Pools) -> None:
    found = ranks(pools).run(bits, "triton", timeout_s=100)
    assert all(one == found[0] for one in found)


def test_what_is_wrong_is_said(pools: Pools) -> None:
    pool = ranks(pools)
    for _, message in pool.run(errors, "triton", timeout_s=100):
        assert "disagree on all_to_all's counts" in message
    pool.restart()
