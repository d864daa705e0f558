"""AMD machine code (gfx942): reads Triton's ``amdgcn`` text, says what its instructions are.

The same questions as in ``sass.py``, with AMD's answers: a matrix product is ``v_mfma``; a tile on
its way to shared memory is loaded into registers and written with ``ds_write`` an iteration later;
a thread's stores have arrived once ``s_waitcnt vmcnt(0)`` let it pass; an acquire is a load past
the caches with ``buffer_inv`` behind it, a release ``buffer_wbl2`` with a write behind it.

Worked example: ``s_cbranch_scc1 .LBB0_4`` goes to ``.LBB0_4`` or falls through.
"""

from __future__ import annotations

import re

from .program import Instruction, ParseError, Program

_LABEL = re.compile(r"^([.$\w]+):")
_LINE = re.compile(r"^\t([a-z]\w*)\s*([^;]*?)\s*(?:;.*)?$")
_WIDTH = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2} | {
    f"dword{count}": 4 * int(count.strip("x") or 1) for count in ("", "x2", "x3", "x4")
}
_MEMORY = re.compile(
    r"^(?:global|flat|buffer)_(load|store)_(?:lds_)?(ubyte|sbyte|byte|ushort|sshort|short|dword(?:x\d)?)"
)


def read(text: str) -> Program:
    """The code of the one kernel in ``text``, up to its ``.Lfunc_end``.

    Raises:
        ParseError: control is moved in a way that is not known here, or there is no code.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line_number, line in enumerate(text.splitlines(), 1):
        if label := _LABEL.match(line):
            if label[1].startswith(".Lfunc_end"):
                break
            inside |= label[1].startswith(".Lfunc_begin")
            labels[label[1]] = len(instructions)
        elif inside and (found := _LINE.match(line)):
            name, operands = found.groups()
            targets: tuple[str, ...] = ()
            if name == "s_branch" or name.startswith("s_cbranch"):
                targets = (operands,)
            elif name.startswith(("s_setpc", "s_swappc", "s_call", "s_rfe")):
                raise ParseError(f"line {line_number}: {name} moves control in an unknown way")
            falls_through = name not in ("s_branch", "s_endpgm")
            instructions.append(
                Instruction(name, operands, "", targets, falls_through, line_number)
            )
    return Program(instructions, labels)


# ---- what the instructions are


def is_barrier(instruction: Instruction) -> bool:
    """A barrier of the whole block."""
    return instruction.name == "s_barrier"


def is_drain(instruction: Instruction) -> bool:
    """Waits until all that this thread has stored to memory has arrived there."""
    return instruction.name == "s_waitcnt" and "vmcnt(0)" in instruction.operands


def is_matrix(instruction: Instruction) -> bool:
    """A product on the matrix cores."""
    return instruction.name.startswith("v_mfma")


def is_copy(instruction: Instruction) -> bool:
    """A load of a tile, at least eight bytes a thread, on its way to shared memory."""
    return load_bytes(instruction) >= 8


def is_shared_write(instruction: Instruction) -> bool:
    """A write of shared memory."""
    return instruction.name.startswith("ds_write")


def store_bytes(instruction: Instruction) -> int:
    """The bytes that a thread stores to global memory in the ordinary way; 0 of all others."""
    return _bytes(instruction, "store")


def load_bytes(instruction: Instruction) -> int:
    """The bytes that a thread loads from global memory in the ordinary way."""
    return _bytes(instruction, "load")


def _bytes(instruction: Instruction, kind: str) -> int:
    found = _MEMORY.match(instruction.name)
    if not found or found[1] != kind or _past_caches(instruction):
        return 0
    return _WIDTH[found[2]]


def is_spill(instruction: Instruction) -> bool:
    """A register kept in memory."""
    return instruction.name.startswith("scratch_")


def is_slow(instruction: Instruction) -> bool:
    """What has no place in a K loop: atomics, accesses past the caches, memory barriers."""
    return (
        "_atomic_" in instruction.name
        or instruction.name.startswith(("buffer_inv", "buffer_wbl2"))
        or (bool(_MEMORY.match(instruction.name)) and _past_caches(instruction))
    )


def acquires(program: Program) -> list[int]:
    """Looks at flags: system-scope reads behind which the caches are invalidated."""

    def reads(instruction: Instruction) -> bool:
        loads = "_load_dword" in instruction.name and _past_caches(instruction)
        return loads or ("_atomic_" in instruction.name and "sc1" in instruction.operands.split())

    found = []
    for number in program.where(reads):
        stop = program.blocks[program.block_of[number]].stop
        behind = program.instructions[number + 1 : min(stop, number + 5)]
        if any(i.name == "buffer_inv" and i.operands == "sc0 sc1" for i in behind):
            found.append(number)
    return found


def releases(program: Program) -> list[int]:
    """Raised flags: system-scope writes right behind a write-back of the caches."""

    def writes(instruction: Instruction) -> bool:
        stores = "_store_dword" in instruction.name and _past_caches(instruction)
        return stores or ("_atomic_" in instruction.name and "sc1" in instruction.operands.split())

    found = []
    for number in program.where(writes):
        start = program.blocks[program.block_of[number]].start
        before = program.instructions[max(start, number - 6) : number]
        if any(i.name == "buffer_wbl2" and i.operands == "sc0 sc1" for i in before):
            found.append(number)
    return found


def _past_caches(instruction: Instruction) -> bool:
    """sc0 and sc1: of the system's scope."""
    return {"sc0", "sc1"} <= set(instruction.operands.split())
