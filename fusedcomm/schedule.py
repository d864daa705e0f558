"""Orders of chunks: pure functions of integers.

Every rank starts at another peer (its successor), so that no two ranks hit one peer at once.
"""

from __future__ import annotations


def shard_bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """How ``torch.chunk`` cuts ``total`` rows into ``parts``: (start, stop) of each, maybe empty.

    >>> shard_bounds(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    >>> shard_bounds(2, 3)
    [(0, 1), (1, 2), (2, 2)]
    """
    size = -(-total // parts)
    return [(min(i * size, total), min((i + 1) * size, total)) for i in range(parts)]


def scaled_bounds(total: int, parts: int, inner: int) -> list[tuple[int, int]]:
    """``shard_bounds`` in rows of a matrix in which every one of ``total`` is ``inner`` rows.

    >>> scaled_bounds(7, 3, 2)
    [(0, 6), (6, 12), (12, 14)]
    """
    return [(start * inner, stop * inner) for start, stop in shard_bounds(total, parts)]


def piece_bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a chunk of ``rows`` into ``pieces``, the units that are signalled; some may be empty."""
    return shard_bounds(rows, pieces)


def successors(rank: int, world_size: int) -> list[int]:
    """The other ranks, beginning with the next one.

    >>> successors(1, 4)
    [2, 3, 0]
    """
    return [(rank + step) % world_size for step in range(1, world_size)]


def reduce_order(rank: int, world_size: int) -> list[int]:
    """In which order a rank makes the chunks of a reduce-scatter: its own last.

    The chunk of owner ``o`` is made first by ``o - 1`` and last by ``o + 1``, in the step before
    ``o`` makes its own: when it has, the others' parts lie there.
    """
    return [*successors(rank, world_size), rank]
