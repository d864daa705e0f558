"""Mixture of experts: the whole layer, dispatch alone, combine alone.

Every rank has 16 / W experts of hidden 1024 and ffn 512 (SwiGLU). Routing is balanced (every expert
equally often) or skewed (as 1, 1/2, 1/3 …: most rows go to the first rank). The paths of a layer:

    moe_ffn    the library's op as a user calls it
    usual      permute, count exchange, all_to_all_single on gloo, experts, and the way back,
               written with torch alone; experts by a loop of mm, and by F.grouped_mm
    experts    the experts' products and activation alone, on rows and (for the loop) into memory
               that are there, in both ways
    copies     what even a perfect layer must do besides: write every row once, read every row once

so usual / moe_ffn, with the faster of the two ways, is the speedup; experts / moe_ffn the
efficiency; and experts / (experts + copies) the bound that plain copies set on it. Dispatch and
combine alone are measured for T from 1 to 8192 beside gloo's and a plain copy of T · min(k, W)
rows; these rows' bytes over the time are the logical bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fusedcomm.benchmarks._moe import paths
from fusedcomm.benchmarks._moe.problem import HIDDEN
from fusedcomm.benchmarks.harness import (
    Case,
    CaseResult,
    Estimate,
    MemoryUse,
    Options,
    Prepared,
    Ranks,
    Verdict,
    compare,
)
from fusedcomm.benchmarks.harness.stats import median

TOKENS = 2048
SWEEP = (1, 16, 128, 512, 2048, 4096, 8192)
ROUTINGS = ("balanced", "skewed")

# The targets hold for the setting they were set for: two ranks, Options' defaults.
SPEEDUP_TARGET = 1.5
EFFICIENCY_TARGET = 0.75
EXCHANGE_TARGET = 2.0


def cases(options: Options) -> list[Case]:
    """The layers by rising need of memory, then the exchanges."""
    found = [
        _case("layer", TOKENS, top_k, routing, options, paths.layer, "moe_ffn")
        for top_k in (2, 8)
        for routing in ROUTINGS
    ]
    for routing in ROUTINGS:
        found.append(_case("exchange", TOKENS, 2, routing, options, paths.exchange, "copy"))
        found += [
            _case("exchange", tokens, 8, routing, options, paths.exchange, "copy")
            for tokens in SWEEP
        ]
    return found


def _case(
    kind: str,
    tokens: int,
    top_k: int,
    routing: str,
    options: Options,
    prepare: Callable[[int, int, str, Options, Ranks], Prepared],
    baseline: str,
) -> Case:
    return Case(
        name=f"{kind} T={tokens} top-{top_k} {routing}",
        prepare=partial(prepare, tokens, top_k, routing, options),
        baseline=baseline,
        labels={"kind": kind, "tokens": tokens, "top_k": top_k, "routing": routing},
    )


def summarise(results: list[CaseResult], options: Options) -> list[Verdict]:
    """The report's last lines; cases that were not measured (``--only``) have none."""
    standard = options == Options(quick=options.quick)
    layers = [result for result in results if result.labels["kind"] == "layer"]
    verdicts = []

    def target(value: float) -> float | None:
        return value if standard else None

    for result in layers:
        text = f"speedup of {result.name} (usual / moe_ffn, experts by the faster way)"
        verdicts.append(Verdict(text, _ratio([result], "usual")))
    if layers:
        mean = f", geometric mean of {len(layers)}" if len(layers) > 1 else ""
        text = f"speedup (usual / moe_ffn{mean})"
        verdicts.append(Verdict(text, _ratio(layers, "usual"), target(SPEEDUP_TARGET)))
        for result in layers:
            text = f"efficiency of {result.name} (experts / moe_ffn)"
            verdicts.append(Verdict(text, _ratio([result], "experts")))
        text = f"efficiency (experts / moe_ffn{mean})"
        verdicts.append(Verdict(text, _ratio(layers, "experts"), target(EFFICIENCY_TARGET)))
        text = f"bound that copies set on it (experts / (experts + copies){mean})"
        verdicts.append(Verdict(text, _bound(layers)))
    for result in results:
        if result.labels["kind"] != "exchange":
            continue
        aimed = target(EXCHANGE_TARGET) if result.labels["tokens"] == TOKENS else None
        for op in ("dispatch", "combine"):
            samples = [(result.paths[f"usual {op}"].samples_ms, result.paths[op].samples_ms)]
            text = (
                f"speedup of {op}, {result.name} (usual / {op}; {_bandwidths(result, op, options)})"
            )
            verdicts.append(Verdict(text, compare(*samples), aimed))
    uses = {use.what: use for use in sorted(_uses(results), key=lambda u: u.bytes - u.allowed)}
    for use in uses.values():
        held, allowed = use.bytes / 2**20, use.allowed / 2**20
        value = Estimate(held, held, held)
        verdicts.append(Verdict(use.what, value, allowed, at_least=False, unit=" MiB"))
    return verdicts


def _uses(results: list[CaseResult]) -> list[MemoryUse]:
    return [use for result in results for use in result.memory]


def _faster(result: CaseResult, what: str) -> list[float]:
    """The samples of the way that has the smaller median."""
    ways = [path.samples_ms for name, path in result.paths.items() if name.startswith(what)]
    return min(ways, key=median)


def _ratio(layers: list[CaseResult], what: str) -> Estimate:
    return compare(*((_faster(r, what), r.paths["moe_ffn"].samples_ms) for r in layers))


def _bound(layers: list[CaseResult]) -> Estimate:
    pairs = []
    for result in layers:
        alone = np.asarray(_faster(result, "experts"))
        pairs.append((list(alone), list(alone + np.asarray(result.paths["copies"].samples_ms))))
    return compare(*pairs)


def _bandwidths(result: CaseResult, op: str, options: Options) -> str:
    """Logical bandwidths in GB/s: T · min(W, k) rows over the median time."""
    rows = result.labels["tokens"] * min(options.ranks, result.labels["top_k"])
    size = rows * HIDDEN * options.dtype.itemsize
    speeds = {name: size / median(result.paths[name].samples_ms) / 1e6 for name in (op, "copy")}
    return ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items())
