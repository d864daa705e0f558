"""What a kernel is compiled with, and what must be in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import loading


@dataclass(frozen=True)
class Case:
    """A kernel as it is compiled.

    Attributes:
        file, kernel: the module of ``kernels/`` and the function in it.
        variant: what tells this case from others of the same kernel.
        product: which tiles of ``engines/triton/config.py``, such as "large"; None for a kernel
            without any, which brings BM, BN or BK among its constants.
        plain: the case without signals that its K loop is compared with; None if it is one.
        waits, signals: such calls in the source, those in functions that it calls included.
        more: constants besides the tiles'.
        units: arguments that are 1, as contiguous strides are.
        pointers: argument -> Triton's type, of pointers and of whatever is no int32.
        rest: it stores what is left over at the end singly.
        numbers: it stores numbers of a small table, not rows: one a thread will do.
        chips: those that it can be compiled for; None says all.
        extents: the constants that take the tiles' rows, columns and depth.
        warps: of a kernel without tiles from the table.
        options: further options for the compiler.
        standard: held to the absolute bounds (16-bit, weights with contiguous rows, whole K steps).
    """

    file: str
    kernel: str
    variant: str = ""
    product: str | None = None
    plain: str | None = None
    waits: int = 0
    signals: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    pointers: Mapping[str, str] = field(default_factory=dict)
    rest: bool = False
    numbers: bool = False
    chips: tuple[str, ...] | None = None
    extents: tuple[str, str, str] = ("BM", "BN", "BK")
    warps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    standard: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.variant}" if self.variant else self.kernel

    @property
    def on_tensor_cores(self) -> bool:
        """Whether it multiplies there: float32 in full precision does not, on NVIDIA's."""
        return self.product not in (None, "float32", "reduce", "activation")

    def function(self) -> Any:
        """The ``triton.jit`` function."""
        return getattr(loading.kernels(self.file), self.kernel)

    def tiles(self, chip: str) -> Any:
        """The tiles and the compiler's settings, as the engine chooses them on this chip."""
        config = loading.config()
        if self.product is None:
            return config.Tiles(0, 0, 0, group=1, warps=self.warps, stages=3)
        return config.CHIPS[chip][self.product]

    def constants(self, chip: str) -> dict[str, Any]:
        """The values of the kernel's compile-time constants."""
        return {**self.more, **self._tile_constants(chip)}

    def _tile_constants(self, chip: str) -> dict[str, Any]:
        if self.product is None:
            return {}
        tiles = self.tiles(chip)
        sizes = (tiles.rows, tiles.columns, tiles.depth)
        known = {**dict(zip(self.extents, sizes, strict=True)), "GROUP": tiles.group}
        taken = self.function().arg_names
        return {name: value for name, value in known.items() if name in taken}

    def ones(self) -> dict[str, int]:
        return dict.fromkeys(self.units, 1)

    def is_aligned(self, name: str) -> bool:
        """Whether an argument is known to be a multiple of 16, as Triton finds at a launch."""
        function = self.function()
        number = function.arg_names.index(name)
        if name in self.pointers:
            return self.pointers[name].startswith("*")
        return not function.params[number].do_not_specialize
