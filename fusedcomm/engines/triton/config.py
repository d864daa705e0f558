"""Tile sizes by chip and shape. A table, not a tuner: every rank must choose the same."""

from __future__ import annotations

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


#: Persistent products with many rows, per two bytes an element (wider elements: half the depth).
_LARGE = Tiles(128, 256, 64, 8, 8, 3)
#: Few rows, as in decoding.
_SMALL = Tiles(64, 128, 64, 8, 4, 3)
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
    return chosen._replace(depth=chosen.depth * 2 // dtype.itemsize)


def _power(extent: int) -> int:
    """The power of two from 16 (the least a dot takes) to 64 that holds ``extent``."""
    size = 16
    while size < min(extent, _INTERPRETED):
        size *= 2
    return size
