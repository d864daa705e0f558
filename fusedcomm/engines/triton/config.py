"""Tile sizes by chip and shape. A table, not a tuner: every rank must choose the same."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """How a product is cut, and how its kernel is compiled."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


#: Persistent products of 16-bit elements with many rows.
_LARGE = Tiles(128, 256, 64, 8, 8, 3)
#: Few rows, as in decoding.
_SMALL = Tiles(64, 128, 64, 8, 4, 3)
#: Float32 is multiplied as such, not in tensor cores: every element costs registers and time.
_SINGLE = Tiles(64, 64, 32, 8, 4, 3)
#: Bytes of shared memory that a program may have on the smallest of the GPUs served.
_LEAST_SHARED = 101_376
#: Bytes of a multiprocessor's shared memory that a kernel needs beside its tiles.
_RESERVED = 2048
#: In the interpreter a step costs about the same up to 64³, so tiles are as large as that.
_INTERPRETED = 64


def tiles_of(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, depth: int
) -> Tiles:
    """The tiles for a product of this size.

    Args:
        rows, columns, depth: the most rows of a chunk, the output features and the input features.
    """
    if device.type == "cpu":
        return Tiles(_power(rows), _power(columns), _power(depth), group=4, warps=4, stages=1)
    chosen = _LARGE if rows > _SMALL.rows else _SMALL
    if dtype.itemsize > 2:
        chosen = _SINGLE
    return fitting(chosen, dtype.itemsize, _shared_bytes(device.index))


def fitting(tiles: Tiles, itemsize: int, shared: int) -> Tiles:
    """The same with so many stages, two at least, that they fit into ``shared`` bytes."""
    stage = (tiles.rows + tiles.columns) * tiles.depth * itemsize
    return tiles._replace(stages=max(2, min(tiles.stages, (shared - _RESERVED) // stage)))


@functools.cache
def _shared_bytes(device: int) -> int:
    """Shared memory that one program may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED))


def _power(extent: int) -> int:
    """The power of two from 16 (the least a dot takes) to 64 that holds ``extent``."""
    size = 16
    while size < min(extent, _INTERPRETED):
        size *= 2
    return size
