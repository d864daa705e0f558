"""What memory allows: a collective's copies and sums on private tensors, with nobody waited for.

A process cannot read what another one holds in private, so that what a rank gives has to be copied
into shared memory, and from there to where it belongs. Here a rank does just that, on a tensor and
a buffer of its own: torch's copies, in pieces that stay in cache, and no flag, no peer and no
choice. What is made of torch's operations on such memory takes longer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Bytes copied in at once, still in cache when they are copied out (256 KB: a fifth slower).
_PIECE_BYTES = 1 << 20


def copies(op: str, x: Tensor, out: Tensor, rank: int, world_size: int) -> Callable[[], Tensor]:
    """A function that copies, and adds, what this rank does in a collective of flat tensors.

    Args:
        op: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        x, out: input and result of the right sizes; out is filled with wrong values.
    """
    sums = op in ("all_reduce", "reduce_scatter")
    own, given = _parted(x, rank, world_size) if op != "all_gather" else (x, [x])
    mine, taken = _parted(out, rank, world_size) if op != "reduce_scatter" else (out, [])
    length = max(1, _PIECE_BYTES // x.element_size() // max(1, len(given)))
    buffers = [x.new_empty(length) for _ in given]

    def run() -> Tensor:
        for start in range(0, mine.numel(), length):
            part = slice(start, min(start + length, mine.numel()))
            held = [buffer[: part.stop - start] for buffer in buffers]
            for buffer, source in zip(held, given, strict=True):
                buffer.copy_(source[part])
            if sums:
                torch.add(own[part], held[0], out=mine[part])
                for more in held[1:]:
                    mine[part].add_(more)
            else:
                mine[part].copy_(own[part])
            if op == "all_reduce":
                held[0].copy_(mine[part])
            for number, target in enumerate(taken):
                target[part].copy_(held[number % len(held)])
        return out

    return run


def _parted(x: Tensor, rank: int, world_size: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's part of a flat tensor, and the other ranks' parts."""
    parts = list(x.chunk(world_size))
    return parts.pop(rank), parts
