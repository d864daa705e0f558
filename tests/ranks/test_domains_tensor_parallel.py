"""The tensor-parallel operations over several domains: right, and every byte crosses once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fusedcomm as fc
from fusedcomm.engines.host import tensor_parallel as host
from fusedcomm.ranks.outcomes import Outcome
from fusedcomm.testing import straggler
from tests.conftest import Pools
from tests.ranks.cases import CUTS_TOKENS, OPS, Case, Problem, call
from tests.ranks.checking import check, check_values, planned
from tests.ranks.test_tensor_parallel import DTYPES

TWO_OF_TWO, INTERLEAVED, FOUR_OF_TWO = "0,1;2,3", "0,2;1,3", "0,1;2,3;4,5;6,7"


def cases() -> Iterator[Case]:
    """Rows that do not divide, fewer than ranks, none; every cut dimension, dtype and layout."""
    for op in OPS:
        for rows in (8, 7, 1, 0, 40, 13):
            yield Case(op, (rows,))
        for dim in range(2) if op in CUTS_TOKENS else (0,):
            yield Case(op, (5, 3), dim)
        for dtype in DTYPES:
            yield Case(op, (11,), k=33, n=20, dtype=dtype, values="signed", layout="steps")
        yield Case(op, (50,), k=96, n=64, dtype=torch.bfloat16, values="ones")
        yield Case(op, (9,), k=5, n=3, bias=False)
        yield Case(op, (4,), k=0)
    for options in ({"save_gathered": True}, {"return_gathered": True}):
        yield Case("all_gather_linear", (10,), n=(10, 3), bias=(True, False), options=options)
    wide = {"wire_dtype": torch.float32}
    yield Case("linear_all_reduce", (10,), k=100, dtype=torch.bfloat16, options=wide)


def check_domains(rank: int, some: list[Case]) -> None:
    """As planned, and as for larger problems: cut by chunks, and in pieces."""
    comm = fc.Communicator.of()
    assert len(comm.topology.domains) > 1 and comm.inside is not None
    for plans in ({}, {"min_chunk_rows": 1, "pieces": 2}):
        with planned(**plans):
            check(rank, some)


@pytest.mark.parametrize("domains", [TWO_OF_TWO, INTERLEAVED])
def test_two_domains_of_two(pools: Pools, domains: str) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=domains)
    some = list(cases()) if domains == TWO_OF_TWO else list(cases())[::3]
    pool.run(check_domains, some)


def test_four_domains_of_two(pools: Pools) -> None:
    some = [case for case in cases() if case.tokens in ((13,), (5, 3), (1,))]
    pools(8, FUSEDCOMM_DOMAINS=FOUR_OF_TWO).run(check_domains, some, timeout_s=120)


def crossing(rank: int, rows: int, engine: str) -> dict[str, list[int]]:
    """Bytes that every rank sends to other domains in one call, by operation."""
    comm = fc.Communicator.of()
    assert comm.between is not None
    world_size, found = dist.get_world_size(), {}
    for op in OPS:
        case = Case(op, (rows,), k=16, n=24, needs="", engine=engine)
        before = comm.between.bytes_sent
        call(case, Problem.of(case, world_size), rank, world_size)
        counted = torch.tensor([comm.between.bytes_sent - before])
        everyone = [torch.empty_like(counted) for _ in range(world_size)]
        dist.all_gather(everyone, counted)
        found[op] = [int(count) for count in everyone]
    return found


@pytest.mark.parametrize(("world_size", "domains"), [(4, TWO_OF_TWO), (8, FOUR_OF_TWO)])
@pytest.mark.parametrize("rows", [16, 13, 3])
def test_bytes_across_are_those_of_the_table(
    pools: Pools, world_size: int, domains: str, rows: int
) -> None:
    found = pools(world_size, FUSEDCOMM_DOMAINS=domains).run(crossing, rows, "host")[0]
    check_bytes(found, world_size, domains, rows)


def check_bytes(found: dict[str, list[int]], world_size: int, domains: str, rows: int) -> None:
    """Per rank 2 (N-1)/N of S/g for an all-reduce and half of it for each of its parts."""
    n, g = domains.count(";") + 1, 2
    gathered, summed = rows * 16 * 4, rows * 24 * 4
    expected = {
        "all_gather_linear": gathered,
        "linear_reduce_scatter": summed,
        "linear_all_reduce": 2 * summed,
        "replicated_linear": 0,
    }
    for op, size in expected.items():
        # (N-1)/N S/g for each of N g ranks; exact in sum with uneven shards too.
        assert sum(found[op]) == (n - 1) * size, (op, found[op])
        if rows % world_size == 0:
            assert found[op] == [(n - 1) * size // (n * g)] * world_size, op


def compute_first(rank: int, op: str) -> None:
    """Domain 1 sends nothing until domain 0 has multiplied rows of its own domain.

    A rank that waited for the other domain before it computed would wait for ever.
    """
    comm = fc.Communicator.of()
    assert comm.between is not None
    store = distributed_c10d._get_default_store()
    key, products = f"{op}: domain 0 computes", 0
    gather = op == "all_gather_linear"
    # With two ranks a domain, the own chunk is added to the peer's by another function.
    names = ("linear_into",) if gather else ("sum_of_linears", "add_linears")
    cross = comm.between.all_to_all

    def counted(multiply: Any) -> Any:
        def counting(*args: Any) -> None:
            nonlocal products
            multiply(*args)
            products += 1
            # A reduce-scatter makes the other domain's two chunks first.
            if comm.rank == 0 and products == (1 if gather else 3):
                store.set(key, "yes")

        return counting

    def held(*args: Any) -> Any:
        if comm.between is not None and comm.between.domain == 1:
            store.wait([key], timedelta(seconds=30))
        return cross(*args)

    case = Case(op, (16,), needs="")
    with (
        mock.patch.multiple(host, **{name: counted(getattr(host, name)) for name in names}),
        mock.patch.object(comm.between, "all_to_all", held),
        planned(min_chunk_rows=1),
    ):
        found = call(case, Problem.of(case, 4), rank, 4)
    check_values(case, Problem.of(case, 4), found, rank, 4)
    assert products == 4


@pytest.mark.parametrize("op", CUTS_TOKENS)
def test_what_crosses_is_hidden_behind_the_own_domains_products(pools: Pools, op: str) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(compute_first, op)


def bits(rank: int, late: int | None, engine: str, most: int) -> list[bytes]:
    """The result of an all-reduce, twice, with a rank that is late or without."""
    found = []
    for dtype, rows in product((torch.float32, torch.bfloat16), (5, most)):
        torch.manual_seed(rank)
        x, weight = torch.randn(rows, 40, dtype=dtype), torch.randn(24, 40, dtype=dtype)
        if late is None:
            y = fc.linear_all_reduce(x, weight, engine=engine)
        else:
            with straggler(late, "signal", 0.003):
                y = fc.linear_all_reduce(x, weight, engine=engine)
        found.append(y.view(torch.uint8).numpy().tobytes())
    return found


def test_sums_are_equal_on_all_ranks_and_reproducible(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    first = pool.run(bits, None, "host", 600)
    assert all(one == first[0] for one in first)
    assert pool.run(bits, 1, "host", 600) == first


def check_training(rank: int) -> None:
    """A block of layers, forward and backward, against the unsharded one."""
    torch.manual_seed(3)
    first, second = torch.nn.Linear(12, 20).double(), torch.nn.Linear(20, 12).double()
    x = torch.randn(14, 12, dtype=torch.float64)
    column = fc.nn.ColumnParallelLinear.from_linear(first)
    row = fc.nn.RowParallelLinear.from_linear(second)
    leaf = x.chunk(4)[rank].clone().requires_grad_()
    y = row(column(leaf, gathered_size=14))
    whole = x.clone().requires_grad_()
    expected = second(first(whole))
    expected.square().sum().backward()
    y.square().sum().backward()
    torch.testing.assert_close(y, expected.chunk(4)[rank])
    assert leaf.grad is not None and whole.grad is not None
    torch.testing.assert_close(leaf.grad, whole.grad.chunk(4)[rank])


def test_layers_train_over_domains(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED).run(check_training)


def differ(rank: int, engine: str) -> str:
    x = torch.ones(4, 6 if rank < 2 else 8)
    with pytest.raises(fc.FusedcommError) as caught:
        fc.linear_all_reduce(x, torch.ones(5 if rank < 2 else 7, x.shape[1]), engine=engine)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_domains_that_disagree_are_told(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    check_told(pool.run(differ, "host"))
    pool.restart()


def check_told(outcomes: list[str]) -> None:
    for said in outcomes:
        assert said.startswith("MismatchError: domains disagree"), said
        assert "[4x1, 5]" in said and "[4x1, 7]" in said


def die_in_a_call(rank: int, victim: int, engine: str) -> str:
    comm = fc.Communicator.of(timeout_s=20)
    comm.barrier()
    if rank == victim:
        os._exit(7)
    try:
        for _ in range(3):
            fc.linear_all_reduce(torch.ones(4, 6), torch.ones(5, 6), engine=engine)
    except fc.FusedcommError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_is_noticed_in_every_domain(pools: Pools, victim: int) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    check_deaths(pool.outcomes(die_in_a_call, victim, "host", timeout_s=30), victim)


def check_deaths(outcomes: list[Outcome], victim: int) -> None:
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.fate == "returned", outcome
            assert outcome.value in ("PeerLostError", "AbortedError"), outcome


def abort_and_go_on(rank: int, aborts: bool) -> tuple[str, float]:
    """One rank fails outside of calls: waits end in both domains, and all recover."""
    x, weight = torch.ones(4, 6), torch.ones(5, 6)
    comm = fc.Communicator.of(channel="recover", timeout_s=60)
    fc.linear_all_reduce(x, weight, group=comm)
    start = time.monotonic()
    if rank == 0:
        if aborts:
            comm.abort("as the test wants it")
        else:
            comm.close()
        said = ""
    else:
        with pytest.raises(fc.FusedcommError) as caught:
            for _ in range(3):
                fc.linear_all_reduce(x, weight, group=comm)
        said = type(caught.value).__name__
    seconds = time.monotonic() - start
    comm.close()
    dist.barrier()
    for _ in range(2):
        with fc.Communicator.of(channel="recover", timeout_s=20) as comm:
            y = fc.linear_all_reduce(x, weight, group=comm)
            assert bool((y == 24).all())
            comm.barrier()
    return said, seconds


@pytest.mark.parametrize("aborts", [True, False], ids=["abort", "close"])
def test_every_domain_learns_of_an_error_and_recovers(pools: Pools, aborts: bool) -> None:
    for said, seconds in pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(abort_and_go_on, aborts)[1:]:
        assert said in ("AbortedError", "PeerLostError")
        assert seconds < 30


def test_plain_still_serves_several_domains(pools: Pools) -> None:
    some = [replace(case, engine="plain") for case in cases() if case.tokens == (13,)]
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(check_plain, some)


def check_plain(rank: int, some: list[Case]) -> None:
    check(rank, some)
