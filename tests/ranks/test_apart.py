"""Ranks that share no memory: torch does the work, and a death is still an error of ours."""

from __future__ import annotations

from functools import partial

import pytest

import fusedcomm as fc
from fusedcomm.communicator import communicator
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    LIMIT_S,
    Seen,
    call,
    die,
    held,
    right,
    see,
)


def live_apart(rank: int, victim: int | None) -> Seen:
    """As if every rank were in a process namespace, or on a machine, of its own."""
    communicator.machine_identity = lambda: f"machine {rank}"
    before = held()
    seen = _work_apart(rank, victim)
    assert held() == before or victim is not None
    return seen


def _work_apart(rank: int, victim: int | None) -> Seen:
    with fc.Communicator.of(timeout_s=20) as comm:
        assert not comm.shares_memory
        with pytest.warns(UserWarning, match="without overlap: the group's ranks do not share"):
            assert right("all_gather_linear", comm, call("all_gather_linear", comm))
        for use in (
            lambda: call("all_gather_linear", comm, engine="host"),
            lambda: comm.symmetric_empty(3),
            lambda: comm.reserve("all_gather_linear", (8, 8)),
        ):
            with pytest.raises(ValueError, match="share"):
                use()
        comm.barrier()
        if rank == victim:
            die()
        work = partial(call, "all_gather_linear", comm, engine="plain")
        return see(comm, lambda: [work() for _ in range(3)])


def test_ranks_that_share_no_memory(pools: Pools) -> None:
    pool = pools(2)
    assert [seen.error for seen in pool.run(live_apart, None, timeout_s=40)] == ["", ""]
    pool.restart()
    outcomes = pool.outcomes(live_apart, 1, timeout_s=40)
    assert outcomes[0].fate == "returned", outcomes[0].details
    seen = outcomes[0].value
    assert seen.error == "PeerLostError" and "all_gather_linear" in seen.message, seen
    assert (seen.at_ns - outcomes[1].at_ns) / 1e9 < LIMIT_S
