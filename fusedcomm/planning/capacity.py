"""Which choices find room where a rank can receive only so many rows: pure functions of integers.

The words and axes are those of ``planning.routing``.
"""

from __future__ import annotations

import numpy as np

from fusedcomm.planning.routing import Array, Placement


def kept_rows(counts_WE: Array, placement: Placement, align: int, capacity: int) -> Array:  # noqa: N803
    """For every (source, reader): whether all its choices find room (1), some may (0), none (-1).

    Choices find room in the order of source rank, token, choice: the first that does not fit, and
    all behind it, are dropped. So of all sources at most one keeps a part.

    >>> from fusedcomm.planning.routing import place
    >>> table = np.array([[2, 1], [2, 0], [1, 1]])
    >>> kept_rows(table, place(2, 3, (0, 0)), align=1, capacity=4)[:, 0].tolist()
    [1, 0, -1]
    """
    world_size = len(counts_WE)
    kept = np.ones((world_size, world_size), dtype=np.int64)
    so_far = np.cumsum(counts_WE, 0)
    padded = -(-so_far // align) * align
    for reader in range(world_size):
        own = placement.columns(reader)
        fits = padded[:, own.start : own.stop].sum(1) <= capacity
        if not fits.all():
            boundary = int(np.argmin(fits))
            kept[boundary, reader] = 0
            kept[boundary + 1 :, reader] = -1
    return kept


def drop(
    columns: Array,
    rank: int,
    counts_WE: Array,  # noqa: N803
    placement: Placement,
    align: int,
    capacity: int,
) -> Array:
    """The columns ``[T, k]`` of ``rank`` with those that find no room replaced by "no expert".

    Rank 1 may add one row to the rank that has experts 0 and 1, and loses its last token there:

    >>> from fusedcomm.planning.routing import place
    >>> table = np.array([[2, 1], [1, 1]])
    >>> drop(np.array([[1], [0]]), 1, table, place(2, 2, (0, 0)), align=1, capacity=4).tolist()
    [[1], [2]]
    """
    none = placement.num_experts
    flat = columns.reshape(-1).copy()
    before = counts_WE[:rank].sum(0)
    for reader, kept in enumerate(kept_rows(counts_WE, placement, align, capacity)[rank].tolist()):
        own = placement.columns(reader)
        here = np.flatnonzero((flat >= own.start) & (flat < own.stop))
        if kept == 1:
            continue
        if kept == 0:
            mine = flat[here] - own.start
            # How many of the same expert lie in front of each, those of earlier sources included.
            number = np.empty_like(mine)
            sort = np.argsort(mine, kind="stable")
            counts = np.bincount(mine, minlength=len(own))
            number[sort] = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
            number += before[own.start : own.stop][mine]
            # A row takes `align` rows of room if it is the first of a new multiple.
            room = -(-before[own.start : own.stop] // align) * align
            taken = int(room.sum()) + np.cumsum(np.where(number % align == 0, align, 0))
            here = here[taken > capacity]
        flat[here] = none
    return flat.reshape(columns.shape)
