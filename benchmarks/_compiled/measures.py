"""The numbers of a compiled kernel that the rules and the report are about."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import gcn, sass
from .code import Loop, Program
from .compiling import Compiled

#: Stores of the protocol's own words (a slot's epoch, a failed wait's record) are in this file.
PROTOCOL = "signals.py"


@dataclass(frozen=True)
class Step:
    """Once round a K loop, by the shortest way through all its matrix instructions.

    Attributes:
        instructions, barriers, matrix: on that way.
        copies: global loads towards shared memory, in the whole loop.
        depth: how many steps ahead they are issued.
    """

    instructions: int
    barriers: int
    matrix: int
    copies: int
    depth: int


@dataclass(frozen=True)
class Measures:
    """``step`` is the longest of the kernel's K loops, None for a kernel without one."""

    step: Step | None
    acquires: int
    releases: int
    stores: tuple[int, ...]
    spills: int
    registers: int


def measure(compiled: Compiled) -> Measures:
    program = compiled.program
    steps = [step_of(compiled, loop) for loop in k_loops(program)]
    if compiled.nvidia:
        spills = len(program.tagged("spill"))
        registers = sass.registers(compiled.machine)
    else:
        spills = gcn.resource(compiled.machine, "vgpr_spill_count")
        registers = gcn.resource(compiled.machine, "vgpr_count")
    return Measures(
        max(steps, key=lambda step: step.instructions, default=None),
        len(system_wide(program, "acquire")),
        len(system_wide(program, "release")),
        tuple(sorted({program.instructions[at].size for at in tile_stores(program)})),
        spills,
        registers,
    )


def k_loops(program: Program) -> list[Loop]:
    """The innermost loops with matrix instructions."""
    return program.innermost("matrix")


def step_of(compiled: Compiled, loop: Loop) -> Step:
    program = compiled.program
    way = [program.instructions[at] for at in program.hot_path(loop, "matrix")]
    return Step(
        len(way),
        sum("barrier" in instruction.tags for instruction in way),
        sum("matrix" in instruction.tags for instruction in way),
        sum("copy" in instruction.tags for instruction in program.of(loop.blocks)),
        _depth(program, loop),
    )


def _depth(program: Program, loop: Loop) -> int:
    """How many steps before its use a step's data is asked for."""
    way = [program.instructions[at] for at in program.hot_path(loop, "matrix")]
    commits = sum("commit" in instruction.tags for instruction in way)
    waits = [at for at, instruction in enumerate(way) if "pending" in instruction.tags]
    if commits and waits:
        # Groups of copies end in their order. A wait that leaves n of them under way leaves n /
        # commits steps; those that are asked for after it in the same step are one step further.
        first = next(at for at, instruction in enumerate(way) if "commit" in instruction.tags)
        ahead = way[waits[0]].number // commits
        return ahead + 1 if waits[0] < first else ahead
    inside = [i for i in program.of(loop.blocks) if "copy" in i.tags]
    if not inside:
        return 0
    # Copies without groups (bulk copies, AMD's): as many steps as are asked for before the loop.
    places = {instruction.place for instruction in inside}
    loops = k_loops(program)
    looped = frozenset().union(*(other.blocks for other in loops))
    every = sum("copy" in i.tags and i.place in places for i in program.of(looped))
    before = sum(
        "copy" in i.tags and i.place in places for i in program.of(program.reachable - looped)
    )
    return before // every


def system_wide(program: Program, tag: str) -> list[int]:
    """Indices of acquires or releases at system scope."""
    return [at for at in program.tagged(tag) if program.instructions[at].scope == "sys"]


def tile_stores(program: Program) -> list[int]:
    """Indices of the stores of data: all but the protocol's own and the releases."""
    code = program.instructions
    return [
        at
        for at in program.tagged("store")
        if code[at].place[0] != PROTOCOL and "release" not in code[at].tags
    ]


def in_source(compiled: Compiled, order: str) -> int:
    """Atomics at system scope with this order that Triton's own code still has."""
    pattern = rf"tt\.atomic\w*[^\n%]*\b(?:{order}|acq_rel),\s*sys\b"
    return len(re.findall(pattern, compiled.intermediate))
