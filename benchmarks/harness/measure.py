"""The measuring loop. It runs on every rank at once; the parent process merges what they return.

The compared paths run in turn, one call of each per round, in an order that changes from round to
round, so that a slow phase of the machine hits all of them. Before each call the ranks agree on a
moment of the clock they share and start together then: the barrier's own skew (a rank that leaves
it late makes the others wait inside an op that communicates, but not in a bare matrix product) is
no part of a sample.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.benchmarks.harness.case import (
    Case,
    CaseResult,
    MemoryUse,
    Options,
    Path,
    PathResult,
    Ranks,
    Tensors,
    relative_error,
)
from fusedcomm.trace import trace

# How long the ranks take to leave an all-reduce (who leaves later starts late, and the sample
# counts from there), and then look at the clock. A virtual machine's cores that were asleep need a
# while to be given a real one each: with 0.3 ms, up to half of the samples took twice as long.
AGREEMENT_NS = 1_000_000


@dataclass(frozen=True)
class Budget:
    """How many rounds a case gets: as many as fit into ``seconds``, within the limits.

    ``warm_up`` rounds, one at least, go before and are not counted.
    """

    warm_up: int
    seconds: float
    least: int
    most: int

    def rounds(self, round_s: float) -> int:
        return max(self.least, min(self.most, int(self.seconds / max(round_s, 1e-9))))


FULL = Budget(warm_up=2, seconds=12.0, least=15, most=300)
QUICK = Budget(warm_up=1, seconds=0.4, least=4, most=40)


@dataclass
class RankCase:
    """What one rank measured of a case: per path the (start, end) of each round in ns."""

    times_ns: dict[str, list[tuple[int, int]]]
    errors: dict[str, float | None]
    bounds: dict[str, float]
    plans: list[str]
    memory: list[MemoryUse]


def run_rank(
    rank: int,
    emit: Callable[[Any], None],
    module_name: str,
    options: Options,
    chosen: list[str],
) -> list[RankCase]:
    """Measure the ``chosen`` cases of a benchmark module; what each rank process does.

    ``emit`` is given (case's number, its name, rounds done, rounds to do) by rank 0.
    """
    random.seed(0)
    ranks = Ranks(rank, dist.get_world_size())
    report = emit if rank == 0 else _ignore
    measured = []
    module = importlib.import_module(module_name)
    cases = [case for case in module.cases(options) if case.name in chosen]
    for number, case in enumerate(cases):
        report((number, case.name, 0, 1))
        measured.append(_measure(case, ranks, QUICK if options.quick else FULL, number, report))
        gc.collect()
    return measured


def _ignore(_: Any) -> None:
    """Events of the other ranks: rank 0 speaks for all."""


def _measure(
    case: Case, ranks: Ranks, budget: Budget, number: int, report: Callable[[Any], None]
) -> RankCase:
    prepared = case.prepare(ranks)
    paths = dict(prepared.paths)
    errors: dict[str, float | None] = {}
    with trace() as recorded:
        for name, path in paths.items():
            if path.setup is not None:
                path.setup()
            errors[name] = _error(path, path.run())
    for _ in range(budget.warm_up):
        began = time.perf_counter()
        for path in paths.values():
            _sample(path)
        last_s = time.perf_counter() - began
    if case.seconds is not None:
        budget = replace(budget, seconds=min(budget.seconds, case.seconds))
    rounds = budget.rounds(_largest(last_s))
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in paths}
    gc.disable()  # a collection in the middle of a sample would be charged to its path
    try:
        for done in range(rounds):
            order = list(paths)
            random.shuffle(order)  # seeded: the same on all ranks
            for name in order:
                begin, end, result = _sample(paths[name])
                times[name].append((begin, end))
                if done == rounds - 1:
                    # Once more at the end: buffers have been reused many times by then.
                    error = _error(paths[name], result)
                    errors[name] = error if error is None else max(error, errors[name] or 0.0)
                del result
            report((number, case.name, done + 1, rounds))
    finally:
        gc.enable()
    return RankCase(
        times_ns=times,
        errors=errors,
        bounds={name: path.bound for name, path in paths.items()},
        plans=sorted(
            {f"{p.op} on {p.engine}, chunks: {p.chunks} ({p.reason})" for p in recorded.plans}
        ),
        memory=prepared.memory() if prepared.memory is not None else [],
    )


def _sample(path: Path) -> tuple[int, int, Tensors]:
    """Run the path once, all ranks starting together; start and end in ns, and the result."""
    if path.setup is not None:
        path.setup()
    agreed = int(_largest(time.perf_counter_ns())) + AGREEMENT_NS
    if path.timed is not None:
        return *path.timed(agreed), torch.empty(0)
    while (begin := time.perf_counter_ns()) < agreed:
        os.sched_yield()  # there may be more ranks than cores
    result = path.run()
    return begin, time.perf_counter_ns(), result


def _largest(value: float) -> float:
    """The largest of the ranks' values, on every rank; all ranks have come when it returns."""
    values = torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()


def _error(path: Path, result: Tensors) -> float | None:
    return None if path.expected is None else relative_error(result, path.expected)


def merge(cases: list[Case], by_rank: list[list[RankCase]]) -> list[CaseResult]:
    """The ranks' measurements as one result per case; ``by_rank[r]`` is what rank r returned."""
    return [
        _merge_case(case, [measured[number] for measured in by_rank])
        for number, case in enumerate(cases)
    ]


def _merge_case(case: Case, parts: list[RankCase]) -> CaseResult:
    paths: dict[str, PathResult] = {}
    skew_ns = 0
    for name, bound in parts[0].bounds.items():
        begins = [[begin for begin, _ in part.times_ns[name]] for part in parts]
        ends = [[end for _, end in part.times_ns[name]] for part in parts]
        last_begin = [max(of_round) for of_round in zip(*begins, strict=True)]
        last_end = [max(of_round) for of_round in zip(*ends, strict=True)]
        first_begin = [min(of_round) for of_round in zip(*begins, strict=True)]
        skews = [last - first for last, first in zip(last_begin, first_begin, strict=True)]
        skew_ns = max([skew_ns, *skews])
        known = [error for part in parts if (error := part.errors[name]) is not None]
        paths[name] = PathResult(
            samples_ms=_milliseconds(last_begin, last_end),
            rank_ms=[_milliseconds(b, e) for b, e in zip(begins, ends, strict=True)],
            error=max(known) if known else None,
            bound=bound,
        )
    uses = zip(*(part.memory for part in parts), strict=True)
    return CaseResult(
        name=case.name,
        baseline=case.baseline,
        labels=case.labels,
        paths=paths,
        plans=parts[0].plans,
        memory=[max(of_ranks, key=lambda use: use.bytes - use.allowed) for of_ranks in uses],
        start_skew_us=skew_ns / 1e3,
    )


def _milliseconds(begins: list[int], ends: list[int]) -> list[float]:
    return [(end - begin) / 1e6 for begin, end in zip(begins, ends, strict=True)]
