"""The MPI rank beside each rank of the benchmark: ``mpirun … python -m … TOKEN``.

It waits for orders in a blocking read, so that it takes no core while others are measured, and
takes its own times: what lies between the order and the call is no part of a sample. Orders and
answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: Sums of float32 inputs of unit variance, in whatever order.
BOUND = 1e-6


def values(seed: int, rank: int, count: int) -> np.ndarray:
    """A rank's input."""
    return np.random.default_rng([seed, rank]).standard_normal(count, dtype=np.float32)


def prepare(comm: Any, op: str, count: int) -> tuple[Callable[[], None], float]:
    """The call on inputs and outputs that are there, and its error when it was tried.

    Args:
        count: elements of the full tensor.
    """
    right: Any
    size, rank = comm.size, comm.rank
    part = count // size
    everyone = range(size)
    if op == "all_gather":
        x, y = values(1, rank, part), np.empty(count, np.float32)
        call = lambda: comm.Allgather(x, y)  # noqa: E731
        right = np.concatenate([values(1, r, part) for r in everyone])
    else:
        x = values(1, rank, count)
        inputs = [values(1, r, count) for r in everyone]
        own = slice(rank * part, (rank + 1) * part)
        if op == "all_to_all":
            y = np.empty(count, np.float32)
            call = lambda: comm.Alltoall(x, y)  # noqa: E731
            right = np.concatenate([one[own] for one in inputs])
        elif op == "reduce_scatter":
            y = np.empty(part, np.float32)
            call = lambda: comm.Reduce_scatter_block(x, y)  # noqa: E731
            right = np.sum([one[own] for one in inputs], axis=0, dtype=np.float64)
        else:
            y = np.empty(count, np.float32)
            call = lambda: comm.Allreduce(x, y)  # noqa: E731
            right = np.sum(inputs, axis=0, dtype=np.float64)
    call()
    error = np.linalg.norm(y - right) / np.linalg.norm(right)
    return call, float(error)


def main(token: str) -> None:
    """Serve the benchmark's rank of the same number until it hangs up."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{token}-{comm.rank}")
    with connection, connection.makefile("rw") as stream:
        call: Callable[[], None] = comm.Barrier
        calls = 1
        for line in stream:
            order = json.loads(line)
            if "op" in order:
                call, error = prepare(comm, order["op"], order["count"])
                calls = order["calls"]
                answer = {"error": error, "version": MPI.Get_library_version().split(",")[0]}
            else:
                while (begin := time.perf_counter_ns()) < order["at_ns"]:
                    os.sched_yield()
                for _ in range(calls):
                    call()
                answer = {"begin": begin, "end": time.perf_counter_ns()}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
