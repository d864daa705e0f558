"""Tile sizes by chip and shape. A table, not a tuner: every rank must choose the same.

The compile tests hold every entry of ``CHIPS`` to the rules of docs/kernels.md. They load this file
where only Triton is installed: so it imports torch no sooner than it needs it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Tiles(NamedTuple):
    """How a product is cut, and how its kernel is compiled.

    Attributes:
        rows, columns, depth: of a tile and of a step along the inner dimension.
        group: blocks of rows that are worked on together, see ``kernels/tiles.py``.
        registers: the most that a thread may have (NVIDIA); None leaves it to the assembler, which
            then rather spills than take more than what lets two blocks share a multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    registers: int | None = None


#: chip -> what is multiplied -> tiles:
#:
#: - "large": many rows, 16-bit elements, weights whose rows are contiguous;
#: - "small": few rows, as in decoding;
#: - "transposed": weights whose columns are contiguous, as in the gradients of inputs;
#: - "epilogue": results that need more registers than their accumulator: float32 on the wire, or
#:   another tensor added;
#: - "gated transposed": two sums, of such weights;
#: - "gradient": of a weight, where both operands lie transposed;
#: - "float32": on the vector units;
#: - "reduce": no product, sums of partials;
#: - "activation": no product either, experts' activations and their gradients: a thread has 16
#:   elements of each tensor.
CHIPS = {
    "sm_90": {
        "large": Tiles(128, 256, 64, 8, 8, 3, 255),
        "small": Tiles(64, 128, 64, 8, 4, 3, 255),
        "transposed": Tiles(128, 256, 64, 8, 8, 3, 255),
        "epilogue": Tiles(128, 128, 64, 8, 8, 3, 255),
        "gated transposed": Tiles(64, 128, 64, 8, 8, 3, 255),
        "gradient": Tiles(128, 256, 64, 8, 8, 3, 255),
        "float32": Tiles(64, 64, 32, 8, 4, 3, 255),
        "reduce": Tiles(32, 128, 0, 1, 4, 3, 255),
        "activation": Tiles(4, 512, 0, 1, 4, 3, 255),
    },
    "sm_100": {
        "large": Tiles(128, 256, 64, 8, 8, 3, 255),
        "small": Tiles(64, 128, 64, 8, 8, 3, 255),
        "transposed": Tiles(128, 128, 64, 8, 8, 3, 255),
        "epilogue": Tiles(128, 128, 64, 8, 8, 3, 255),
        "gated transposed": Tiles(64, 128, 64, 8, 8, 3, 255),
        "gradient": Tiles(128, 256, 64, 8, 8, 3, 255),
        "float32": Tiles(64, 64, 32, 8, 4, 3, 255),
        "reduce": Tiles(32, 128, 0, 1, 4, 3, 255),
        "activation": Tiles(4, 512, 0, 1, 4, 3, 255),
    },
    # 64 KiB of shared memory: with two stages one of them lies in registers.
    "gfx942": {
        "large": Tiles(128, 256, 64, 8, 8, 2),
        "small": Tiles(64, 128, 64, 8, 4, 2),
        "transposed": Tiles(128, 256, 64, 8, 8, 2),
        "epilogue": Tiles(128, 128, 64, 8, 8, 2),
        "gated transposed": Tiles(64, 128, 64, 8, 4, 2),
        "gradient": Tiles(128, 128, 64, 8, 8, 2),
        "float32": Tiles(64, 64, 32, 8, 4, 2),
        "reduce": Tiles(32, 128, 0, 1, 4, 2),
        "activation": Tiles(4, 512, 0, 1, 4, 2),
    },
}
#: Registers that a thread of a collective may have: left to itself the assembler rather spills.
COLLECTIVE_REGISTERS = 128
#: Bytes of shared memory that a program may have on the smallest of the GPUs served.
_LEAST_SHARED = 101_376
#: Bytes of a multiprocessor's shared memory that a kernel needs beside its tiles.
_RESERVED = 2048
#: In the interpreter a step costs about the same up to 64³, so tiles are as large as that.
_INTERPRETED = 64


def tiles_of(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    depth: int,
    product: str = "large",
) -> Tiles:
    """The tiles for a product of this size.

    Args:
        rows, columns, depth: the most rows of a chunk, the output features and the input features.
        product: the kind of an entry of ``CHIPS``; few rows and float32 have kinds of their own.
    """
    if device.type == "cpu":
        return Tiles(_power(rows), _power(columns), _power(depth), group=4, warps=4, stages=1)
    table = CHIPS[_chip(device.index)]
    if dtype.itemsize > 2:
        product = "float32"
    elif product != "gradient" and rows <= table["small"].rows:
        product = "small"
    return fitting(table[product], dtype.itemsize, _shared_bytes(device.index))


def reduce_tiles(device: torch.device) -> Tiles:
    """The blocks in which partials are added."""
    if device.type == "cpu":
        return Tiles(32, 128, 0, group=1, warps=4, stages=1)
    return CHIPS[_chip(device.index)]["reduce"]


def activation_tiles(device: torch.device) -> Tiles:
    """The blocks in which experts' activations are made."""
    if device.type == "cpu":
        return Tiles(_INTERPRETED, 128, 0, group=1, warps=4, stages=1)
    return CHIPS[_chip(device.index)]["activation"]


def fitting(tiles: Tiles, itemsize: int, shared: int) -> Tiles:
    """The same with so many stages, two at least, that they fit into ``shared`` bytes."""
    stage = (tiles.rows + tiles.columns) * tiles.depth * itemsize
    return tiles._replace(stages=max(2, min(tiles.stages, (shared - _RESERVED) // stage)))


def compiler_options(tiles: Tiles) -> dict[str, int]:
    """What a launch says to the compiler besides the constants."""
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return options if tiles.registers is None else {**options, "maxnreg": tiles.registers}


@functools.cache
def _chip(device: int) -> str:
    """The entry of ``CHIPS`` for a GPU; older and unknown ones take Hopper's."""
    import torch

    return "sm_100" if torch.cuda.get_device_capability(device)[0] == 10 else "sm_90"


@functools.cache
def _shared_bytes(device: int) -> int:
    """Shared memory that one program may have."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED))


def _power(extent: int) -> int:
    """The power of two from 16 (the least a dot takes) to 64 that holds ``extent``."""
    size = 16
    while size < min(extent, _INTERPRETED):
        size *= 2
    return size
