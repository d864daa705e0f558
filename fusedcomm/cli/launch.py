"""Starts the rank processes of a command, streams their events, and leaves no process behind.

A command runs its function once per rank, each rank in a process of its own with ``gloo`` ready:

    def work(rank, emit, size):              # importable: it is sent by name
        emit("started")                      # any picklable value; reaches on_event in the parent
        return torch.ones(size).sum()        # comes back by value

    sums = launch(work, 3, 1000, on_event=lambda rank, event: print(rank, event))

Whatever happens, the processes are gone when ``launch`` returns or raises: a rank that fails takes
the others with it, Ctrl-C is the parent's to handle, and the kernel kills the ranks of a parent
that dies.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

Emit = Callable[[Any], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OTHERS_S = 0.5  # after the first failure: how long other ranks may add their own view of it
_EXIT_S = 5.0  # how long a rank may take to end before it is killed


class RankFailedError(RuntimeError):
    """A rank raised or died.

    ``failures`` maps each failed rank to its traceback or fate, the first failure first: the
    others mostly follow from it.
    """

    def __init__(self, failures: dict[int, str]):
        self.failures = failures
        (rank, text), *others = failures.items()
        lines = [f"rank {rank} failed:", text.rstrip()]
        lines += [f"then rank {r}: {t.rstrip().splitlines()[-1]}" for r, t in others]
        super().__init__("\n".join(lines))


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    on_event: Callable[[int, Any], None] | None = None,
    pin: bool = False,
    threads: int = 1,
    timeout_s: float | None = None,
) -> list[Any]:
    """Runs ``fn(rank, emit, *args)`` on ``world_size`` processes; returns the results by rank.

    fn        a function that can be imported by name; ``torch.distributed`` is initialised (gloo)
              when it is called, and ``emit(value)`` streams a value to ``on_event(rank, value)``,
              which is called in the parent, in order for each rank
    args      and the values returned or emitted are pickled: tensors travel by value
    pin       binds rank r to the r-th core this process may use, wrapping around
    threads   torch's threads in each rank
    timeout_s limit for the whole run in seconds; None: no limit

    Raises ``RankFailedError`` when a rank raises or dies and ``TimeoutError`` past the limit, after
    ending every rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = pickle.dumps((fn, args))
    cores = sorted(os.sched_getaffinity(0))
    processes: list[SpawnProcess] = []
    pipes: dict[connection.Connection, int] = {}
    resource_tracker.ensure_running()  # else the first start() does it, and unblocks SIGINT
    try:
        # Ranks inherit the blocked signal: Ctrl-C must not interrupt them while they still import.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                core = cores[rank % len(cores)] if pin else None
                place = (rank, world_size, store.port, os.getpid())
                process = context.Process(
                    target=_rank_main,
                    args=(*place, writer, payload, core, threads),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                writer.close()  # the rank's copy is now the only one: its death ends the stream
                processes.append(process)
                pipes[reader] = rank
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        results = _collect(processes, pipes, on_event, deadline)
        for process in processes:
            process.join(_EXIT_S)
        return results
    finally:
        for reader in pipes:
            reader.close()
        for process in processes:
            process.kill()  # not SIGTERM: a rank may sit in a native call for long
        for process in processes:
            process.join()
            process.close()


def _collect(
    processes: list[SpawnProcess],
    pipes: dict[connection.Connection, int],
    on_event: Callable[[int, Any], None] | None,
    deadline: float | None,
) -> list[Any]:
    """Receives until every rank gave its result; raises once a rank failed."""
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}  # when it failed, and how
    open_pipes = dict(pipes)
    while open_pipes:
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(open_pipes), limit)
        if not ready:
            if failures:
                break
            unfinished = sorted(open_pipes.values())
            raise TimeoutError(f"ranks {unfinished} did not finish within the time limit")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                del open_pipes[pipe]
                if rank not in results and rank not in failures:
                    failures[rank] = (0.0, _fate(processes[rank]))  # a death is always a cause
            else:
                if kind == "event" and on_event is not None:
                    on_event(rank, value)
                elif kind == "result":
                    results[rank] = value
                elif kind == "error":
                    failures[rank] = value
        if failures and (deadline is None or deadline > time.monotonic() + _OTHERS_S):
            deadline = time.monotonic() + _OTHERS_S
    if failures:
        order = sorted(failures, key=lambda rank: failures[rank])
        raise RankFailedError({rank: failures[rank][1] for rank in order})
    return [results[rank] for rank in range(len(processes))]


def _fate(process: SpawnProcess) -> str:
    process.join(_EXIT_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended without a result (exit code {code})"


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    parent: int,
    pipe: connection.Connection,
    payload: bytes,
    core: int | None,
    threads: int,
) -> None:
    """The whole life of one rank process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(threads)

    def send(kind: str, value: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))

    try:
        # All ranks are on this machine, whose host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)),
            rank=rank,
            world_size=world_size,
        )
        fn, args = pickle.loads(payload)
        result = fn(rank, lambda value: send("event", value), *args)
        dist.barrier()  # no rank's memory goes while another still works on it
        dist.destroy_process_group()
        send("result", result)
    except Exception:  # the parent gets every failure, and raises it
        send("error", (time.monotonic(), traceback.format_exc()))
        pipe.close()
        os._exit(1)  # not through finalisers that wait for peers which now die
    pipe.close()
