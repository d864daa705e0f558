"""Linear layers with all-gather, reduce-scatter, all-reduce: prefill, decoding, backward.

The four paths of a prefill case (T tokens, W ranks; a rank's features are the model's at its TP
degree, whatever W is):

    GEMM alone   one unsplit matrix product on the full shape, every rank its own
    overlapped   the library's op as a user calls it: copy-in, waits and allocation included
    serial       the gloo collective and the product, written with torch.distributed alone
    ceiling      the copy-in and the split products of the host engine, without flags or waits

so GEMM alone / overlapped is the efficiency, serial / overlapped the speedup, and
ceiling / overlapped says how much of the rest is due to the op and not to splitting the product.
Decoding cases (T = 1, 8, 64) and backward cases (forward and backward) have no ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusedcomm.benchmarks._tensor_parallel import backward, decode, prefill
from fusedcomm.benchmarks.harness import (
    SHAPES,
    Case,
    CaseResult,
    Estimate,
    MemoryUse,
    Options,
    Verdict,
    compare,
)

TOKENS = 2048
DECODE_TOKENS = (1, 8, 64)

# The targets hold for the setting they were set for: two ranks, Options' defaults.
SPEEDUP_TARGET = 1.4
CEILING_TARGET = 0.97
DECODE_TARGET = 1.0
EFFICIENCY_TARGETS = {"all_gather_linear": 0.90, "linear_reduce_scatter": 0.86}


def cases(options: Options) -> list[Case]:
    """Prefill first: the workspaces, which grow and never shrink, then hold nothing larger."""
    shape = SHAPES[options.shape]
    column = [(shape.hidden, shape.feed_forward_shard), (shape.hidden, shape.attention_shard)]
    row = [(features, hidden) for hidden, features in column]
    both = {"all_gather_linear": column, "linear_reduce_scatter": row}
    found = [
        _case("prefill", op, TOKENS, sizes, options, prefill.PREPARE[op])
        for op, pairs in both.items()
        for sizes in pairs
    ]
    found += [
        _case("decode", op, tokens, sizes, options, decode.PREPARE[op])
        for tokens in DECODE_TOKENS
        for op, pairs in (both | {"linear_all_reduce": row}).items()
        for sizes in pairs
    ]
    found += [
        _case("backward", op, TOKENS, pairs[0], options, backward.PREPARE[op])
        for op, pairs in both.items()
    ]
    return found


def _case(
    kind: str,
    op: str,
    tokens: int,
    sizes: tuple[int, int],
    options: Options,
    prepare: Callable,
) -> Case:
    in_features, out_features = sizes
    return Case(
        name=f"{kind} {op} {in_features}→{out_features} T={tokens}",
        prepare=partial(prepare, tokens, in_features, out_features, options),
        baseline="serial" if kind == "decode" else "GEMM alone",
        labels={
            "kind": kind,
            "op": op,
            "tokens": tokens,
            "in_features": in_features,
            "out_features": out_features,
        },
    )


def summarise(results: list[CaseResult], options: Options) -> list[Verdict]:
    """The report's last lines; cases that were not measured (``--only``) have none."""
    standard = options == Options(quick=options.quick)

    def target(value: float) -> float | None:
        return value if standard else None

    def of(kind: str, op: str | None = None) -> list[CaseResult]:
        return [
            result
            for result in results
            if result.labels["kind"] == kind and op in (None, result.labels["op"])
        ]

    def ratio(measured: list[CaseResult], path: str, to: str = "overlapped") -> Estimate:
        """Geometric mean of one path's time over another's."""
        pairs = [(r.paths[path].samples_ms, r.paths[to].samples_ms) for r in measured]
        return compare(*pairs)

    verdicts = []
    for op, wanted in EFFICIENCY_TARGETS.items():
        if measured := of("prefill", op):
            text = f"efficiency of {op} (GEMM alone / overlapped{_mean(measured)})"
            verdicts.append(Verdict(text, ratio(measured, "GEMM alone"), target(wanted)))
    for result in of("prefill"):
        if "ceiling" in result.paths:
            text = f"part of the ceiling reached by {result.name} (ceiling / overlapped)"
            verdicts.append(Verdict(text, ratio([result], "ceiling"), target(CEILING_TARGET)))
    if measured := of("prefill"):
        text = f"speedup of prefill (serial / overlapped{_mean(measured)})"
        verdicts.append(Verdict(text, ratio(measured, "serial"), target(SPEEDUP_TARGET)))
        text = f"speedup if all communication were hidden (serial / GEMM alone{_mean(measured)})"
        verdicts.append(Verdict(text, ratio(measured, "serial", "GEMM alone")))
    for tokens in DECODE_TOKENS:
        measured = [r for r in of("decode") if r.labels["tokens"] == tokens]
        if measured:
            lowest = min(measured, key=lambda result: ratio([result], "serial").value)
            text = f"least speedup at T={tokens} (serial / overlapped: {lowest.name})"
            verdicts.append(Verdict(text, ratio([lowest], "serial"), target(DECODE_TARGET)))
            text = f"speedup at T={tokens} (serial / overlapped{_mean(measured)})"
            verdicts.append(Verdict(text, ratio(measured, "serial")))
    for result in of("backward"):
        for path in ("GEMM alone", "serial"):
            verdicts.append(Verdict(f"{path} / overlapped of {result.name}", ratio([result], path)))
    # Cases share a workspace: what counts is the one that it exceeds by most.
    uses = {use.what: use for use in sorted(_uses(results), key=lambda u: u.bytes - u.allowed)}
    for use in uses.values():
        held, allowed = use.bytes / 2**20, use.allowed / 2**20
        value = Estimate(held, held, held)
        verdicts.append(Verdict(use.what, value, allowed, at_least=False, unit=" MiB"))
    return verdicts


def _uses(results: list[CaseResult]) -> list[MemoryUse]:
    return [use for result in results for use in result.memory]


def _mean(measured: list[CaseResult]) -> str:
    return f", geometric mean of {len(measured)}" if len(measured) > 1 else ""
