"""One rank fails and lives: the others are told why, in bounded time, and all can begin anew."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest

import fusedcomm as fc
from fusedcomm.testing import RankPool, disturb
from fusedcomm.testing.disturb import EVENTS
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    LIMIT_S,
    OPS,
    REASON,
    WAYS_TO_WAIT,
    Record,
    Seen,
    Stumbled,
    assert_told,
    assert_works,
    before,
    call,
    right,
    see,
    stumble,
    wait_for_all,
)


def renew(pool: RankPool, how: str) -> None:
    """Where a collective of torch was begun by some ranks only, its group is of no use any more."""
    if how == "a plain operation":
        pool.restart()


def raise_between_calls(rank: int, how: str) -> Seen:
    comm = fc.Communicator.of()
    call("all_gather_linear", comm)
    call("linear_reduce_scatter", comm)
    if rank == 1:
        raise LookupError(REASON)  # run_ranks and pools abort for it
    return see(comm, partial(wait_for_all, comm, how))


@pytest.mark.parametrize("how", WAYS_TO_WAIT)
def test_user_code_that_raises(pools: Pools, record_property: Record, how: str) -> None:
    outcomes = pools(3).outcomes(raise_between_calls, how, timeout_s=30)
    assert isinstance(outcomes[1].error, LookupError)
    for rank in (0, 2):
        assert_told(outcomes[rank].value, "AbortedError", REASON, "rank 1", "LookupError")
    took = max(outcomes[rank].value.at_ns for rank in (0, 2)) - outcomes[1].at_ns
    record_property("noticed_s", round(took / 1e9, 3))
    assert took / 1e9 < LIMIT_S


def abort_from_a_thread(rank: int, how: str, aborting: int) -> Seen:
    """Rank 1 never comes; ``aborting`` is it, or one of those that wait for it."""
    with fc.Communicator.of() as comm:
        call("all_gather_linear", comm)
        if rank == aborting:
            threading.Timer(0.2, comm.abort, [REASON]).start()
        if rank == 1:
            time.sleep(0.5)
        # For who comes late, a call may still have all that it needs; the next has not.
        seen = see(comm, lambda: [wait_for_all(comm, how) for _ in range(2)])
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen


@pytest.mark.parametrize("aborting", [0, 1])
@pytest.mark.parametrize("how", WAYS_TO_WAIT)
def test_abort_from_another_thread(pools: Pools, how: str, aborting: int) -> None:
    pool = pools(3)
    results = pool.run(abort_from_a_thread, how, aborting, timeout_s=30)
    renew(pool, how)
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", REASON, f"rank {aborting}")
    assert results[1].error in ("ClosedError", "AbortedError")
    assert REASON in results[1].message


def close_from_a_thread(rank: int, how: str) -> tuple[Seen, float]:
    with fc.Communicator.of() as comm:
        call("all_gather_linear", comm)
        comm.barrier()
        if rank == 0:
            threading.Timer(0.2, comm.close).start()
        else:
            time.sleep(0.5)
        start = time.monotonic()
        seen = see(comm, lambda: [wait_for_all(comm, how) for _ in range(2)])
        took = time.monotonic() - start
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen, took


@pytest.mark.parametrize("how", WAYS_TO_WAIT)
def test_close_from_another_thread_ends_a_wait(pools: Pools, how: str) -> None:
    pool = pools(2)
    results = pool.run(close_from_a_thread, how, timeout_s=30)
    renew(pool, how)
    seen, took = results[0]
    assert seen.error == "ClosedError" and "closed" in seen.message, seen
    assert took < LIMIT_S
    assert results[1][0].error == "PeerLostError"
    assert "rank 0 closed its communicator" in results[1][0].message


def raise_within(rank: int, form: str, event: str, error: type[BaseException]) -> Seen | str:
    with fc.Communicator.of() as comm:
        for _ in range(2):
            call(form, comm)

        def calls() -> None:
            with disturb(1, event, partial(stumble, error), nth=1):
                for _ in range(4):
                    assert right(form, comm, call(form, comm))

        seen = None
        if rank != 1:
            seen = see(comm, calls)
        else:
            with pytest.raises(error, match=REASON):
                calls()
            with pytest.raises(fc.ClosedError, match=f"rank 1 .*{error.__name__}.*{REASON}"):
                comm.barrier()
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen


@pytest.mark.parametrize("error", [Stumbled, KeyboardInterrupt])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("form", ["all_gather_linear", "linear_all_reduce, two-shot"])
def test_a_rank_that_raises_within_a_call(
    pools: Pools, form: str, event: str, error: type[BaseException]
) -> None:
    results = pools(3).run(raise_within, form, event, error, timeout_s=30)
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", error.__name__, REASON)


def raise_within_plain(rank: int) -> Seen | None:
    """The others are in torch's collective by then, where nothing can be told to them but by us."""
    with fc.Communicator.of() as comm:
        call("all_gather_linear", comm, engine="plain")
        work = partial(call, "all_gather_linear", comm, engine="plain")
        if rank != 1:
            return see(comm, work)
        before(comm.torch, "run", partial(stumble, Stumbled))
        with pytest.raises(Stumbled):
            work()
        return None


def test_a_rank_that_raises_within_a_plain_call(pools: Pools) -> None:
    pool = pools(3)
    results = pool.run(raise_within_plain, timeout_s=30)
    pool.restart()  # torch's own group is of no use any more
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", "Stumbled", REASON)


def interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt(REASON)


def interrupt_a_wait(rank: int, how: str) -> Seen | None:
    with fc.Communicator.of() as comm:
        call("all_gather_linear", comm)
        seen = None
        if rank == 1:
            previous = signal.signal(signal.SIGUSR2, interrupted)
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR2]).start()
            with pytest.raises(KeyboardInterrupt):
                wait_for_all(comm, how)
            signal.signal(signal.SIGUSR2, previous)
        else:
            if rank == 0:
                time.sleep(0.5)
            seen = see(comm, lambda: [wait_for_all(comm, how) for _ in range(2)])
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen


@pytest.mark.parametrize("how", WAYS_TO_WAIT)
def test_a_wait_that_is_interrupted(pools: Pools, how: str) -> None:
    pool = pools(3)
    results = pool.run(interrupt_a_wait, how, timeout_s=30)
    renew(pool, how)
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", "KeyboardInterrupt", REASON)


def work_under_signals(rank: int) -> None:
    """Harmless signals come all the time, as from a profiler: no system call may end early."""
    signals = 0

    def count(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1

    previous = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        for scale in (1, 10, 100, 1000):
            with fc.Communicator.of() as comm:
                for _ in range(3):
                    for form in OPS:
                        assert right(form, comm, call(form, comm, scale=min(scale, 40)))
                comm.symmetric_empty(scale << 10)
                comm.barrier()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert signals > 10


def test_signals_disturb_nothing(pools: Pools) -> None:
    pools(3).run(work_under_signals, timeout_s=60)


def fail_on_one_channel(rank: int) -> Seen:
    with fc.Communicator.of(channel="a") as a, fc.Communicator.of(channel="b") as b:
        assert_works(a)
        assert_works(b)
        seen = see(a, lambda: call(list(OPS)[rank], a))
        assert_works(b)
    return seen


def test_a_failure_leaves_other_channels_alone(pools: Pools) -> None:
    for seen in pools(2).run(fail_on_one_channel, timeout_s=30):
        assert seen.error == "MismatchError"
