"""MPI beside the benchmark's ranks, where mpi4py and mpirun are installed.

Every rank has an MPI rank of its own, a process on the same core, to which it talks over a socket;
rank 0 starts them all.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from typing import Any

import torch.distributed as dist

from fusedcomm.benchmarks.harness import Ranks

_START_S = 60.0
_WORKER = "fusedcomm.benchmarks._collectives.mpi_worker"


def is_installed() -> bool:
    """Whether there is an MPI to compare with."""
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


class Partner:
    """This rank's MPI rank. Made on all ranks together."""

    def __init__(self, ranks: Ranks) -> None:
        tokens = [f"fusedcomm-bench-{secrets.token_hex(8)}"]
        dist.broadcast_object_list(tokens, src=0)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{tokens[0]}-{ranks.rank}")
        listener.listen(1)
        listener.settimeout(_START_S)
        dist.barrier()
        self._process = _start(tokens[0], ranks.world_size) if ranks.rank == 0 else None
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise RuntimeError(
                f"MPI did not start within {_START_S:g} s; try: mpirun -n {ranks.world_size} true"
            ) from error
        finally:
            listener.close()
        connection.setblocking(True)
        self._connection = connection
        self._stream = connection.makefile("rw")
        atexit.register(self.close)

    def prepare(self, op: str, count: int, calls: int) -> float:
        """Have inputs of ``count`` elements made and the call tried; returns its error.

        It will be made ``calls`` times in a row.
        """
        answer = self._ask(op=op, count=count, calls=calls)
        return float(answer["error"])

    def call(self, at_ns: int) -> tuple[int, int]:
        """Have the call made at ``at_ns``; begin and end, on the clock that all share."""
        answer = self._ask(at_ns=at_ns)
        return answer["begin"], answer["end"]

    def _ask(self, **order: Any) -> dict[str, Any]:
        self._stream.write(json.dumps(order) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError("the MPI rank is gone; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        """Hang up, at which the MPI ranks end."""
        self._stream.close()
        self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _start(token: str, world_size: int) -> subprocess.Popen[bytes]:
    command = ["mpirun", "-n", str(world_size), "--bind-to", "none"]
    if world_size > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    # mpirun must not think that it is a rank of something, nor bind the workers to this one's core.
    return subprocess.Popen(
        [*_all_cores(), *command, sys.executable, "-m", _WORKER, token],
        stdin=subprocess.DEVNULL,
        # NumPy asks for huge pages, torch does not: what is compared must lie in pages alike.
        env={**os.environ, "OMP_NUM_THREADS": "1", "NUMPY_MADVISE_HUGEPAGE": "0"},
    )


def _all_cores() -> list[str]:
    """What gives a program back all cores, of which this process has kept one."""
    tool = shutil.which("taskset")
    return [tool, "-c", f"0-{(os.cpu_count() or 1) - 1}"] if tool else []
