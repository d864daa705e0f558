"""NVIDIA machine code (sm_90, sm_100): reads nvdisasm's text, says what its instructions are.

``nvdisasm`` lies in Triton's wheel beside ``ptxas``. What is read here was seen in the output of
Triton 3.6, 3.7.1 and 3.9; anything else that moves control is an error, not a guess.

Worked example::

    .L_x_2:
            /*0410*/              @!P0 BRA `(.L_x_1) ;

is the label ``.L_x_2`` before ``Instruction("BRA", guard="!P0", targets=(".L_x_1",))``, which falls
through because it is guarded.
"""

from __future__ import annotations

import re

from .program import Instruction, ParseError, Program

_LABEL = re.compile(r"^([.$\w]+):\s*$")
_LINE = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P[T\d]+)\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>.*?);"
)
_TARGET = re.compile(r"`\(([^)]+)\)")
#: ``BRA P3, L`` and ``BRA.U UP0, L`` are conditional without a guard.
_CONDITION = re.compile(r"^!?U?P\d")
#: Names that end a program when they are not guarded.
_ENDS = {"EXIT", "RET", "BRX", "JMX", "BRXU", "JMXU"}


def read(text: str) -> Program:
    """The code of the one kernel in ``text``.

    Calls come back: they are taken as any instruction, and what they call, which lies behind the
    kernel's end, is not seen. Indirect jumps and returns of the kernel itself have no successors.

    Raises:
        ParseError: control is moved in a way that is not known here, or there is no code.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    regions: dict[str, list[str]] = {}  # of convergence: register -> labels of the ends
    for line_number, line in enumerate(text.splitlines(), 1):
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
            continue
        if not (found := _LINE.match(line)):
            continue
        name, rest = found["name"], found["rest"].strip()
        guard = "" if found["guard"] in (None, "PT", "UPT") else found["guard"]
        base = name.split(".")[0]
        targets: tuple[str, ...] = tuple(_TARGET.findall(rest))
        falls_through = bool(guard) or base not in _ENDS
        if base == "BRA":
            falls_through = bool(guard) or bool(_CONDITION.match(rest))
        elif base == "BSSY":
            # Names where its threads meet again; moves nothing.
            regions.setdefault(rest.split(",")[0], []).extend(targets)
            targets = ()
        elif base in ("CALL", "RET"):
            targets = ()
        elif targets:
            raise ParseError(f"line {line_number}: {name} goes to a label in an unknown way")
        instructions.append(
            Instruction(name, rest, guard, targets, falls_through, line_number)
        )
    while instructions and instructions[-1].name == "NOP":  # padding
        instructions.pop()
    _check_meetings(instructions, labels, regions)
    return Program(instructions, labels)


def _check_meetings(
    instructions: list[Instruction], labels: dict[str, int], regions: dict[str, list[str]]
) -> None:
    """That every BSYNC, which continues at its region's end, simply falls through to it."""
    for number, instruction in enumerate(instructions):
        if instruction.name.split(".")[0] == "BSYNC":
            ends = regions.get(instruction.operands, [])
            if all(labels.get(label) != number + 1 for label in ends):
                raise ParseError(f"line {instruction.line}: BSYNC does not stand at its region's end")


# ---- what the instructions are


def is_barrier(instruction: Instruction) -> bool:
    """A barrier of the whole block."""
    return instruction.name.startswith("BAR.SYNC") and instruction.operands.startswith("0x0")


def is_matrix(instruction: Instruction) -> bool:
    """A tensor-core product: HGMMA, UTCHMMA, HMMA and their kin."""
    return "MMA" in instruction.name.split(".")[0]


def is_group_matrix(instruction: Instruction) -> bool:
    """A tensor-core product that runs beside its program: of a warp group, or of a tensor memory."""
    return instruction.name.startswith(("HGMMA", "IGMMA", "QGMMA", "UTC")) and is_matrix(instruction)


def is_copy(instruction: Instruction) -> bool:
    """An asynchronous copy from global to shared memory."""
    return instruction.name.startswith(("LDGSTS", "UTMALDG", "UBLKCP"))


def store_bytes(instruction: Instruction) -> int:
    """The bytes that a thread stores to global memory in the ordinary way; 0 of all others."""
    return _bytes(instruction, ("STG", "ST"))


def load_bytes(instruction: Instruction) -> int:
    """The bytes that a thread loads from global memory into registers in the ordinary way."""
    return _bytes(instruction, ("LDG", "LD"))


def _bytes(instruction: Instruction, bases: tuple[str, ...]) -> int:
    base, *modifiers = instruction.name.split(".")
    if base not in bases or "STRONG" in modifiers:
        return 0
    width = next((m for m in modifiers if m in ("U8", "S8", "U16", "S16", "64", "128", "256")), "32")
    return int(width.strip("US")) // 8


def is_bulk_store(instruction: Instruction) -> bool:
    """A store by the copy engine of the processor (TMA), which no barrier waits for."""
    return instruction.name.startswith(("UTMASTG", "UTMAREDG", "UBLKRED"))


def is_spill(instruction: Instruction) -> bool:
    """A register kept in memory."""
    return instruction.name.split(".")[0] in ("STL", "LDL")


def is_slow(instruction: Instruction) -> bool:
    """What has no place in a K loop: atomics, strong accesses, memory barriers beyond the block.

    A barrier of the block's shared memory (``MEMBAR.ALL.CTA``) belongs to asynchronous copies.
    """
    base, *modifiers = instruction.name.split(".")
    return (
        base in ("ATOM", "ATOMG", "RED", "REDG", "CCTL", "ERRBAR")
        or "STRONG" in modifiers
        or (base == "MEMBAR" and modifiers[-1] != "CTA")
    )


def acquires(program: Program) -> list[int]:
    """Looks at flags: strong system-scope loads or atomics behind which the cache is invalidated."""
    return [
        number
        for number in program.where(_is_strong_read)
        if any(i.name == "CCTL.IVALL" for i in _after(program, number, 4))
    ]


def releases(program: Program) -> list[int]:
    """Raised flags: strong system-scope writes right behind a memory barrier of the system."""
    return [
        number
        for number in program.where(_is_strong_write)
        if any(_is_system_barrier(i) for i in _before(program, number, 6))
    ]


def _is_strong_read(instruction: Instruction) -> bool:
    return instruction.name.startswith(("LDG", "LD.", "ATOM")) and "STRONG.SYS" in instruction.name


def _is_strong_write(instruction: Instruction) -> bool:
    return (
        instruction.name.startswith(("STG", "ST.", "ATOM", "RED")) and "STRONG.SYS" in instruction.name
    )


def _is_system_barrier(instruction: Instruction) -> bool:
    return instruction.name.startswith("MEMBAR") and instruction.name.endswith(".SYS")


def _after(program: Program, number: int, count: int) -> list[Instruction]:
    stop = program.blocks[program.block_of[number]].stop
    return list(program.instructions[number + 1 : min(stop, number + 1 + count)])


def _before(program: Program, number: int, count: int) -> list[Instruction]:
    start = program.blocks[program.block_of[number]].start
    return list(program.instructions[max(start, number - count) : number])
