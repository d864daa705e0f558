"""Compiling a case without a GPU: Triton for the target, and NVIDIA's disassembler."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import ASTSource

from .cases import CHIPS, Case, Chip, signature
from .program import Program


@dataclass(frozen=True)
class Compiled:
    """What came of a case on a chip.

    Attributes:
        program: the machine code as a graph.
        text: the machine code as text.
        high: Triton's last form of the kernel before it is cut up for threads (``ttgir``).
        assembly: what the chip's assembler was given (``ptx``, ``amdgcn``).
        shared: bytes of shared memory.
    """

    case: Case
    chip: Chip
    program: Program
    text: str
    high: str
    assembly: str
    shared: int


def compile_case(case: Case, chip_name: str) -> Compiled:
    """Compile ``case`` for a chip of ``CHIPS``; takes about a second, not twice (Triton's cache)."""
    chip = CHIPS[chip_name]
    case = case.on(chip)
    types, constants, attributes = vars(signature(case)).values()
    source = ASTSource(case.kernel.function, types, constants, attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    made = triton.compile(source, target=chip.target, options=options)
    if "cubin" in made.asm:
        assembly, text = made.asm["ptx"], _disassembled(made.asm["cubin"])
    else:
        assembly = text = made.asm["amdgcn"]
    program = chip.machine.read(text)
    return Compiled(case, chip, program, text, made.asm["ttgir"], assembly, made.metadata.shared)


def _disassembled(cubin: bytes) -> str:
    tool = triton.knobs.nvidia.nvdisasm.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout
