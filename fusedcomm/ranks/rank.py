"""The life of one rank of a pool: join the group, then call what the pool sends, one by one."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.communicator import Communicator
from fusedcomm.ranks.outcomes import Outcome, RemoteError
from fusedcomm.ranks.request import Event, Request
from fusedcomm.ranks.wire import Channel, dumps

#: On this signal a rank writes the stacks of all its threads into its stacks file.
STACKS_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bind_to_parent(pid: int) -> None:
    """Has the kernel kill this process when its parent, ``pid``, dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != pid:
        os._exit(1)  # it died before the call above


def serve(
    rank: int, world_size: int, store: int, channel: int, stacks: int, threads: int, pin: bool
) -> int:
    """Carries out the pool's requests until it goes away; returns the process's exit code.

    ``store``, ``channel`` and ``stacks`` are descriptors: an empty file for the group's store, a
    socket to the pool, and a file for this rank's stacks. ``threads`` and ``pin`` as in the pool.
    """
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(threads)

    def join() -> None:
        # All ranks inherited this descriptor under this number. A store in a file without a name
        # leaves nothing behind, needs no port, and does not die with the rank that would hold it.
        file_store = dist.FileStore(f"/proc/self/fd/{store}", world_size)
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size)

    pool = Channel(socket.socket(fileno=channel))

    def emit(value: Any) -> None:
        pool.send(dumps(Event(value)))

    try:
        pool.send(_outcome(rank, join))
        while True:
            request: Request = pickle.loads(pool.receive())
            torch.manual_seed(0)  # a test's data must not depend on which tests ran before it
            pool.send(_outcome(rank, partial(request.carry_out, rank, emit)))
    except SystemExit as leaving:
        return _exit_code(leaving)
    except (EOFError, ConnectionError):
        return 0


def _outcome(rank: int, work: Callable[[], Any]) -> bytes:
    """How ``work()`` ended, pickled. ``SystemExit`` passes: it ends the rank."""
    try:
        value = work()
        return dumps(Outcome(rank, "returned", time.monotonic_ns(), value=value))
    except SystemExit:
        raise
    except BaseException as error:
        at_ns = time.monotonic_ns()
        details = _release_peers(rank, error)
        return dumps(Outcome(rank, "raised", at_ns, error=_portable(error), details=details))
    finally:
        sys.stdout.flush()  # what it printed appears before the pool returns
        sys.stderr.flush()


def _release_peers(rank: int, error: BaseException) -> str:
    """Makes the waits of the other ranks raise; returns the traceback to report."""
    frames = error.__traceback__
    beyond_ours = frames.tb_next if frames else None
    lines = traceback.format_exception(type(error), error, beyond_ours)
    for communicator in Communicator.live():
        try:
            communicator.abort(f"rank {rank} raised {type(error).__name__}: {error}")
        except Exception:
            lines += ["\nand then, as its communicator was aborted:\n", traceback.format_exc()]
    return "".join(lines)


def _portable(error: BaseException) -> BaseException:
    """The error itself, or a stand-in for one that does not survive pickling."""
    try:
        pickle.loads(dumps(error))
    except Exception:
        return RemoteError(f"{type(error).__qualname__}: {error}")
    return error


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1
