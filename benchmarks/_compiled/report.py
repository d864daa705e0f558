"""The table of compiled kernels, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .case import Case
from .cases import CASES, named
from .checks import violations
from .compiling import CHIPS, Compiled, compile_all
from .measures import Measures, measure

#: (check, chip) -> why it is not met, and what of it is accepted nevertheless.
DEVIATIONS = {
    ("16-byte stores", "gfx942"): (
        "Triton stores accumulators as they lie in AMD's registers: 8 bytes, or single elements of "
        "a transposed result"
    ),
    ("stores behind the barrier", "gfx942"): (
        "Triton's barrier is a bare s_barrier: stores of other waves may still be under way at the "
        "release. So the engine does not run on AMD GPUs"
    ),
}

COLUMNS = [
    *("kernel", "chip", "K step", "plain", "MMA", "copies", "depth", "stores", "acq/rel"),
    *("spills", "regs", "shared", "verdict"),
]


@dataclass(frozen=True)
class Row:
    """One case on one chip: what was measured, and what breaks a rule.

    Attributes:
        plain: instructions a K step of the product without signals, None where there is none.
        broken: check -> what breaks it, deviations left out.
        deviations: the checks that are known not to be met, and are not.
    """

    case: str
    chip: str
    triton: str
    measures: Measures
    plain: int | None
    shared: int
    broken: dict[str, list[str]]
    deviations: list[str]

    @property
    def verdict(self) -> str:
        if self.broken:
            return "BROKEN: " + ", ".join(self.broken)
        return "deviates" if self.deviations else "ok"

    def cells(self) -> list[str]:
        """The row's text, in the order of ``COLUMNS``."""
        step = self.measures.step
        of_step = ["", "", "", "", ""]
        if step is not None:
            plain = "" if self.plain is None else str(self.plain)
            of_step = [str(step.instructions), plain, str(step.matrix), str(step.copies)]
            of_step.append(str(step.depth))
        return [
            self.case,
            self.chip,
            *of_step,
            "/".join(map(str, self.measures.stores)),
            f"{self.measures.acquires}/{self.measures.releases}",
            str(self.measures.spills),
            str(self.measures.registers),
            str(self.shared),
            self.verdict,
        ]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def selected(
    kernel: str | None = None, chips: Iterable[str] | None = None
) -> list[tuple[Case, str]]:
    """Pairs of a case and a chip; of the cases those with ``kernel`` in their name."""
    cases = [case for case in CASES if kernel is None or kernel in case.name]
    chosen = list(chips or CHIPS)
    return [(case, chip) for case in cases for chip in chosen if chip in (case.chips or CHIPS)]


def with_plain(wanted: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """``wanted`` and, before it, the plain products that it is compared with."""
    plain = [(named(case.plain), chip) for case, chip in wanted if case.plain]
    return list({(case.name, chip): (case, chip) for case, chip in [*plain, *wanted]}.values())


def row(compiled: Compiled, plain: Compiled | None) -> Row:
    """What is found in a compiled case."""
    found = violations(compiled, plain)
    known = [name for name in found if (name, compiled.chip) in DEVIATIONS]
    step = measure(plain).step if plain else None
    return Row(
        compiled.case.name,
        compiled.chip,
        compiled.triton,
        measure(compiled),
        step.instructions if step else None,
        compiled.shared,
        {name: sentences for name, sentences in found.items() if name not in known},
        known,
    )


def rows(wanted: list[tuple[Case, str]], workers: int | None = None) -> Iterable[Row]:
    """Compile and examine; one row after the other."""
    done: dict[tuple[str, str], Compiled] = {}
    for compiled in compile_all(with_plain(wanted), workers):
        case = compiled.case
        done[case.name, compiled.chip] = compiled
        if any(case.name == other.name and compiled.chip == chip for other, chip in wanted):
            yield row(compiled, done[case.plain, compiled.chip] if case.plain else None)


def plain_text(found: list[Row]) -> str:
    """The table for a terminal."""
    lines = [COLUMNS, *(one.cells() for one in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]

    def join(cells: list[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[2:-1], widths[2:-1], strict=True)]
        start = [cells[0].ljust(widths[0]), cells[1].ljust(widths[1])]
        return "  ".join([*start, *numbers, cells[-1]])

    return "\n".join([join(COLUMNS), "-" * len(join(COLUMNS)), *(join(c) for c in lines[1:])])


def explanations(found: list[Row]) -> list[str]:
    """A sentence for everything broken, and one for each known deviation."""
    sentences = [
        f"{one.case} on {one.chip}: {check}: {sentence}"
        for one in found
        for check, broken in one.broken.items()
        for sentence in broken[:3]
    ]
    known = {(name, one.chip) for one in found for name in one.deviations}
    return sentences + [
        f"known deviation on {chip}, {name}: {DEVIATIONS[name, chip]}"
        for name, chip in sorted(known)
    ]
