"""Domains that are found, not declared: ranks in network namespaces of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.cases import OPS, Case
from tests.ranks.checking import check
from tests.ranks.moe_cases import OPS as MOE_OPS
from tests.ranks.moe_cases import Case as MoeCase
from tests.ranks.namespaces import UnavailableError, bytes_sent, move_into, namespaces
from tests.ranks.test_domains_collectives import some_calls
from tests.ranks.test_moe import check as check_moe

SIZE = 4 << 20  # bytes of the tensor that is summed


def work(rank: int, names: list[str], store: str) -> tuple[int, int, int]:
    """Everything is right; what one all-reduce sent over the card, and is said to have sent."""
    per_domain, world_size = 2, 2 * len(names)
    move_into(names[rank // per_domain], rank, world_size, store)
    comm = fc.Communicator.of(timeout_s=40)
    assert comm.topology.domains == tuple((2 * d, 2 * d + 1) for d in range(len(names)))
    assert comm.topology.source == "the machine" and comm.inside is not None
    check(rank, [Case(op, tokens) for op in OPS for tokens in ((13,), (2, 9), (0,))])
    some_calls(rank)
    check_moe(rank, [MoeCase(op, (13, 5), k=3, engine="auto") for op in MOE_OPS])
    x = torch.ones(SIZE // 4 // 256, 2)
    weight = torch.full((256, 2), 0.5)
    comm.barrier()
    assert comm.between is not None
    before, counted = bytes_sent(), comm.between.bytes_sent
    y = fc.linear_all_reduce(x, weight)
    counted = comm.between.bytes_sent - counted
    comm.barrier()
    assert bool((y == world_size).all())
    sent = bytes_sent() - before
    dist.barrier()
    comm.close()
    return rank // per_domain, sent, counted


@pytest.mark.parametrize("domains", [2, 4])
def test_domains_in_network_namespaces(pools: Pools, tmp_path: Path, domains: int) -> None:
    pool = pools(2 * domains)
    try:
        with namespaces(domains) as names:
            found = pool.run(work, names, str(tmp_path / "store"), timeout_s=90)
    except UnavailableError as reason:
        pytest.skip(f"network namespaces cannot be had: {reason}")
    finally:
        pool.restart()  # their default group lies in namespaces that are gone
    # The table: 2 (N-1)/N of S/g for each rank, so g times that leaves a domain.
    across = 2 * (domains - 1) * SIZE // domains
    for domain in range(domains):
        counted = sum(bytes_ for where, _, bytes_ in found if where == domain)
        assert counted == across
        seen = next(sent for where, sent, _ in found if where == domain)
        assert across <= seen < 1.15 * across, (domain, seen / across)
