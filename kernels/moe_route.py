"""The table of a mixture of experts, and where every row goes: made on the device, kept there.

Index spaces: W ranks; E *columns*, the experts in the order of their ranks, those of rank r from
``starts_W[r]`` to ``starts_W[r + 1]``; the table ``[W, E]`` says how many rows every rank sends to
every column. A rank's own experts are its *local* ones. ``planning.routing`` has the words and the
same arithmetic for hosts.

================== ====================================== ====================================
kernel             raises                                 awaits
================== ====================================== ====================================
push_counts_kernel ready[s][me][0] on every peer          –  (``begin`` awaited consumed)
collect_kernel     –                                      ready[s][source][0] of every source
places_kernel,     –                                      –  (behind ``collect_kernel``)
row_blocks_kernel
================== ====================================== ====================================

A rank writes its row of the table into its own region of every rank's memory, so a byte has one
writer for ever; a reader says consumed (``end``) when it has copied all rows out.

Worked example: W = 2, two experts each, ``align`` 4, the table [[1, 2, 0, 3], [2, 0, 1, 1]]. Expert
3 is rank 1's second. Its block begins at row 4 of rank 1, behind the padded row of expert 2, with
three rows of rank 0; rank 1's own is row 7. Rank 0 sends it its rows 3..5, which come back there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .moe_rows import FIELDS, MAX_PIECES, piece_size
from .signals import (
    CAPACITY,
    FLAG_WORDS,
    PLACES,
    READY,
    memory,
    report,
    signal,
    wait_at_least,
    words,
)

_PLACES = [*PLACES, "region_bytes", "columns", "experts", "align", "capacity", "block"]


@triton.jit(do_not_specialize=_PLACES)
def push_counts_kernel(
    bounds,
    bases,
    rank,
    world_size,
    columns,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    record,
    BLOCK: tl.constexpr,
):
    """Write this rank's row of the table into the memory of every rank, one program each.

    ``bounds`` int64 ``[E + 1]``: its choices for column e are those from ``bounds[e]`` to
    ``bounds[e + 1]``, sorted.
    """
    if tl.load(record) == 0:
        epoch = tl.load(words(bases, rank) + epoch_word)
        peer = (rank + 1 + tl.program_id(0)) % world_size
        target = memory(bases, peer, data_offset, rank, region_bytes, tl.int32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            exists = column < columns
            begin = tl.load(bounds + column, mask=exists, other=0)
            count = tl.load(bounds + column + 1, mask=exists, other=0) - begin
            tl.store(target + column, count.to(tl.int32), mask=exists)
        if peer != rank:
            # Matched by collect_kernel.
            signal(words(bases, peer) + ready_word + rank * chunks * FLAG_WORDS, epoch)


@triton.jit(do_not_specialize=_PLACES)
def collect_kernel(
    table,
    bases,
    rank,
    world_size,
    columns,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    BLOCK: tl.constexpr,
):
    """``table`` int64 ``[W, E]``, when every rank has written its row; one program each."""
    own = words(bases, rank)
    ok = tl.load(record) == 0
    source = (rank + tl.program_id(0)) % world_size
    if ok & (source != rank):
        # Matches the signal of push_counts_kernel.
        flag = own + ready_word + source * chunks * FLAG_WORDS
        epoch = tl.load(own + epoch_word)
        ok = wait_at_least(flag, epoch, limit, record, READY, source, 0)
    if ok:
        row = memory(bases, rank, data_offset, source, region_bytes, tl.int32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            exists = column < columns
            count = tl.load(row + column, mask=exists, other=0).to(tl.int64)
            tl.store(table + source * columns + column, count, mask=exists)


@triton.jit(do_not_specialize=_PLACES)
def places_kernel(
    table,
    starts_W,
    first_E,
    counts_E,
    first_WE,
    counts_WE,
    back_WE,
    out,
    back,
    out_pieces_W,
    back_pieces_W,
    rank,
    world_size,
    columns,
    experts,
    align,
    capacity,
    record,
    BLOCK: tl.constexpr,
):
    """All places of a rank, from the table; program s those of source s. BLOCK holds all columns.

    ``first_E``, ``counts_E`` int64 ``[experts]``: the first row of each local expert's block, and
    how many it has. ``first_WE``, ``counts_WE``, ``back_WE`` ``[W, experts]``: the same of every
    source's segment, and where it lies among its source's rows. ``out`` ``[E, 5]``, ``back``
    ``[W * experts, 5]``: the segments for ``moe_rows.push_rows_kernel``, the next rank's first and
    this rank's own last, those without rows too. ``out_pieces_W``, ``back_pieces_W`` int32 ``[W]``:
    the pieces with rows among them, for each peer.

    A rank that would receive more than ``capacity`` rows (unless that is negative) is recorded as a
    failure, and after a failure all counts are 0: nobody may be led past the end of memory.
    """
    source = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < columns
    ok = tl.load(record) == 0
    count = tl.load(table + source * columns + column, mask=exists, other=0)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    earlier = tl.zeros((BLOCK,), dtype=tl.int64)  # rows of the sources in front
    for other in range(0, world_size):
        theirs = tl.load(table + other * columns + column, mask=exists, other=0)
        total += theirs
        earlier += tl.where(other < source, theirs, 0)
    padded = (total + align - 1) // align * align
    behind = tl.cumsum(padded, 0) - padded
    first = tl.zeros((BLOCK,), dtype=tl.int64)
    owner, local = tl.zeros((BLOCK,), dtype=tl.int64), tl.zeros((BLOCK,), dtype=tl.int64)
    for reader in range(0, world_size):
        low, high = tl.load(starts_W + reader), tl.load(starts_W + reader + 1)
        theirs = (column >= low) & (column < high)
        first = tl.where(theirs, behind - tl.sum(tl.where(column < low, padded, 0), 0), first)
        owner, local = tl.where(theirs, reader, owner), tl.where(theirs, column - low, local)
        rows = tl.sum(tl.where(theirs, padded, 0), 0)
        if ok & (capacity >= 0) & (rows > capacity):
            ok = False
            if source == 0:  # the others find it as well, or see the record
                seen = tl.minimum(rows, 0x7FFFFFFF).to(tl.int32)
                report(record, CAPACITY, reader, -1, capacity, seen)
    count, total = tl.where(ok, count, 0), tl.where(ok, total, 0)
    first = tl.where(ok, first, 0)
    there = first + tl.where(ok, earlier, 0)
    sent = tl.cumsum(count, 0) - count
    begin = tl.load(starts_W + rank)
    own = (column >= begin) & (column < begin + experts)
    mine = column - begin
    segment = source * experts + mine
    tl.store(first_WE + segment, there, mask=own)
    tl.store(counts_WE + segment, count, mask=own)
    tl.store(back_WE + segment, sent, mask=own)
    step = (source - rank - 1 + world_size) % world_size
    field = back + (step * experts + mine) * FIELDS
    tl.store(field, tl.zeros((BLOCK,), dtype=tl.int64) + source, mask=own)
    tl.store(field + 1, there, mask=own)
    tl.store(field + 2, sent, mask=own)
    tl.store(field + 3, count, mask=own)
    tl.store(field + 4, tl.full((BLOCK,), -1, dtype=tl.int64), mask=own)
    tl.store(back_pieces_W + source, tl.sum(tl.where(own & (count > 0), 1, 0), 0))
    if source == rank:
        tl.store(first_E + mine, first, mask=own)
        tl.store(counts_E + mine, total, mask=own)
        # The columns in turn, from the next rank's first one on.
        next_one = tl.load(starts_W + (rank + 1) % world_size)
        field = out + (column - next_one + columns) % columns * FIELDS
        tl.store(field, owner, mask=exists)
        tl.store(field + 1, sent, mask=exists)
        tl.store(field + 2, there, mask=exists)
        tl.store(field + 3, count, mask=exists)
        tl.store(field + 4, local * MAX_PIECES, mask=exists)
        size = piece_size(count)
        pieces = ((count + size - 1) // size).to(tl.int32)
        for reader in range(0, world_size):
            theirs = tl.sum(tl.where(exists & (owner == reader), pieces, 0), 0)
            tl.store(out_pieces_W + reader, theirs)


@triton.jit(do_not_specialize=_PLACES)
def row_blocks_kernel(first_E, first_WE, counts_WE, blocks_W, experts, block, BLOCK: tl.constexpr):
    """``blocks_W`` int32 ``[W]``: blocks of ``block`` rows, of all local experts, with rows of each
    source; one program each. BLOCK holds all local experts.
    """
    source = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    exists = expert < experts
    at = source * experts + expert
    count = tl.load(counts_WE + at, mask=exists, other=0)
    begin = tl.load(first_WE + at, mask=exists, other=0)
    begin -= tl.load(first_E + expert, mask=exists, other=0)
    blocks = tl.where(count > 0, (begin + count - 1) // block - begin // block + 1, 0)
    tl.store(blocks_W + source, tl.sum(blocks.to(tl.int32), 0))
