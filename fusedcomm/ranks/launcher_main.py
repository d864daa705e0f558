"""What the process that starts a pool's ranks runs; ``launcher.py`` is its other end.

A rank needs torch, and importing it costs a second or more of processor time per process. So a pool
starts one process, this one, in a new interpreter with the environment that the ranks shall have;
it imports torch and fusedcomm once and forks the ranks. They are ready in some ten milliseconds,
and so are the next ones, when these were killed.

Forking is safe because this process has one thread (it has run no torch operation, and OpenMP and
OpenBLAS are told to start none) and has touched no GPU. Forking the user's own process would be
neither. Modules that the pool's caller wants every rank to have are imported here too, under the
same condition.

Nobody survives whom. This process watches the pool's process and ends its ranks when that dies; it
is their parent, and the kernel kills them when it dies. All of them ignore SIGINT, which a terminal
sends to everyone: Ctrl-C is the pool's to handle.

    pool's process --(control socket, pidfd)-- launcher --(fork, PDEATHSIG, pidfd)-- ranks

Messages on the control socket are JSON objects, one a packet. To the launcher::

    {"do": "fork", "world_size": W, "threads": t, "pin": p}
                                      with 1 + 2 W descriptors: the store's file, then for each rank
                                      its channel and the file for its stacks
    {"do": "signal", "rank": r, "number": n}
    {"do": "kill"}                    all ranks

and from it ``{"ready": true}`` once, and for every rank that ended
``{"rank": r, "exit_code": c, "at_ns": t}``.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Seconds of import that the first custom op would cost every rank anew.
import torch._dynamo  # noqa: F401

from fusedcomm.ranks.launcher import DESCRIPTORS, PACKET
from fusedcomm.ranks.rank import bind_to_parent, serve


def main(control_descriptor: int, pool_pid: int, preload: Sequence[str]) -> None:
    """The launcher's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see Launcher
    pool = os.pidfd_open(pool_pid)
    if os.getppid() != pool_pid:
        return  # it died before we could watch it
    sys.argv = ["rank"]
    try:
        _import(preload)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: the interpreter would wait for what threads there are
    control = socket.socket(fileno=control_descriptor)
    control.send(json.dumps({"ready": True}).encode())
    _Launcher(control, pool).run()
    os._exit(0)  # taking torch down tidily costs a second and gains nothing


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(f"importing {module} starts threads: ranks cannot be forked then")


class _Launcher:
    def __init__(self, control: socket.socket, pool: int) -> None:
        self._control = control
        self._pool = pool
        self._ranks: dict[int, tuple[int, int]] = {}  # pidfd: (rank, pid)

    def run(self) -> None:
        try:
            while True:
                control = self._control.fileno()
                ready, _, _ = select.select([control, self._pool, *self._ranks], [], [])
                for descriptor in set(ready) & set(self._ranks):
                    self._reap(descriptor)
                if self._pool in ready:
                    return
                if control in ready:
                    packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, DESCRIPTORS)
                    if not packet:
                        return
                    self._obey(json.loads(packet), descriptors)
        finally:
            self._kill()

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message["do"] == "fork":
            store, *pairs = descriptors
            for rank in range(message["world_size"]):
                # Closed at once, so that no other rank holds a channel open that this one leaves.
                channel, stacks = pairs[2 * rank : 2 * rank + 2]
                settings = message["threads"], message["pin"]
                self._fork(rank, message["world_size"], store, channel, stacks, *settings)
                os.close(channel)
                os.close(stacks)
            os.close(store)
        elif message["do"] == "signal":
            for rank, pid in self._ranks.values():
                if rank == message["rank"]:
                    os.kill(pid, message["number"])
        elif message["do"] == "kill":
            self._kill()

    def _fork(
        self,
        rank: int,
        world_size: int,
        store: int,
        channel: int,
        stacks: int,
        threads: int,
        pin: bool,
    ) -> None:
        launcher_pid = os.getpid()
        pid = os.fork()
        if pid != 0:
            self._ranks[os.pidfd_open(pid)] = (rank, pid)
            return
        code = 1
        try:
            bind_to_parent(launcher_pid)
            self._control.close()
            for descriptor in (self._pool, *self._ranks):
                os.close(descriptor)
            code = serve(rank, world_size, store, channel, stacks, threads, pin)
        except BaseException:
            traceback.print_exc()
        finally:
            # Never back into the launcher's own frames, whatever happened above.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _kill(self) -> None:
        for _, pid in self._ranks.values():
            os.kill(pid, signal.SIGKILL)
        for descriptor in list(self._ranks):
            self._reap(descriptor)

    def _reap(self, descriptor: int) -> None:
        rank, pid = self._ranks.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        message = {"rank": rank, "exit_code": code, "at_ns": time.monotonic_ns()}
        with suppress(ConnectionError):  # the pool is gone and needs no news; run() sees it too
            self._control.send(json.dumps(message).encode())
