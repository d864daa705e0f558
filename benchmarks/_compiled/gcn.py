"""AMD's assembly, as LLVM writes it, as a program.

Copies to shared memory go through registers: what overlaps there is the global load, so that loads
of the K loop are tagged "copy" as well.
"""

from __future__ import annotations

import dataclasses
import re

from .code import Instruction, Program

_LABEL = re.compile(r"^(\.?L?BB\w+):")
_PLACE = re.compile(r"^\s*\.loc\s.*;\s*([\w.]+):(\d+):\d+")
_LINE = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
_GLOBAL = re.compile(r"^(global|buffer|flat)_(load|store|atomic)_(\w+)")
_SIZES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def parse(text: str, kernel: str) -> Program:
    """The program of a kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    place = ("", 0)
    inside = False
    for line in text.splitlines():
        if line.startswith(f"{kernel}:"):
            inside = True
        elif inside and line.lstrip().startswith((".section", ".Lfunc_end")):
            break
        elif not inside:
            continue
        elif match := _PLACE.match(line):
            place = (match[1], int(match[2]))
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := _LINE.match(line):
            instructions.append(_instruction(match[1], match[2].strip(), place))
    if not instructions:
        raise ValueError(f"the assembly has no code of {kernel}")
    return Program(_ordered(instructions), labels)


def resource(text: str, name: str) -> int:
    """A number of the kernel's metadata, such as ``vgpr_count`` or ``vgpr_spill_count``."""
    match = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"the assembly's metadata has no {name}")
    return int(match[1])


def _instruction(opcode: str, operands: str, place: tuple[str, int]) -> Instruction:
    made = Instruction(opcode, f"{opcode} {operands}".strip(), place=place)
    if opcode.startswith(("s_branch", "s_cbranch")):
        return dataclasses.replace(made, targets=(operands,), ends=opcode == "s_branch")
    if opcode in ("s_endpgm", "s_setpc_b64"):
        return dataclasses.replace(made, ends=True)
    tags: set[str] = set()
    size, scope = 0, ""
    if match := _GLOBAL.match(opcode):
        kind, what = match[2], match[3]
        size = next((value for name, value in _SIZES.items() if what.startswith(name)), 0)
        size = size or (1 if "byte" in what else 2)
        tags.add(kind)
        if kind == "atomic":
            tags.add("strong")
        elif kind == "load":
            tags.add("copy")
            if "sc1" in operands.split():
                tags.add("strong")
    elif opcode.startswith(("v_mfma", "v_smfmac")):
        tags.add("matrix")
    elif opcode == "s_barrier":
        tags.add("barrier")
    elif opcode in ("buffer_wbl2", "buffer_inv"):
        tags.add("fence" if opcode == "buffer_wbl2" else "invalidate")
        scope = {"sc0 sc1": "sys", "sc1": "gpu"}.get(operands, "cta")
    elif opcode.startswith("scratch_"):
        tags.add("spill")
    elif opcode == "s_waitcnt" and "vmcnt(0)" in operands:
        tags.add("drained")
    return dataclasses.replace(made, tags=frozenset(tags), size=size, scope=scope)


def _ordered(instructions: list[Instruction]) -> list[Instruction]:
    """Mark releases (behind a write-back of the second-level cache) and acquires (invalidated).

    The scope is that of the cache operation: an atomic alone does not say it.
    """
    result = list(instructions)
    fence = ""
    for index, now in enumerate(result):
        if "fence" in now.tags:
            fence = now.scope
        elif "strong" in now.tags and now.tags & {"atomic", "store"}:
            if fence:
                result[index] = dataclasses.replace(now, tags=now.tags | {"release"}, scope=fence)
            fence = ""
        elif now.tags & {"load", "store", "barrier"} or now.targets or now.ends:
            fence = ""
        if "invalidate" in now.tags:
            for back in range(index - 1, max(index - 5, -1), -1):
                before = result[back]
                if "strong" in before.tags:
                    result[back] = dataclasses.replace(
                        before, tags=before.tags | {"acquire"}, scope=now.scope
                    )
                    break
    return result
