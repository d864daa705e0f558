"""Every rule is broken by a fault that is planted for it, and a faultless kernel breaks none."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import triton

from benchmarks._compiled import sass
from benchmarks._compiled.case import Case
from benchmarks._compiled.checks import CHECKS, violations
from benchmarks._compiled.compiling import CHIPS, Compiled, compile_case
from benchmarks._compiled.report import DEVIATIONS

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

SOUND = Case(
    "tests.compile.faulty_kernels",
    "product_kernel",
    product="large",
    waits=1,
    signals=1,
    more={"FAULT": ""},
    pointers={**dict.fromkeys(("x", "weight", "y"), "*bf16"), "flags": "*i32", "record": "*i32"},
    standard=True,
)


def faulty(fault: str, **changes) -> Case:
    return dataclasses.replace(SOUND, more={"FAULT": fault}, **changes)


@functools.cache
def sound_kernel(chip: str) -> Compiled:
    return compile_case(SOUND, chip)


def broken(case: Case, chip: str) -> set[str]:
    """The rules that a case breaks, but for those that the chip's kernels are known to break."""
    found = set(violations(compile_case(case, chip), sound_kernel(chip)))
    return {name for name in found if (name, chip) not in DEVIATIONS}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_sound_kernel_passes(chip):
    # Triton 3.6 waits for every product of this kernel, not of those in kernels/ (test_kernels).
    older = {"one group in flight"} if VERSION < (3, 7) and chip == "sm_90" else set()
    assert broken(SOUND, chip) == older


FLOAT32 = {**SOUND.pointers, **dict.fromkeys(("x", "weight", "y"), "*fp32")}
FAULTS = [
    ("waits for a load", {}, "waits"),
    ("waits without order", {}, "waits"),
    ("acquires and does not look", {}, "waits"),
    ("signals without order", {}, "signals"),
    ("signals with a store", {}, "signals"),
    ("signals without a barrier", {}, "barrier before a release"),
    ("waits in the K loop", {}, "K loop free of flags"),
    ("waits in the K loop", {}, "K loop against the plain product"),
    ("counts in the K loop", {}, "K loop free of flags"),
    ("fences in the K loop", {}, "K loop free of flags"),
    ("barrier in the K loop", {}, "K loop against the plain product"),
    ("works in the K loop", {}, "one group in flight"),
    ("works in the K loop", {}, "K loop against the plain product"),
    ("works in the K loop", {}, "absolute length"),
    ("knows no alignment", {}, "16-byte stores"),
    ("stores a tile in bulk", {}, "no bulk stores"),
    ("", {"options": {"num_warps": 4}}, "no spills"),
    ("", {"options": {"num_stages": 5}}, "shared memory"),
    ("", {"options": {"num_stages": 1}}, "prefetch depth"),
    ("", {"options": {"num_stages": 1}}, "copies in the K loop"),
    ("multiplies in full precision", {"pointers": FLOAT32, "product": "small"}, "tensor cores"),
]  # fmt: skip


@pytest.mark.parametrize("fault, changes, rule", FAULTS)
def test_a_planted_fault_is_found(fault, changes, rule):
    if fault == "signals without a barrier" and VERSION >= (3, 9):
        pytest.skip("Triton 3.9 puts the barrier before a release itself")
    assert rule in broken(faulty(fault, **changes), "sm_90")


COPY = ["LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]", "LDGDEPBAR"]
DRAIN, BARRIER = ["DEPBAR.LE SB0, 0x0"], ["BAR.SYNC.DEFER_BLOCKING 0x0"]
ACQUIRE = ["LDG.E.STRONG.SYS R6, desc[UR8][R12.64]", "CCTL.IVALL"]
LOAD = ["LDG.E R2, desc[UR8][R2.64]"]


@pytest.mark.parametrize(
    "rule, faulty, sound",
    [
        ("copies behind the wait", COPY + ACQUIRE + DRAIN, COPY + DRAIN + ACQUIRE),
        ("barrier after an acquire", ACQUIRE + LOAD + BARRIER, ACQUIRE + BARRIER + LOAD),
    ],
)
def test_what_no_kernel_compiles_to_is_found_too(rule, faulty, sound):
    """In code by hand: Triton turns pipelining off, and has a barrier behind its atomics."""

    def found(order: list[str]) -> list[str]:
        lines = [
            f"        /*{16 * at:04x}*/    {line} ;" for at, line in enumerate([*order, "EXIT"])
        ]
        compiled = dataclasses.replace(sound_kernel("sm_90"))
        text = "\n".join(["\t.section\t.text.f,", *lines])
        compiled.__dict__["program"] = sass.parse(text, "f")
        return list(CHECKS[rule](compiled, None))

    assert found(faulty)
    assert not found(sound)


def test_every_rule_has_a_fault():
    planted = {rule for _, _, rule in FAULTS}
    known = {name for name, _ in DEVIATIONS}  # found in the kernels themselves
    by_hand = {"copies behind the wait", "barrier after an acquire"}
    assert planted | known | by_hand == set(CHECKS)
