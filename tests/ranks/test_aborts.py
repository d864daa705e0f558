"""One rank fails and lives: the others are told why, in bounded time, and all can begin anew."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm import rendezvous
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from fusedcomm.testing import RankPool, disturb
from fusedcomm.testing.disturb import EVENTS
from tests.ranks.fault_calls import OPS, Seen, before, call, right, see

Pools = Callable[..., RankPool]
Record = Callable[[str, object], None]

LIMIT_S = 10.0
REASON = "told on purpose"

_PR_SET_DUMPABLE = 4  # linux/prctl.h

WAYS_TO_WAIT = (
    "an operation",
    "its backward pass",
    "a plain operation",
    "barrier",
    "symmetric_empty",
    "growth",
)


def wait_for_all(comm: fc.Communicator, how: str) -> None:
    """Does what no rank can finish alone."""
    if how == "barrier":
        comm.barrier()
    elif how == "symmetric_empty":
        comm.symmetric_empty(10)
    elif how == "growth":
        call("all_gather_linear", comm, scale=5000)
    elif how == "its backward pass":
        x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
        fc.replicated_linear(x, weight, group=comm).sum().backward()
    else:
        call("linear_reduce_scatter", comm, engine="plain" if "plain" in how else "auto")


def assert_works(comm: fc.Communicator) -> None:
    for form in OPS:
        assert right(form, comm, call(form, comm))


def assert_told(seen: Seen, error: str, *words: str) -> None:
    assert seen.error == error, seen
    assert all(word in seen.message for word in words), seen
    assert seen.after.startswith("ClosedError") and seen.message in seen.after, seen


def renew(pool: RankPool, how: str) -> None:
    """Where a collective of torch was begun by some ranks only, its group is of no use any more."""
    if how == "a plain operation":
        pool.restart()


# Between calls


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


# In the middle of a call


class Stumbled(Exception):  # noqa: N818
    pass


def stumble(error: type[BaseException]) -> None:
    raise error(REASON)


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
        before(comm, "run_torch", partial(stumble, Stumbled))
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


# Out of memory, out of descriptors


@contextmanager
def limit(kind: int, value: int) -> Any:
    """A soft limit of this process."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def short_of_memory(rank: int, how: str) -> Seen | str:
    with fc.Communicator.of() as comm:
        if how == "growth":
            call("all_gather_linear", comm)
        comm.barrier()
        work = partial(wait_for_all, comm, how)
        if rank == 1:
            with limit(resource.RLIMIT_FSIZE, 2048):
                seen = see(comm, work)
        else:
            seen = see(comm, work)
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen


@pytest.mark.parametrize("how", ["an operation", "its backward pass", "symmetric_empty", "growth"])
def test_out_of_shared_memory(pools: Pools, how: str) -> None:
    results = pools(3).run(short_of_memory, how, timeout_s=30)
    assert_told(results[1], "SharedMemoryError", "bytes of shared memory", "File too large")
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", "bytes of shared memory")


def short_of_memory_at_once(rank: int) -> Seen:
    """The rank that lacks memory closes at once: the others may find only its closed sockets."""
    with fc.Communicator.of() as comm:
        comm.barrier()
        if rank == 1:
            with limit(resource.RLIMIT_FSIZE, 2048), pytest.raises(fc.SharedMemoryError) as caught:
                comm.symmetric_empty(1000)
            comm.close()
            return Seen("SharedMemoryError", str(caught.value), 0, "")
        time.sleep(0.3)
        return see(comm, lambda: comm.symmetric_empty(1000))


def test_the_reason_outlives_the_connection(pools: Pools) -> None:
    results = pools(3).run(short_of_memory_at_once, timeout_s=30)
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", "bytes of shared memory")


def short_of_descriptors(rank: int, spare: int) -> Seen:
    with fc.Communicator.of() as comm:
        call("all_gather_linear", comm)  # torch imports what it needs at the first call
        comm.barrier()
        work = partial(call, "linear_reduce_scatter", comm)
        if rank == 1:
            highest = max(int(entry) for entry in os.listdir("/proc/self/fd"))
            fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]
            lowest_free = os.dup(0)
            os.close(lowest_free)
            with limit(resource.RLIMIT_NOFILE, lowest_free + spare):
                seen = see(comm, work)
            for filler in fillers:
                os.close(filler)
        else:
            seen = see(comm, work)
    with fc.Communicator.of() as comm:
        assert_works(comm)
    return seen


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_out_of_file_descriptors(pools: Pools, spare: int) -> None:
    """Which step lacks one depends on how many are left."""
    results = pools(3).run(short_of_descriptors, spare, timeout_s=30)
    assert_told(results[1], "SharedMemoryError", "shared memory")
    for rank in (0, 2):
        assert_told(results[rank], "AbortedError", "rank 1", "shared memory")


def descriptors_under_way(rank: int) -> None:
    """The kernel lets a user without privileges have only so many descriptors under way.

    Many ranks that make a communicator at once reach that limit. Here another part of the program
    does, and what it sent is received a little later.
    """
    if rank == 1:
        libc = ctypes.CDLL(None)
        os.setresuid(65534, 65534, 65534)
        assert libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) == 0  # else /proc/self is root's
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
    comm = None
    for make in ("communicator", "workspace"):
        if rank == 1:
            sender, receiver = socket.socketpair()
            socket.send_fds(sender, [b"many"], [0] * 200)
            with pytest.raises(OSError, match="Too many references"):
                socket.send_fds(sender, [b"one"], [0])
            threading.Timer(0.3, receiver.close).start()
        if make == "communicator":
            comm = fc.Communicator.of(timeout_s=20)
        assert comm is not None
        assert right("all_gather_linear", comm, call("all_gather_linear", comm))
    assert_works(comm)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that has nothing open")
def test_too_many_descriptors_under_way(pools: Pools) -> None:
    pool = pools(3)
    try:
        pool.run(descriptors_under_way, timeout_s=40)
    finally:
        pool.restart()


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


# As a communicator is made

MAKING = {
    "as it connects": (rendezvous, "open_connection", 0),
    "as it allocates its block": (Segment, "create", 0),
    "as it sends its block": (Links, "send", 1),
    "as it maps the first block": (Segment, "attach", 0),
    "as it maps the last block": (Segment, "attach", 1),
}


def fail_in_making(rank: int, point: str, error: type[BaseException]) -> str:
    """Who finds the fault later than in the making, finds it in the first call."""
    message = ""
    if rank == 1:
        owner, name, nth = MAKING[point]
        original = owner.__dict__[name]
        before(owner, name, partial(stumble, error), nth)
        with pytest.raises(error):
            fc.Communicator.of()
        setattr(owner, name, original)
    else:
        with pytest.raises(fc.AbortedError) as caught:
            fc.Communicator.of(timeout_s=20).barrier()
        message = str(caught.value)
        for comm in fc.Communicator.live():
            comm.close()
    dist.barrier()  # rank 1 does not try again before the others were told
    with fc.Communicator.of(timeout_s=20) as comm:
        assert_works(comm)
    return message


@pytest.mark.parametrize("error", [fc.SharedMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("point", MAKING)
def test_a_communicator_that_one_rank_cannot_make(
    pools: Pools, point: str, error: type[BaseException]
) -> None:
    results = pools(3).run(fail_in_making, point, error, timeout_s=60)
    for rank in (0, 2):
        assert all(word in results[rank] for word in ("rank 1", error.__name__, REASON))


def come_late(rank: int) -> list[str]:
    """The others give up before rank 1 comes; when all try again, they meet."""
    tries = []
    if rank == 1:
        time.sleep(1.0)
    limit_s = time.monotonic() + 20
    while time.monotonic() < limit_s:
        try:
            comm = fc.Communicator.of(timeout_s=0.3 if not tries and rank != 1 else 3.0)
            comm.barrier()
        except fc.FusedcommError as error:
            tries.append(type(error).__name__)
            for open_one in fc.Communicator.live():
                open_one.close()
            continue
        assert_works(comm)
        comm.close()
        return tries
    raise AssertionError(f"never met: {tries}")


def test_ranks_that_gave_up_meet_again(pools: Pools) -> None:
    results = pools(3).run(come_late, timeout_s=60)
    assert results[0][0] == results[2][0] == "PeerTimeoutError"
