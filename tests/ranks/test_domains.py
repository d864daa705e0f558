"""Groups of several domains: how they are declared, made, agreed on and given back."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.topology import Link, Topology
from fusedcomm.topology.declared import VARIABLE
from tests.conftest import Pools
from tests.ranks.fault_calls import open_files

PAIRS = [[0, 1], [2, 3]]
INTERLEAVED = [[0, 2], [1, 3]]


def check_one_domain(rank: int) -> None:
    world_size = dist.get_world_size()
    with fc.Communicator.of() as comm:
        assert comm.topology.domains == (tuple(range(world_size)),) and comm.shares_memory
        assert comm.topology.source == "the machine"
        assert comm.inside is None and comm.between is None


def test_ranks_of_one_machine_are_a_domain(pools: Pools) -> None:
    for world_size in (1, 3):
        pools(world_size).run(check_one_domain)


def check_declared(rank: int, domains: list[list[int]], variable: str | None) -> None:
    """The communicator of each domain holds its ranks; and what is closed can be made again."""
    topology: Any = domains
    if variable is not None:
        os.environ[VARIABLE], topology = variable, None
    try:
        before = None
        for _ in range(3):
            comm = fc.Communicator.of(channel="declared", topology=topology)
            assert fc.Communicator.of(channel="declared") is comm
            assert comm.topology.domains == tuple(map(tuple, domains))
            assert not comm.shares_memory
            mine = next(ranks for ranks in domains if rank in ranks)
            assert comm.inside is not None and comm.between is not None
            assert (comm.inside.rank, comm.inside.world_size) == (mine.index(rank), len(mine))
            assert (comm.between.domain, comm.between.domains) == (domains.index(mine), 2)
            shared = comm.inside.symmetric_empty(1)
            shared.local.fill_(rank)
            comm.barrier()
            assert [int(peer) for peer in shared.peers] == mine
            comm.barrier()
            with pytest.raises(ValueError, match="share"):
                comm.symmetric_empty(1)
            with pytest.raises(ValueError, match="one domain of a group"):
                fc.all_reduce(torch.ones(1), group=comm.inside)
            assert "domains=2" in repr(comm)
            inside = comm.inside
            del shared
            comm.close()
            assert inside not in fc.Communicator.live()
            with pytest.raises(fc.ClosedError):
                inside.barrier()
            # The torch groups between domains stay, all else is given back.
            assert before is None or open_files() == before, (before, open_files())
            before = open_files()
    finally:
        os.environ.pop(VARIABLE, None)


@pytest.mark.parametrize("domains", [PAIRS, INTERLEAVED], ids=str)
def test_declared_by_argument_or_environment(pools: Pools, domains: list[list[int]]) -> None:
    pool = pools(4)
    pool.run(check_declared, domains, None)
    pool.run(check_declared, domains, ";".join(",".join(map(str, ranks)) for ranks in domains))


def check_arguments(rank: int) -> None:
    links = Topology(PAIRS, inside=Link("mine", 1e9, 1e-6))
    with fc.Communicator.of(channel="args", topology=links) as comm:
        assert comm.topology.link(0, 1).kind == "mine"
        assert fc.Communicator.of(channel="args", topology=links, timeout_s=77) is comm
        assert comm.inside is not None and comm.inside._watch.timeout_s == 77
        with pytest.raises(ValueError, match="close\\(\\) it on every rank"):
            fc.Communicator.of(channel="args", topology=INTERLEAVED)
    for wrong, message in (([[0, 1]], "2 ranks, the group 4"), ([[0, 1], [1, 2]], "stands in")):
        with pytest.raises(ValueError, match=message):
            fc.Communicator.of(channel="args", topology=wrong)
    fc.Communicator.of(channel="args").close()


def test_a_topology_that_does_not_fit_is_refused(pools: Pools) -> None:
    pools(4).run(check_arguments)


def check_unequal(rank: int) -> None:
    """Domains of different sizes, or of one rank, have nothing hierarchical about them."""
    for domains in ([[0, 1], [2]], [[0], [1], [2]]):
        with fc.Communicator.of(channel="unequal", topology=domains) as comm:
            assert comm.inside is None and not comm.shares_memory
            comm.barrier()


def test_domains_of_unequal_size(pools: Pools) -> None:
    pools(3).run(check_unequal)


def disagree(rank: int) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(fc.MismatchError) as caught:
        fc.Communicator.of(channel="disagree", topology=INTERLEAVED if rank == 3 else PAIRS)
    return str(caught.value), time.monotonic() - start


def test_ranks_that_declare_different_topologies_are_told(pools: Pools) -> None:
    pool = pools(4)
    outcomes = pool.run(disagree)
    pool.restart()  # the others left while some still asked
    for message, seconds in outcomes:
        assert "disagree on the topology" in message and "FUSEDCOMM_DOMAINS" in message
        assert seconds < 30
