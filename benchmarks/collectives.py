"""All-reduce, all-gather, reduce-scatter, all-to-all against gloo and MPI, 1 KB to 64 MB.

The paths of a case, each with its output allocated before (S is the bytes of the full tensor):

    fusedcomm             the library's function on a tensor of its own
    fusedcomm, symmetric  the same on a symmetric tensor: peers read the input where it is
    gloo                  torch.distributed's collective on gloo; its all-reduce in place
    copies                what memory allows: a rank's own copies and sums of a private tensor, with
                          nobody waited for; see ``_collectives.copies``
    MPI                   the same in MPI's shared memory, where mpi4py and mpirun are installed:
                          processes of their own on the same cores, ordered by the benchmark's,
                          with memory in pages of the same size

They run in turn, in one run, so that what disturbs the machine disturbs all of them. So each call
finds its code and its data out of cache, as between the layers of a model. At 1 KB, where that is
most of the time, a second case makes ``REPEATS`` calls one after another.
"""

from __future__ import annotations

import os
from functools import partial

import torch

from fusedcomm.benchmarks._collectives import paths, plot
from fusedcomm.benchmarks.harness import (
    Case,
    CaseResult,
    Estimate,
    Options,
    Verdict,
    compare,
)

DEFAULT_DTYPE = torch.float32

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(1 << power for power in range(10, 27, 2))
QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
#: Calls one after another in a sample of the cases that have such.
REPEATS = 50
#: Seconds that a case is measured.
SECONDS = 5.0

LARGE = 1 << 20
# The targets are set for two and four ranks, float32.
GLOO_LARGE_TARGET, GLOO_TARGET, SMALL_TARGET_US = 3.0, 1.0, 40.0
#: op -> MPI's time over ours that is to be reached from 1 MB on: symmetric, not symmetric
MPI_TARGETS = {
    "all_reduce": (1.0, 1.0),
    "reduce_scatter": (1.0, 1.0),
    "all_gather": (1 / 1.2, 1 / 2.0),
    "all_to_all": (1 / 1.2, 1 / 2.0),
}
OURS = ("fusedcomm", "fusedcomm, symmetric")


def cases(options: Options) -> list[Case]:
    """Every operation at every size, at the smallest also many calls in a row."""
    sizes = QUICK_SIZES if options.quick else SIZES
    settings = [(nbytes, 1) for nbytes in sizes]
    settings.insert(1, (sizes[0], REPEATS))
    return [
        Case(
            name=f"{op} {_size(nbytes)}" + (f" × {calls}" if calls > 1 else ""),
            prepare=partial(paths.prepare, op, nbytes, calls, options),
            baseline="gloo",
            labels={"op": op, "bytes": nbytes, "calls": calls},
            seconds=SECONDS,
        )
        for op in OPS
        for nbytes, calls in settings
    ]


def summarise(results: list[CaseResult], options: Options) -> list[Verdict]:
    """The report's last lines; cases that were not measured (``--only``) have none."""
    standard = options.ranks in (2, 4) and options.dtype == torch.float32

    def least(found: list[CaseResult], path: str, over: str) -> tuple[Estimate, str] | None:
        """The worst case's time of ``over`` divided by that of ``path``."""
        ratios = [
            (compare((r.paths[over].samples_ms, r.paths[path].samples_ms)), r.name)
            for r in found
            if over in r.paths
        ]
        return min(ratios, key=lambda ratio: ratio[0].value) if ratios else None

    def verdict(text: str, ratio: tuple[Estimate, str] | None, target: float | None) -> None:
        if ratio is not None:
            value, name = ratio
            found = Verdict(f"{text} (least: {name})", value, target if standard else None)
            verdicts.append(found)

    verdicts: list[Verdict] = []
    for op in OPS:
        mine = [r for r in results if r.labels["op"] == op and r.labels["calls"] == 1]
        large = [result for result in mine if result.labels["bytes"] >= LARGE]
        path = OURS[0]
        verdict(
            f"{op}: gloo / fusedcomm from 1 MB on", least(large, path, "gloo"), GLOO_LARGE_TARGET
        )
        verdict(f"{op}: gloo / fusedcomm at any size", least(mine, path, "gloo"), GLOO_TARGET)
        in_place, private = MPI_TARGETS[op]
        text = f"{op}: MPI / fusedcomm from 1 MB on"
        verdict(text, least(large, path, "MPI"), private)
        verdict(f"{text}, symmetric", least(large, OURS[1], "MPI"), in_place)
        verdict(f"{op}: gloo / copies from 1 MB on", least(large, "copies", "gloo"), None)
        verdict(f"{op}: copies / fusedcomm from 1 MB on", least(large, path, "copies"), None)
    for result in results:
        if result.labels["bytes"] == SIZES[0]:
            for name, measured in result.paths.items():
                target = SMALL_TARGET_US if standard and name == OURS[0] else None
                verdicts.append(
                    Verdict(
                        f"{result.name}, a call, {name}",
                        _microseconds(measured.samples_ms, result.labels["calls"]),
                        target,
                        at_least=False,
                        unit=" µs",
                    )
                )
    return verdicts


def draw(results: list[CaseResult], title: str, path: str | os.PathLike[str]) -> None:
    """The picture: time over size, a panel for each operation."""
    plot.draw([result for result in results if result.labels["calls"] == 1], title, path)


def _microseconds(samples_ms: list[float], calls: int) -> Estimate:
    return compare((samples_ms, [1e-3 * calls] * len(samples_ms)))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
