"""Which kernels are compiled, and how: chips, dtypes, tiles, variants.

The tiles are those of ``fusedcomm.engines.triton.config``, which cannot be asked here because it
imports torch; ``tests/compile`` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget

from . import gcn, sass

# The device code is fusedcomm.kernels, and also a folder of the repository: without torch there is
# no importing fusedcomm.
if __name__.startswith("fusedcomm."):
    from fusedcomm.kernels import all_gather_linear as gather
    from fusedcomm.kernels import linear_all_reduce as all_reduce
    from fusedcomm.kernels import linear_reduce_scatter as scatter
    from fusedcomm.kernels import signals, tiles
else:
    from kernels import all_gather_linear as gather
    from kernels import linear_all_reduce as all_reduce
    from kernels import linear_reduce_scatter as scatter
    from kernels import signals, tiles


@dataclass(frozen=True)
class Chip:
    """What code is made for.

    Attributes:
        target: Triton's name of it.
        machine: the module that reads its code.
        shared: bytes of shared memory that a block can have.
        stages: the most buffers of a K loop that fit.
        store_bytes: the least that a thread may store of a tile at once. AMD's matrix cores leave
            four columns with a thread, and Triton stores from there.
        loop_limit: the most instructions of an iteration at 128x256x64, 8 warps, 3 stages, by
            Triton version, "" for those not named; None without such a limit.
    """

    target: GPUTarget
    machine: ModuleType
    shared: int
    stages: int
    store_bytes: int = 16
    loop_limit: Mapping[str, int] | None = None


CHIPS = {
    "sm_90": Chip(GPUTarget("cuda", 90, 32), sass, 232_448, 3, loop_limit={"": 90}),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), sass, 232_448, 3, loop_limit={"": 95, "3.6": 100}),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), gcn, 65_536, 2, store_bytes=8),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel and what its source says that its machine code must have.

    Attributes:
        waits: how many waits. Each makes two looks at the flag, the first and the loop's, and
            raises the failure record's flag.
        signals: how many signals besides.
        awaited: what is read after a wait: "product" if the operands of its matrix product,
            "rest" if what is loaded outside of one, None if nothing is.
        product: whether it has a matrix product.
    """

    function: Any
    waits: int = 0
    signals: int = 0
    awaited: str | None = None
    product: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__


BEGIN = Kernel(signals.begin, waits=1, product=False)
END = Kernel(signals.end, signals=1, product=False)
PLAIN = Kernel(tiles.linear_kernel)
PUSH = Kernel(gather.push_kernel, signals=1, product=False)
CONSUME = Kernel(gather.consume_kernel, waits=1, awaited="product")
WEIGHT_GRAD = Kernel(gather.weight_grad_kernel, waits=1, awaited="product")
PRODUCE = Kernel(scatter.produce_kernel, signals=1)
REDUCE = Kernel(scatter.reduce_kernel, waits=1, awaited="rest", product=False)
ONE_SHOT = Kernel(all_reduce.one_shot_kernel, waits=1, signals=1, awaited="rest")
TWO_SHOT = Kernel(all_reduce.two_shot_kernel, waits=2, signals=2, awaited="rest")

DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@dataclass(frozen=True)
class Case:
    """A kernel as it is compiled.

    Attributes:
        tile: rows, columns and depth of a tile of the product; of kernels without one, the block.
        stages: 0 for as many as the chip has room for.
        constants: compile-time arguments that differ from ``_CONSTANTS``.
        note: what sets the case apart, for people.
        plain: constants of the plain product that it is compared with; None if with none.
    """

    kernel: Kernel
    dtype: str = "bf16"
    tile: tuple[int, int, int] = (128, 256, 64)
    warps: int = 8
    stages: int = 0
    constants: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    plain: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.tile))
        note = f" {self.note}" if self.note else ""
        return f"{self.kernel.name} {self.dtype} {shape} {self.warps}w{note}"

    def on(self, chip: Chip) -> Case:
        """With the number of stages that it has on this chip."""
        return self if self.stages else replace(self, stages=chip.stages)

    def reference(self) -> Case | None:
        """The plain product of the same tile, if it is compared with one."""
        if self.plain is None:
            return None
        return replace(self, kernel=PLAIN, constants=self.plain, note="", plain=None)


#: Compile-time arguments by name: the tiles' sizes come from the case.
_CONSTANTS: Mapping[str, Any] = {
    "GROUP": 8,
    "PRECISION": "ieee",
    "EVEN_K": True,
    "HAS_BIAS": True,
    "HAS_INIT": False,
    "PAIRS": 1,
    # Strides of 1, which Triton takes for constants too.
    "stride_wk": 1,
    "stride_wk0": 1,
    "stride_wk1": 1,
    "stride_on": 1,
    "stride_gk": 1,
}
_POINTERS = {"bases": "*i64", "counters": "*i32", "record": "*i32"}
_TENSORS = {"x", "x0", "x1", "weight", "weight0", "weight1", "bias", "y", "init", "other", "grad"}
_LONG = {"data_offset", "region_bytes"}
#: Integers that are multiples of 16 where it matters; Triton looks at the values of a launch.
_ALIGNED = {
    "N", "K", "K0", "K1", "piece_rows", "region_bytes", "stride_xm", "stride_ym", "stride_wn",
    "stride_wk", "stride_wn0", "stride_wk0", "stride_wn1", "stride_wk1", "stride_om", "stride_gn",
    "stride_gk",
}  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """What ``triton.compiler.ASTSource`` takes."""

    types: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[list[Any]]]


def signature(case: Case) -> Signature:
    """The arguments' types, compile-time values and alignments, as a launch would find them."""
    function = case.kernel.function
    rows, columns, depth = case.tile
    dtype = DTYPES[case.dtype]
    values = {**_CONSTANTS, "BM": rows, "BN": columns, "BK": depth, "WIRE": dtype}
    values |= case.constants
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if values.get(name) is not None:
            types[name] = "constexpr"
            constants[(index,)] = values[name]
        elif name in _TENSORS:
            types[name] = f"*{case.dtype}"
        else:
            types[name] = _POINTERS.get(name, "i64" if name in _LONG else "i32")
        aligned = name in _ALIGNED and not parameter.do_not_specialize
        if types[name].startswith("*") or (aligned and types[name] != "constexpr"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return Signature(types, constants, attributes)


def _cases() -> list[Case]:
    small: Any = {"tile": (64, 128, 64), "warps": 4}
    alike: Any = {"plain": {}}
    # Of a backward pass: the weight is read along its other dimension.
    turned = {"stride_wn": 1, "stride_wk": None}
    cases = [
        Case(BEGIN, tile=(1, 1, 1), warps=4),
        Case(END, tile=(1, 1, 1), warps=4),
        Case(PLAIN),
        Case(PLAIN, **small),
        Case(PUSH, tile=(64, 1, 64), warps=4),
        Case(CONSUME, **alike),
        Case(CONSUME, constants=turned, note="turned weight", plain=turned),
        Case(CONSUME, **small, **alike),
        Case(WEIGHT_GRAD, tile=(64, 128, 256)),
        Case(WEIGHT_GRAD, tile=(64, 128, 256), constants={"stride_gn": 1, "stride_gk": None}, note="turned"),
        Case(PRODUCE, **alike),
        Case(PRODUCE, constants={"PAIRS": 2, "HAS_INIT": True}, note="two pairs, init", plain={}),
        Case(REDUCE, tile=(32, 128, 1), warps=4),
        Case(ONE_SHOT, **small, **alike),
        Case(TWO_SHOT, **small, **alike),
    ]
    return cases


CASES = _cases()
