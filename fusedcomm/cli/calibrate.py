"""``python -m fusedcomm bench --calibrate``: measures this machine's links, kept in a file.

Two kinds are measured, between ranks on this machine's CPU: shared memory, by the all-reduces that
the choice is between, and gloo over TCP, which is what joins domains. The constants of
``fusedcomm.topology.cost`` are fitted to the times by least squares of the relative error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.benchmarks.harness import machine as machines
from fusedcomm.benchmarks.harness.stats import median
from fusedcomm.cli import show
from fusedcomm.ranks import RankError, launch
from fusedcomm.topology import Link, calibration
from fusedcomm.topology.links import SHARED_MEMORY, TCP

#: Bytes of the tensors that are timed.
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: Seconds of calls for each size and algorithm, and the fewest calls.
_SECONDS, _QUICK_SECONDS, _LEAST = 0.5, 0.05, 7


class Sample(NamedTuple):
    """The time of one call of an algorithm; see the table in ``fusedcomm.topology.cost``.

    Attributes:
        latencies, moved, added: how often a, and how many bytes over B and over R, are in it.
        seconds: what was measured.
    """

    algorithm: str
    nbytes: int
    latencies: float
    moved: float
    added: float
    seconds: float


def run(ranks: int, quick: bool) -> int:
    """Measure, fit, write the file and report; returns the exit code."""
    if ranks < 2:
        print("a link has two ends: --ranks must be at least 2")
        return 2
    description = machines.describe()
    with show.progress(2 * len(SIZES) + len(SIZES), "calibrate") as display:
        done = 0

        def on_event(rank: int, event: Any) -> None:
            nonlocal done
            if rank == 0:
                done += 1
                display.update(done, str(event))

        try:
            shared, tcp = launch(measure, ranks, quick, on_event=on_event, pin=True)[0]
        except RankError as failure:
            print(failure)
            return 1
    links = {SHARED_MEMORY.kind: fit(SHARED_MEMORY.kind, shared), TCP.kind: fit(TCP.kind, tcp)}
    rows = []
    for kind, samples in ((SHARED_MEMORY.kind, shared), (TCP.kind, tcp)):
        for sample in samples:
            predicted = predicted_seconds(sample, links[kind])
            rows.append(
                [
                    f"{kind}, {sample.algorithm}, {sample.nbytes} bytes",
                    f"{sample.seconds * 1e6:.1f}",
                    f"{predicted * 1e6:.1f}",
                ]
            )
    print(machines.summary(description))
    show.table(f"{ranks} ranks", ["link, algorithm, size", "measured, µs", "fitted, µs"], rows)
    for link in links.values():
        rate = "" if link.reduce_rate is None else f", adds {link.reduce_rate / 1e9:.3g} GB/s"
        print(f"{link}{rate}")
    file = calibration.save(links, {**description, "ranks": ranks})
    print(f"written to {file}; communicators made from now on use it")
    return 0


def measure(
    rank: int, emit: Callable[[Any], None], quick: bool
) -> tuple[list[Sample], list[Sample]]:
    """The samples of both kinds of link; equal on all ranks."""
    comm = fc.Communicator.of()
    n = comm.world_size
    budget = _QUICK_SECONDS if quick else _SECONDS
    shared, tcp = [], []
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4)
        out = torch.empty_like(x)
        for algorithm in ("one_shot", "two_shot"):
            emit(f"{algorithm}, {nbytes} bytes")

            def all_reduce(algorithm: str = algorithm) -> None:
                fc.all_reduce(x, group=comm, algorithm=algorithm, out=out)  # noqa: B023

            seconds = _time(all_reduce, budget)
            part = (n - 1) / n * nbytes
            if algorithm == "one_shot":
                terms = (1.0, (n - 1.0) * nbytes, (n - 1.0) * nbytes)
            else:
                terms = (2.0, 2 * part, part)
            shared.append(Sample(algorithm, nbytes, *terms, seconds))
        emit(f"gloo, {nbytes} bytes")
        own = x[: x.numel() // n]
        gathered = [torch.empty_like(own) for _ in range(n)]
        seconds = _time(lambda: dist.all_gather(gathered, own), budget)  # noqa: B023
        moved = (n - 1.0) * own.nbytes
        tcp.append(Sample("gloo's all-gather", nbytes, n - 1.0, moved, 0.0, seconds))
    comm.close()
    return shared, tcp


def _time(call: Callable[[], Any], budget: float) -> float:
    """The median time of a call, in seconds; the slowest rank's."""
    for _ in range(3):
        call()
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    counted = torch.tensor([max(_LEAST, int(budget / (time.perf_counter() - start)))])
    dist.broadcast(counted, 0)
    times = []
    for _ in range(int(counted)):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([median(times)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def fit(kind: str, samples: Sequence[Sample]) -> Link:
    """The link whose predicted times are nearest to the samples, in relative terms.

    A term that would come out negative is left out, as no such thing costs less than nothing.
    """
    terms = np.array([[s.latencies, s.moved, s.added] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    scaled = terms / seconds[:, None]
    used = [column for column in range(3) if terms[:, column].any()]
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(samples)), rcond=None)
        if (found > 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(found)))
    costs = dict(zip(used, (float(value) for value in found), strict=True))
    # What is too small to be seen: a nanosecond, a terabyte a second.
    latency, per_byte, per_added = (costs.get(column, 0.0) for column in range(3))
    return Link(
        kind,
        bandwidth=1 / max(per_byte, 1e-12),
        latency_s=max(latency, 1e-9),
        reduce_rate=1 / per_added if per_added > 0 else None,
    )


def predicted_seconds(sample: Sample, link: Link) -> float:
    """What a link makes of a sample's terms."""
    added = 0.0 if link.reduce_rate is None else sample.added / link.reduce_rate
    return sample.latencies * link.latency_s + sample.moved / link.bandwidth + added
