"""What a benchmark defines (cases and their paths) and what comes back (results and verdicts)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedcomm.benchmarks.harness.stats import Estimate

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Options:
    """What the user asked for; equal in all processes."""

    ranks: int = 2
    engine: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    shape: str = "llama3-8b-tp8"
    quick: bool = False


@dataclass(frozen=True)
class Ranks:
    """Who a case is prepared for."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class Path:
    """One way to do a case's work.

    ``run`` does it once and returns the result, allocation included. ``expected`` is the right
    result in float64 (one tensor or a tuple, in the order of the result's), or None where the path
    does other work than the case's (a bare matrix product); ``bound`` is the largest legal
    ‖result − expected‖ / ‖expected‖ (see :func:`relative_bound`).

    ``setup`` goes before every call and is no part of its time. Where the work is done in another
    process, ``timed(at_ns)`` has it done at that time of ``time.perf_counter_ns`` and returns its
    begin and end; ``run`` is then called only once, and not measured.
    """

    run: Callable[[], Tensors]
    expected: Tensors | None = None
    bound: float = 0.0
    setup: Callable[[], object] | None = None
    timed: Callable[[int], tuple[int, int]] | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that were allocated for something, and how many may be."""

    what: str
    bytes: int
    allowed: int


@dataclass(frozen=True)
class Prepared:
    """A case on one rank, ready to run: its paths by name and, where asked, its memory."""

    paths: Mapping[str, Path]
    memory: Callable[[], list[MemoryUse]] | None = None


@dataclass(frozen=True)
class Case:
    """Something to measure: paths that are run in turn, on all ranks together.

    ``prepare`` makes inputs and references, on every rank; its paths' names and order must be
    equal on all ranks. ``baseline`` names the path that the table's ratios refer to. ``labels``
    let ``summarise`` find the case among the results, and go into the JSON. ``seconds`` is how long
    it is measured at most, where that is less than usual.
    """

    name: str
    prepare: Callable[[Ranks], Prepared]
    baseline: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None


@dataclass
class PathResult:
    """``samples_ms``: one per round, from the last rank's start to the last rank's end.

    ``rank_ms[r]`` are rank r's own durations in the same rounds. ``error`` is the largest over the
    ranks and the checked calls; None where nothing is expected.
    """

    samples_ms: list[float]
    rank_ms: list[list[float]]
    error: float | None
    bound: float

    @property
    def correct(self) -> bool:
        return self.error is None or self.error <= self.bound


@dataclass
class CaseResult:
    """A measured case. ``start_skew_us`` is the largest difference of the ranks' starts."""

    name: str
    baseline: str
    labels: Mapping[str, Any]
    paths: dict[str, PathResult]
    plans: list[str]
    memory: list[MemoryUse]
    start_skew_us: float

    @property
    def correct(self) -> bool:
        return all(path.correct for path in self.paths.values())


@dataclass(frozen=True)
class Verdict:
    """One of the report's last lines: a number, and whether it reaches its target if it has one.

    ``at_least`` False means that the value may not exceed the target.
    """

    text: str
    value: Estimate
    target: float | None = None
    at_least: bool = True
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        value = self.value.value
        return value >= self.target if self.at_least else value <= self.target

    def __str__(self) -> str:
        value = str(self.value)
        if self.value.low == self.value.high:  # counted, not measured
            value = f"{self.value.value:.3f}".rstrip("0").rstrip(".")
        line = f"{self.text}: {value}{self.unit}"
        if self.target is None:
            return f"{line} (no target)"
        sign = "at least" if self.at_least else "at most"
        bounds = self.value.low, self.value.high
        word = "met" if self.met else "NOT met"
        if min(bounds) < self.target < max(bounds):
            word += ", but within the noise"
        return f"{line}, target {sign} {self.target:g}{self.unit}: {word}"


def relative_bound(dtype: torch.dtype, terms: int, roundings: int = 1) -> float:
    """A bound on ‖result − exact‖ / ‖exact‖ of a sum of ``terms`` products.

    The result is rounded to ``dtype`` ``roundings`` times (each is off by at most its unit
    roundoff, half of eps) and accumulated in float32, whose errors add up as a random walk.
    """
    unit = torch.finfo(dtype).eps / 2
    return roundings * unit + math.sqrt(terms) * torch.finfo(torch.float32).eps / 2


def relative_error(result: Tensors, expected: Tensors) -> float:
    """The largest ‖result − expected‖ / ‖expected‖ of the tensors; infinite where it is NaN.

    Raises ValueError when number or shapes differ.
    """
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    wanted = (expected,) if isinstance(expected, torch.Tensor) else tuple(expected)
    shapes = [tuple(t.shape) for t in results], [tuple(t.shape) for t in wanted]
    if shapes[0] != shapes[1]:
        raise ValueError(f"a path returned tensors of shapes {shapes[0]}, expected {shapes[1]}")
    worst = 0.0
    for ours, exact in zip(results, wanted, strict=True):
        difference = torch.linalg.vector_norm(ours.double() - exact).item()
        scale = torch.linalg.vector_norm(exact).item()
        error = difference / scale if scale else difference
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst
