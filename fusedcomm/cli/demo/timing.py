"""Times each kind of projection three ways, in turn: serial, overlapped and the GEMM alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm as fc
from fusedcomm.cli.demo.llama import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    Layout,
    Llama,
    Replicated,
    TokenShards,
    Unsharded,
)
from fusedcomm.ranks import Emit
from fusedcomm.schedule import shard_bounds

SERIAL, OVERLAPPED, GEMM = "serial", "overlapped", "GEMM alone"
PATHS = (SERIAL, OVERLAPPED, GEMM)
CALLS = {"prefill": 20, "decoding": 60}  # that are timed, of each path; one more comes first


@dataclass(frozen=True)
class Timing:
    """Seconds of each call of one projection on one rank, by path.

    ``plan`` tells how the overlapped path was carried out.
    """

    phase: str
    projection: str
    plan: str
    seconds: dict[str, list[float]]


@dataclass(frozen=True)
class _Case:
    phase: str
    projection: str
    names: tuple[str, ...]  # of its weights, in a layer
    paths: dict[str, Callable[[list[Tensor]], Any]]


def time_projections(model: Llama, tokens: int, engine: str, emit: Emit) -> list[Timing]:
    """Times every kind of projection on this rank's own weights, a layer after the other.

    "Serial" is torch.distributed's collective and the GEMM, "GEMM alone" one unsplit product of
    the same shape, all ranks at it. Collective. Emits ``("step", done, total)``.
    """
    cases = _prefill_cases(model, tokens, engine) + _decoding_cases(model, engine)
    timings = []
    for done, case in enumerate(cases):
        emit(("step", done, len(cases)))
        timings.append(_time(model, case))
    return timings


def slowest(ranks: list[Timing]) -> dict[str, float]:
    """The median seconds of each path, a call taking as long as on the slowest of ``ranks``."""
    return {
        path: statistics.median(map(max, zip(*(t.seconds[path] for t in ranks), strict=True)))
        for path in PATHS
    }


def _prefill_cases(model: Llama, tokens: int, engine: str) -> list[_Case]:
    x = torch.randn(tokens, model.config.hidden)
    start, end = shard_bounds(tokens, dist.get_world_size())[dist.get_rank()]
    serial, overlapped = TokenShards(tokens, "plain"), TokenShards(tokens, engine)

    def column(projection: str, names: tuple[str, ...]) -> _Case:
        paths: dict[str, Callable[[list[Tensor]], Any]] = {
            SERIAL: partial(serial.column, x[start:end]),
            OVERLAPPED: partial(overlapped.column, x[start:end]),
            GEMM: partial(Unsharded().column, x),
        }
        return _Case("prefill", projection, names, paths)

    return [
        column("q, k, v", QKV),
        _row_case(model, "prefill", "o", OUT, tokens, serial, overlapped),
        column("gate, up", GATE_UP),
        _row_case(model, "prefill", "down", DOWN, tokens, serial, overlapped),
    ]


def _decoding_cases(model: Llama, engine: str) -> list[_Case]:
    """Of the row projections only: column projections of replicated tokens send nothing."""
    serial, overlapped = Replicated("plain"), Replicated(engine)
    return [
        _row_case(model, "decoding", "o", OUT, 1, serial, overlapped),
        _row_case(model, "decoding", "down", DOWN, 1, serial, overlapped),
    ]


def _row_case(
    model: Llama,
    phase: str,
    projection: str,
    name: str,
    rows: int,
    serial: Layout,
    overlapped: Layout,
) -> _Case:
    x = torch.randn(rows, model.layers[0][name].shape[1])
    paths: dict[str, Callable[[list[Tensor]], Any]] = {
        SERIAL: lambda weights: serial.row(x, *weights),
        OVERLAPPED: lambda weights: overlapped.row(x, *weights),
        GEMM: lambda weights: Unsharded().row(x, *weights),
    }
    return _Case(phase, projection, (name,), paths)


def _time(model: Llama, case: _Case) -> Timing:
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    with fc.trace() as trace:
        case.paths[OVERLAPPED](_weights(model, case.names, 0))
    plan = trace.plans[-1]
    for call in range(CALLS[case.phase] + 1):
        weights = _weights(model, case.names, call)
        for path, run in case.paths.items():
            dist.barrier()
            start = time.perf_counter()
            run(weights)
            elapsed = time.perf_counter() - start
            if call > 0:
                seconds[path].append(elapsed)
    return Timing(case.phase, case.projection, f"{plan.engine}, {plan.chunks}", seconds)


def _weights(model: Llama, names: tuple[str, ...], call: int) -> list[Tensor]:
    """The weights of the call-th layer, around and around: as in the model, each comes cold."""
    layer = model.layers[call % len(model.layers)]
    return [layer[name] for name in names]
