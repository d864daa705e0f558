"""How the collectives' kernels cut what they move, and the memory it takes.

Every rank must choose the same: a table, not a tuner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedcomm.planning.collectives import region_of
from fusedcomm.protocol import Space

#: Bytes of one part that go through a slot at once; a larger part goes window by window.
WINDOW_BYTES = 1 << 26
#: Bytes of a vector up to which memory for all of it is reserved on every rank: more than what is
#: ever added in one shot by default.
_ONE_SHOT_BYTES = 1 << 20
#: Elements to which parts are rounded where the library may choose them: 16 bytes of any dtype.
ALIGN = 16


class Pieces(NamedTuple):
    """``number`` pieces of ``size`` elements, moved ``block`` at a time by ``warps`` warps."""

    number: int
    size: int
    block: int
    warps: int


#: Fewest elements of a piece that are worth a flag and a program of their own, and most pieces of a
#: part: with seven peers these are about as many programs as a GPU has multiprocessors.
_LEAST, _MOST = 1 << 13, 16
#: Where one program carries a piece through every step.
_MOST_OF_A_RING = 64
_BLOCK, _WARPS = 4096, 8
#: In the interpreter a program costs about as much as what it moves.
_INTERPRETED = (256, 3, 512)


def pieces_of(device: torch.device, elements: int, ring: bool = False) -> Pieces:
    """The pieces of a part of ``elements``; at least one.

    Args:
        ring: whether a program carries its piece of every part, and pushes to one peer.
    """
    least, most, block = _LEAST, _MOST_OF_A_RING if ring else _MOST, _BLOCK
    if device.type == "cpu":
        least, most, block = _INTERPRETED
    count = min(most, max(1, elements // least))
    size = -(-elements // (count * ALIGN)) * ALIGN
    return Pieces(count, max(size, ALIGN), block, _WARPS)


def part_of(elements: int, world_size: int) -> int:
    """Elements of a rank's part of a vector where the library chooses: a multiple of ``ALIGN``."""
    return -(-elements // (world_size * ALIGN)) * ALIGN


def exchange_space(regions: int, nbytes: int, chunks: int) -> Space:
    """Every rank writes ``nbytes`` in ``chunks`` pieces into each other's memory.

    Args:
        regions: the world size, or 1 where every rank writes into its own memory or into all.
    """
    return Space("exchange" if regions > 1 else "switch", regions, region_of(nbytes), chunks)


def spaces(
    op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype, device: torch.device
) -> list[Space]:
    """The memory that the kernels of a collective take for a full tensor of this shape.

    That of an all-reduce is for the algorithm that is chosen by default, or for ``ring``.
    """
    size = math.prod(shape)
    most = WINDOW_BYTES // dtype.itemsize
    if op != "all_reduce":
        # How the tensor is cut is not known here: an all-to-all may send all of it to one rank.
        whole = op in ("all_to_all", "broadcast")
        window = min(most, size if whole else part_of(size, world_size))
        pieces = pieces_of(device, window).number
        return [exchange_space(world_size, window * dtype.itemsize, pieces)]
    window = min(size, world_size * most)
    part = part_of(window, world_size)
    chunks = max(
        2 * pieces_of(device, part).number,
        2 * world_size * pieces_of(device, part, ring=True).number,
        pieces_of(device, window).number,
    )
    region = max(2, world_size) * part * dtype.itemsize
    if size * dtype.itemsize <= _ONE_SHOT_BYTES:
        region = max(region, size * dtype.itemsize)
    return [exchange_space(world_size, region, chunks)]
