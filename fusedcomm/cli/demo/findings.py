"""What the ranks found: shown as it comes, judged, and summed up at the end."""

from __future__ import annotations

import os
import time
from typing import Any

from fusedcomm.cli.demo.reference import Reference
from fusedcomm.cli.demo.report import Report
from fusedcomm.cli.demo.timing import GEMM, OVERLAPPED, SERIAL, slowest
from fusedcomm.cli.demo.worker import Job, Outcome
from fusedcomm.cli.show import table

BOUND = 1e-5  # of ‖difference‖ / ‖logits‖: both sides compute in float32

STAGES = {
    "prefill": "prefilling a real text of {tokens} tokens",
    "time": "timing each kind of projection",
    "trace": "recording the timeline of one prefill",
}


def problems(outcomes: list[Outcome], expected: list[int]) -> list[str]:
    """What is wrong with the ranks' findings, a sentence each; empty when all is well.

    ``expected`` are the unsharded model's greedy tokens. Every rank must have the same, and keep
    ``BOUND``.
    """
    found = []
    for rank, outcome in enumerate(outcomes):
        if outcome.tokens != expected:
            pairs = zip(outcome.tokens, expected, strict=False)
            short = min(len(outcome.tokens), len(expected))
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), short)
            found.append(
                f"rank {rank}: token {place + 1} is {_show(outcome.tokens, place)}, "
                f"the unsharded model's is {_show(expected, place)}"
            )
        if not outcome.error <= BOUND:  # so written, NaN is a problem too
            found.append(
                f"rank {rank}: the prefill's ‖difference‖ / ‖logits‖ is {outcome.error:.1e}, "
                f"more than {BOUND:.0e}"
            )
    return found


class Listener:
    """Shows what the first rank emits, as it comes. Called with (rank, event)."""

    def __init__(self, report: Report, model: Reference, job: Job, title: str, expected: list[int]):
        self.report, self.model, self.job, self.title = report, model, job, title
        self.expected = expected
        self.tokens: list[int] = []
        self.shown = ""
        self.start = 0.0

    def __call__(self, rank: int, event: Any) -> None:
        if rank != 0:
            return
        kind, *values = event
        if kind == "stage":
            self._stage(values[0])
        elif kind == "step":
            self.report.step(*values)
        elif kind == "token":
            self._token(values[0])
        elif kind == "error":
            self._error(values[0])

    def _stage(self, stage: str) -> None:
        if stage == "generate":
            self.report.end_stage()
            self.report.line(f"\n  {self.title}\n", style="bold")
            self.report.text("  ")
            return
        if stage == "prefill":
            self._all_tokens()
        self.report.stage(STAGES[stage].format(tokens=len(self.job.text)))

    def _token(self, token: int) -> None:
        if not self.tokens:
            self.start = time.perf_counter()
        self.tokens.append(token)
        text = self.model.decode(self.tokens)
        if text.endswith("\ufffd"):  # the rest of a character is still to come
            return
        right = self.tokens == self.expected[: len(self.tokens)]
        piece = text[len(self.shown) :].replace("\n", "\n  ")
        self.report.text(piece, style="cyan" if right else "red")
        self.shown = text

    def _all_tokens(self) -> None:
        equal = sum(a == b for a, b in zip(self.tokens, self.expected, strict=False))
        text = f"{equal} of {len(self.expected)} tokens equal to the unsharded model's"
        seconds = time.perf_counter() - self.start
        if len(self.tokens) > 1:
            text += f", {(len(self.tokens) - 1) / seconds:.1f} tokens/s"
        right = self.tokens == self.expected
        self.report.line("\n")
        self.report.line(text, style="green" if right else "red")
        self.report.line()

    def _error(self, error: float) -> None:
        self.report.end_stage()
        self.report.line(
            f"  ‖difference‖ / ‖logits‖ to the unsharded model: {error:.1e} (at most {BOUND:.0e})",
            style="green" if error <= BOUND else "red",
        )


def conclude(report: Report, job: Job, outcomes: list[Outcome], expected: list[int]) -> int:
    """Shows times, files and the verdict; the demo's exit code, 0 or 1."""
    report.line()
    if job.timed:
        _show_times(outcomes, len(job.text))
        report.line("Decoding, q, k, v, gate, up need no communication: each rank has the token.")
    else:
        report.line(
            "The device code ran in Triton's interpreter; its times say nothing of a GPU's."
        )
    cores, ranks = len(os.sched_getaffinity(0)), len(outcomes)
    if job.timed and cores < ranks:
        report.line(
            f"{ranks} ranks share {cores} core{'s' * (cores > 1)} here: while one waits, another "
            "computes. With a core for each, the ratios say more of the overlap."
        )
    report.line()
    if job.picture is None:
        report.line("timeline: no picture, for lack of matplotlib (pip install matplotlib)")
    else:
        report.line(f"timeline: {job.picture}")
    report.line(f"trace:    {job.trace_file} (open it in https://ui.perfetto.dev)")
    found = problems(outcomes, expected)
    for problem in found:
        report.error(problem)
    return 1 if found else 0


def _show_times(outcomes: list[Outcome], tokens: int) -> None:
    rows: list[list[str]] = []
    phases = {"prefill": f"prefill ({tokens} tokens)", "decoding": "decoding (1 token)"}
    for timings in zip(*(outcome.timings for outcome in outcomes), strict=True):
        phase = phases.pop(timings[0].phase, None)
        if phase is not None:
            rows += [[]] * bool(rows) + [[phase, *[""] * 6]]
        t = slowest(list(timings))
        rows.append(
            [
                f"  {timings[0].projection}",
                *(f"{t[path] * 1e3:.2f}" for path in (SERIAL, OVERLAPPED, GEMM)),
                f"{t[SERIAL] / t[OVERLAPPED]:.2f}",
                f"{t[GEMM] / t[OVERLAPPED]:.2f}",
                timings[0].plan,
            ]
        )
    table(
        "medians in ms; speed-up = serial / overlapped, efficiency = GEMM alone / overlapped",
        ["projection", SERIAL, OVERLAPPED, GEMM, "speed-up", "efficiency", "engine, chunks"],
        rows,
    )


def _show(tokens: list[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "missing"
