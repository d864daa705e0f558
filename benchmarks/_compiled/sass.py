"""NVIDIA's disassembly (``nvdisasm -g -c``) as a program."""

from __future__ import annotations

import dataclasses
import re

from .code import Instruction, Program

_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)')
_LABEL = re.compile(r"^(\.L_x_\d+|\.text\.\S+|[$\w.]+):\s*$")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_MATRIX = re.compile(r"^([HIQ]GMMA|UTC\w*MMA|[HIDQ]MMA)\b")
_COPY = re.compile(r"^(LDGSTS|UTMALDG|UBLKCP)\b")
_BULK_STORE = re.compile(r"^(UTMASTG|UTMAREDG|UBLKRED)\b")
_SIZES = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_SCOPES = {".SYS": "sys", ".GPU": "gpu", ".VC": "gpu", ".CTA": "cta", ".SM": "cta"}


def parse(text: str, kernel: str) -> Program:
    """The program of a kernel; helper functions in the same file are left out."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    place = ("", 0)
    inside = False
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            inside = f".text.{kernel}," in line
            continue
        if not inside:
            continue
        if match := _PLACE.search(line):
            place = (match[1].rpartition("/")[2], int(match[2]))
        elif match := _LABEL.match(line):
            if match[1].startswith("$"):  # a helper, which follows the kernel
                break
            labels[match[1]] = len(instructions)
        elif match := _LINE.search(line):
            instructions.append(_instruction(match[1] or "", match[2], match[3].strip(), place))
    if not instructions:
        raise ValueError(f"the disassembly has no code of {kernel}")
    return Program(_ordered(instructions), labels)


def registers(text: str) -> int:
    """The highest vector register that a disassembly names, plus one."""
    return max((int(number) for number in re.findall(r"\bR(\d+)\b", text)), default=-1) + 1


def _named(opcode: str, table: dict[str, object]) -> object:
    return next((value for suffix, value in table.items() if suffix in opcode), None)


def _instruction(guard: str, opcode: str, operands: str, place: tuple[str, int]) -> Instruction:
    head = opcode.partition(".")[0]
    text = " ".join(part for part in (guard, opcode, operands) if part)
    made = Instruction(opcode, text, place=place)
    tags: set[str] = set()
    if head in ("BRA", "BRX", "JMP", "EXIT", "RET"):
        # `BRA.U UP0, label` and `BRA P3, label` have their condition among the operands.
        conditional = bool(guard) or re.match(r"!?U?[PR]\d", operands) is not None
        targets = tuple(_TARGET.findall(operands))
        return dataclasses.replace(made, targets=targets, ends=not conditional)
    size = int(str(_named(opcode, dict(_SIZES)) or 4))
    scope = str(_named(opcode, dict(_SCOPES)) or "")
    number = 0
    if _MATRIX.match(opcode):
        tags.add("matrix")
    elif _COPY.match(opcode):
        tags.add("bulk-store" if _is_bulk_store(opcode, operands) else "copy")
    elif _BULK_STORE.match(opcode):
        tags.add("bulk-store")
    elif head == "LDGDEPBAR":
        tags.add("commit")
    elif opcode.startswith("DEPBAR.LE") and operands.startswith("SB0"):
        tags.add("pending")
        number = int(operands.split(",")[1], 0)
    elif head in ("LDG", "LD"):
        tags.add("load")
        if ".STRONG" in opcode:
            tags.add("strong")
    elif head in ("STG", "ST"):
        tags.add("store")
        if ".STRONG" in opcode:
            tags.add("strong")
    elif head in ("ATOMG", "ATOM", "RED", "REDG"):
        tags |= {"atomic", "strong"}
    elif head == "MEMBAR":
        tags.add("fence")
    elif head == "BAR":
        tags.add("barrier")
    elif head in ("STL", "LDL"):
        tags.add("spill")
    return dataclasses.replace(made, tags=frozenset(tags), size=size, scope=scope, number=number)


def _is_bulk_store(opcode: str, operands: str) -> bool:
    """UBLKCP copies both ways; ``.G.S`` says from shared to global memory."""
    return opcode.startswith("UBLKCP") and ".G.S" in opcode


def _ordered(instructions: list[Instruction]) -> list[Instruction]:
    """Mark acquires (a strong access, then the first-level cache is emptied) and releases.

    A release is a strong write behind a fence of at least its scope, with no other access between.
    """
    result = list(instructions)
    fence = ""
    for index, now in enumerate(result):
        if "fence" in now.tags:
            fence = now.scope
        elif "strong" in now.tags and now.tags & {"atomic", "store"}:
            if fence == "sys" or (fence and fence == now.scope):
                result[index] = dataclasses.replace(now, tags=now.tags | {"release"})
            fence = ""
        elif now.tags & {"load", "store", "copy", "barrier"} or now.targets or now.ends:
            fence = ""
        if now.opcode.startswith("CCTL.IVALL"):
            for back in range(index - 1, max(index - 4, -1), -1):
                before = result[back]
                if "strong" in before.tags and before.tags & {"atomic", "load"}:
                    result[back] = dataclasses.replace(before, tags=before.tags | {"acquire"})
                    break
    return result
