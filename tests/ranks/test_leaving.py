"""A rank is silent, or leaves: at its own pace, on purpose, or with a child that stays."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm import waiting
from fusedcomm.communicator.torch_calls import TorchCalls
from fusedcomm.testing import disturb
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    LIMIT_S,
    OPS,
    Record,
    Seen,
    assert_lost,
    before,
    call,
    die,
    right,
    see,
    stop,
    survivors,
)


def stop_within(rank: int, form: str, engine: str, victim: int) -> tuple[Seen, float]:
    comm = fc.Communicator.of(timeout_s=1.0)
    pids: list[Any] = [None] * comm.world_size
    dist.all_gather_object(pids, os.getpid())
    call(form, comm, engine=engine)
    start = time.monotonic()

    def calls() -> None:
        if engine == "plain":
            if rank == victim:
                before(TorchCalls, "run", stop)
            for _ in range(2):  # torch may still complete the first when this rank goes on
                call(form, comm, engine=engine)
            return
        with disturb(victim, "signal", stop, nth=0):
            for _ in range(5):
                call(form, comm)

    seen = see(comm, calls)
    took = time.monotonic() - start
    os.kill(pids[victim], 18)  # SIGCONT
    comm.close()
    return seen, took


@pytest.mark.parametrize("engine", ["host", "plain"])
@pytest.mark.parametrize("form", ["all_gather_linear", "linear_all_reduce, two-shot"])
def test_a_stopped_rank_is_a_timeout(pools: Pools, form: str, engine: str) -> None:
    results = pools(3).run(stop_within, form, engine, 1, timeout_s=30)
    for rank in (0, 2):
        seen, took = results[rank]
        assert seen.error == "PeerTimeoutError"
        assert OPS[form] in seen.message
        assert "rank 0 waited 1 s" in seen.message or "rank 2 waited 1 s" in seen.message
        if engine == "host":
            assert "epoch" in seen.message and "of rank 1" in seen.message
        else:  # who is missing in torch's collective is not known: none must be blamed
            assert "of rank 0" not in seen.message and "of rank 2" not in seen.message
        assert 1.0 <= took < 1.0 + LIMIT_S
    assert results[1][0].error == "PeerTimeoutError"  # it went on, and was told


def leave(rank: int, how: str, form: str) -> Seen:
    """Rank 1 does its part of a call and goes; the others come to it late, and go on."""
    comm = fc.Communicator.of()
    call(form, comm)
    if rank == 1:
        call(form, comm)
        if how == "close":
            comm.close()
        elif how == "exit":
            sys.exit(0)
        elif how == "kill":
            die()
        return Seen("", "", 0, "")
    # The signal is sent, the answer not yet looked at: rank 1 is gone by then.
    before(waiting.Watch, "wait", partial(time.sleep, 0.5), 1 if "scatter" in form else 2)
    y = call(form, comm)
    assert right(form, comm, y)
    seen = see(comm, lambda: [call(form, comm) for _ in range(3)])
    comm.close()
    return seen


@pytest.mark.parametrize("how", ["close", "exit", "kill"])
@pytest.mark.parametrize(
    "form", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce, one-shot"]
)
def test_who_did_its_part_and_left_is_no_fault_until_it_is_missed(
    pools: Pools, form: str, how: str
) -> None:
    outcomes = pools(2).outcomes(leave, how, form, timeout_s=30)
    assert outcomes[0].fate == "returned", outcomes[0].details
    assert_lost([outcomes[0].value], 1, OPS[form])
    words = "closed its communicator" if how == "close" else "died"
    assert words in outcomes[0].value.message


def leave_a_child(rank: int, victim: int) -> Seen:
    """A forked child holds all its parent's descriptors, as a data loader's worker does."""
    comm = fc.Communicator.of()
    call("all_gather_linear", comm)
    if rank == victim:
        if os.fork() == 0:
            time.sleep(6)
            os._exit(0)
        die()
    grow = partial(call, "all_gather_linear", comm, scale=10000)  # waits at a socket
    return see(comm, grow if rank == 0 else lambda: call("linear_reduce_scatter", comm))


def test_death_is_noticed_though_a_child_lives_on(pools: Pools, record_property: Record) -> None:
    outcomes = pools(2).outcomes(leave_a_child, 1, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, "all_gather_linear")
    assert outcomes[0].value.at_ns - outcomes[1].at_ns < 5e9  # before the child ended
