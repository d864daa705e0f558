"""Compile cases for named chips without a GPU, several at once, and read their machine code."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from . import gcn, sass
from .case import Case
from .code import Program

#: What a chip is called here -> Triton's backend, architecture and threads in a warp.
CHIPS: dict[str, tuple[str, int | str, int]] = {
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
#: Bytes of shared memory that a block may have.
SHARED_LIMIT = {"sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}


@dataclass
class Compiled:
    """One case compiled for one chip.

    Attributes:
        kernel: the function's name in the machine code.
        shared: bytes of shared memory.
        intermediate: Triton's own code (ttir).
        assembly: PTX, or AMD's assembly.
        machine: the disassembly of the machine code; AMD's assembly is one to one.
        triton: the version.
    """

    case: Case
    chip: str
    kernel: str
    shared: int
    intermediate: str = field(repr=False)
    assembly: str = field(repr=False)
    machine: str = field(repr=False)
    triton: str

    @property
    def name(self) -> str:
        return f"{self.case.name} on {self.chip}"

    @property
    def nvidia(self) -> bool:
        return self.chip.startswith("sm_")

    @cached_property
    def program(self) -> Program:
        parse = sass.parse if self.nvidia else gcn.parse
        return parse(self.machine, self.kernel)


def compile_case(case: Case, chip: str) -> Compiled:
    """Compile one case, in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiles = case.tiles(chip)
    function = case.function()
    constants = {**case.constants(chip), **case.ones()}
    names = list(function.arg_names)
    unknown = [name for name in constants if name not in names]
    if unknown:
        raise ValueError(f"{case.name}: {function.__name__} has no arguments {unknown}")
    signature = {
        name: "constexpr" if name in constants else case.pointers.get(name, "i32") for name in names
    }
    aligned = [name for name in names if case.is_aligned(name) and name not in constants]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, **case.options}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    made = triton.compile(source, target=GPUTarget(*CHIPS[chip]), options=options)
    nvidia = chip.startswith("sm_")
    assembly = made.asm["ptx" if nvidia else "amdgcn"]
    return Compiled(
        case,
        chip,
        made.metadata.name,
        made.metadata.shared,
        str(made.asm["ttir"]),
        assembly,
        disassemble(made.asm["cubin"]) if nvidia else assembly,
        triton.__version__,
    )


def disassemble(cubin: bytes) -> str:
    """NVIDIA's machine code as text, with the source line of every instruction."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run(
            # -ndf: no search for where a branch stack leads. Kernels have none; it takes its time.
            [_nvdisasm(), "-g", "-c", "-ndf", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


@lru_cache(maxsize=1)
def _nvdisasm() -> str:
    """The disassembler that comes with triton, beside its assembler."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.is_file():
        raise FileNotFoundError(f"this build of triton has no {tool.name}: expected it at {tool}")
    return str(tool)


def compile_all(
    wanted: Iterable[tuple[Case, str]], workers: int | None = None
) -> Iterator[Compiled]:
    """Compile pairs of a case and a chip in ``workers`` processes (one a core), in their order.

    What is compiled is kept in Triton's cache, as on any other compilation.
    """
    wanted = list(wanted)
    workers = min(workers or len(os.sched_getaffinity(0)), len(wanted))
    if workers <= 1:
        for case, chip in wanted:
            yield compile_case(case, chip)
        return
    # Forked, the workers would inherit whatever threads the parent has, and their locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        work: Callable[..., Iterator[Compiled]] = pool.map
        yield from work(compile_case, *zip(*wanted, strict=True), chunksize=4)
