"""One rank gets no more memory or descriptors: it says so, the others say which rank it was."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
import time
from functools import partial

import pytest

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    OPS,
    Seen,
    assert_told,
    assert_works,
    call,
    limit,
    right,
    see,
    wait_for_all,
)


def short_of_memory(rank: int, how: str) -> Seen | str:
    for old in fc.Communicator.live():
        old.close()  # a test before this one may have left it large workspaces
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


_PR_SET_DUMPABLE = 4  # linux/prctl.h


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


def work_among_many_files(rank: int) -> None:
    """Descriptors above 1023, which select() cannot wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1200)]
    try:
        with fc.Communicator.of() as comm:
            for form in OPS:
                assert right(form, comm, call(form, comm))
            assert right("linear_all_reduce", comm, call("linear_all_reduce", comm, engine="plain"))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_than_1024_files(pools: Pools) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1500:
        pytest.skip("this machine allows fewer than 1500 open files")
    pools(2).run(work_among_many_files)
