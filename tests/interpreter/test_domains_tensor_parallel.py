"""The tensor-parallel kernels inside the domains of a group: right, and every byte crosses once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

import fusedcomm as fc
from fusedcomm.engines.triton import tensor_parallel as kernels
from fusedcomm.testing import RankPool
from tests.conftest import Pools
from tests.ranks.cases import CUTS_TOKENS, Case, Problem, call
from tests.ranks.checking import check, check_values, planned
from tests.ranks.test_domains_tensor_parallel import (
    INTERLEAVED,
    TWO_OF_TWO,
    bits,
    cases,
    check_bytes,
    check_deaths,
    check_told,
    crossing,
    die_in_a_call,
    differ,
)
from tests.ranks.test_tensor_parallel import bias_grad

#: The host engine's cases, as far as the kernels take them.
CASES = [replace(case, engine="triton") for case in cases() if case.dtype != torch.float64]


def ranks(pools: Pools, domains: str = TWO_OF_TWO, world_size: int = 4) -> RankPool:
    return pools(world_size, FUSEDCOMM_DOMAINS=domains, TRITON_INTERPRET="1")


def check_domains(rank: int, some: list[Case], plans: dict[str, Any]) -> None:
    comm = fc.Communicator.of()
    assert len(comm.topology.domains) > 1 and comm.inside is not None
    with planned(**plans):
        check(rank, some)


@pytest.mark.parametrize("domains", [TWO_OF_TWO, INTERLEAVED])
def test_two_domains_of_two(pools: Pools, domains: str) -> None:
    some = CASES[::5] if domains == TWO_OF_TWO else CASES[2::5]
    ranks(pools, domains).run(check_domains, some, {}, timeout_s=200)


def test_pieces_and_copies(pools: Pools) -> None:
    some = [case for case in CASES if case.tokens in ((13,), (5, 3)) and case.op in CUTS_TOKENS]
    plans = {"pieces": 2, "copies": True}
    ranks(pools, INTERLEAVED).run(check_domains, some, plans, timeout_s=200)


def test_three_domains_of_two(pools: Pools) -> None:
    """Sums of more than two, and one shard for several counterparts."""
    some = [Case(op, (13,), engine="triton") for op in ("all_gather_linear", "linear_all_reduce")]
    ranks(pools, "0,1;2,3;4,5", 6).run(check_domains, some, {}, timeout_s=200)


def test_bytes_across_are_those_of_the_table(pools: Pools) -> None:
    for rows in (8, 3):
        found = ranks(pools).run(crossing, rows, "triton", timeout_s=100)[0]
        check_bytes(found, 4, TWO_OF_TWO, rows)


def compute_first(rank: int, op: str) -> None:
    """Domain 1 sends nothing until domain 0 has made the products of its own domain.

    A rank that waited for the other domain before it computed would wait for ever.
    """
    comm = fc.Communicator.of()
    assert comm.between is not None
    store, key, calls = distributed_c10d._get_default_store(), f"kernels: {op}", 0
    # A reduce-scatter makes the other domain's sums first.
    own_domains = 1 if op == "all_gather_linear" else 2
    one_domain, cross = getattr(kernels, op), comm.between.all_to_all

    def counting(*args: Any) -> Any:
        nonlocal calls
        found = one_domain(*args)
        calls += 1
        if comm.rank == 0 and calls == own_domains:
            store.set(key, "yes")
        return found

    def held(*args: Any) -> Any:
        if comm.between is not None and comm.between.domain == 1:
            store.wait([key], timedelta(seconds=60))
        return cross(*args)

    case = Case(op, (8,), needs="", engine="triton")
    with (
        mock.patch.object(kernels, op, counting),
        mock.patch.object(comm.between, "all_to_all", held),
    ):
        found = call(case, Problem.of(case, 4), rank, 4)
    check_values(case, Problem.of(case, 4), found, rank, 4)
    assert calls == 2


@pytest.mark.parametrize("op", CUTS_TOKENS)
def test_what_crosses_is_hidden_behind_the_own_domains_products(pools: Pools, op: str) -> None:
    ranks(pools).run(compute_first, op, timeout_s=100)


def test_sums_are_equal_on_all_ranks_and_reproducible(pools: Pools) -> None:
    pool = ranks(pools)
    first = pool.run(bits, None, "triton", 70, timeout_s=100)
    assert all(one == first[0] for one in first)
    assert pool.run(bits, None, "triton", 70, timeout_s=100) == first


def test_the_gradient_of_a_bias_is_equal_on_all_ranks(pools: Pools) -> None:
    found = ranks(pools, "0,1;2,3;4,5", 6).run(bias_grad, "triton", timeout_s=100)
    assert len(set(found)) == 1


def test_a_rank_that_dies_is_noticed_in_every_domain(pools: Pools) -> None:
    outcomes = ranks(pools).outcomes(die_in_a_call, 3, "triton", timeout_s=60)
    check_deaths(outcomes, 3)


def test_domains_that_disagree_are_told(pools: Pools) -> None:
    pool = ranks(pools)
    check_told(pool.run(differ, "triton", timeout_s=60))
    pool.restart()
