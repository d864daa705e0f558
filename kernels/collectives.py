"""Collectives: all-gather, all-to-all, broadcast, reduce-scatter, one-shot and two-shot all-reduce.

Index spaces: a rank's x is a vector, whose *part* p is for rank p (or is for everyone: all-gather,
broadcast, one-shot); ``out`` has a part per source. A part goes through in ``pieces`` of
``piece_size`` elements, each a chunk with a flag of its own, moved by one program.

================= ===================================== ==========================================
kernel            raises                                awaits
================= ===================================== ==========================================
exchange_kernel   ready[s][me][piece] on every peer     ready[s][source][piece] of every source
reduce_kernel     the same                              the same
two_shot_kernel   the same, and, as the owner of part   the same, and ready[s][owner][pieces +
                  ``me``, ready[s][me][pieces + piece]  piece] of every other owner
                  on every peer
================= ===================================== ==========================================

A launch has its roles in the order of program ids: push, then reduce, then take. A role waits only
for roles before it, here or on other ranks, and the first waits for nobody: so no grid can be too
large. Sums are in float32 and in the order of ranks: bitwise equal wherever they are made.

Worked example, two-shot, W = 2, x of 5 elements (parts 3 and 2), 1 piece: rank 0 pushes elements
3..4 into region 0 of rank 1 and raises ready[0][0] there; it awaits ready[1][0], adds elements 0..2
to what lies in its own region 1, and pushes the sum behind the partials of rank 1's region 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import FLAG_WORDS, PLACES, READY, memory, signal, wait_at_least, words

_PLACES = [
    *(*PLACES, "root", "skip", "stride", "size", "total", "piece_size", "region_bytes"),
    *("send_stride", "send_size", "send_total", "recv_stride", "recv_size", "recv_total"),
]


@triton.jit
def part_of(index, stride, size, total, table, TABLE: tl.constexpr):
    """The first element of a part, and how many it has (maybe 0).

    They are ``size`` long, begin ``stride`` apart and end at ``total``; or ``table``, int64
    ``[parts + 1]``, has where they begin, of which ``size`` elements from ``stride`` on are meant.

    >>> # stride = size = 3, total = 5: parts 0..2, 3..4; stride = 0, size = 5: all of it, always
    """
    if TABLE:
        first = tl.load(table + index) + stride
        count = tl.maximum(tl.minimum(tl.load(table + index + 1) - first, size), 0)
    else:
        first = tl.minimum(tl.cast(index, tl.int64) * stride, total)
        count = tl.minimum(first + size, total) - first
    return first, count


@triton.jit
def combine(a, b, OP: tl.constexpr):
    """The reduction of two blocks, as torch's: a NaN is the greatest and the least."""
    if OP == "max":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return a + b


@triton.jit
def span_of(piece, piece_size, count):
    """The elements ``[start, even)`` and ``[even, stop)`` of a part that are a piece of it.

    The first are a multiple of 16, so that a mask at their end does not keep a thread from moving
    16 bytes at a time; the others are fewer than 16.
    """
    start = tl.multiple_of(tl.cast(piece, tl.int64) * piece_size, 16)
    stop = tl.minimum(start + piece_size, count)
    even = tl.multiple_of(tl.maximum(stop, start) // 16 * 16, 16)
    return start, even, stop


@triton.jit
def copy_block(source, target, first, stop, SIZE: tl.constexpr):
    i = first + tl.arange(0, SIZE)
    tl.store(target + i, tl.load(source + i, mask=i < stop), mask=i < stop)


@triton.jit
def copy_piece(source, target, piece, piece_size, count, BLOCK: tl.constexpr):
    """Copy a piece of a part of ``count`` elements."""
    start, even, stop = span_of(piece, piece_size, count)
    for first in range(start, even, BLOCK):
        copy_block(source, target, tl.multiple_of(first, 16), even, BLOCK)
    if even < stop:
        copy_block(source, target, even, stop, 16)


@triton.jit
def push_piece(
    x, bases, rank, world_size, step, piece, piece_size, stride, size, total, table,
    epoch, ready_word, chunks, data_offset, region_bytes,
    TABLE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a piece of the part for the ``step``-th peer into its memory, and say so."""
    peer = (rank + step) % world_size
    first, count = part_of(peer, stride, size, total, table, TABLE)
    target = memory(bases, peer, data_offset, rank, region_bytes, x.dtype.element_ty)
    copy_piece(tl.multiple_of(x + first, ALIGN), target, piece, piece_size, count, BLOCK)
    # Matched by the waits of reduce_piece and take_piece. A piece without elements as well.
    flag = ready_word + (rank * chunks + piece) * FLAG_WORDS
    signal(words(bases, peer) + flag, epoch)


@triton.jit
def await_piece(own, source, chunk, epoch, ready_word, chunks, limit, record):
    flag = own + ready_word + (source * chunks + chunk) * FLAG_WORDS
    return wait_at_least(flag, epoch, limit, record, READY, source, chunk)


@triton.jit
def await_sources(own, rank, world_size, piece, epoch, ready_word, chunks, limit, record):
    """Await a piece of every source; whether all came."""
    ok = True
    for step in range(1, world_size):
        if ok:
            source = (rank + step) % world_size
            ok = await_piece(own, source, piece, epoch, ready_word, chunks, limit, record)
    return ok


@triton.jit
def reduced_block(
    x, i, mask, bases, rank, world_size, data_offset, region_bytes, scale,
    OP: tl.constexpr, ACC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One block of this rank's part, reduced in the order of ranks; ``x`` is the own part."""
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros(i.shape, dtype=ACC)
    for source in range(0, world_size):
        pushed = memory(bases, rank, data_offset, source, region_bytes, dtype)
        address = tl.where(source == rank, x.to(tl.int64), pushed.to(tl.int64))
        part = tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGN)
        value = tl.load(part + i, mask=mask, other=0.0).to(ACC)
        total = tl.where(source == 0, value, combine(total, value, OP))
    if OP == "avg":
        total = total * scale
    return total.to(dtype)


@triton.jit
def reduce_block(
    x, out, first, stop, bases, rank, world_size, data_offset, region_bytes, results, scale,
    OP: tl.constexpr, ACC: tl.constexpr, ALIGN: tl.constexpr, SHARED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Reduce elements ``[first, first + SIZE)`` below ``stop``; if SHARED, give them to all."""
    i = first + tl.arange(0, SIZE)
    mask = i < stop
    result = reduced_block(
        x, i, mask, bases, rank, world_size, data_offset, region_bytes, scale, OP, ACC, ALIGN
    )
    tl.store(out + i, result, mask=mask)
    if SHARED:
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            target = memory(bases, peer, results, rank, region_bytes, x.dtype.element_ty)
            tl.store(target + i, result, mask=mask)


@triton.jit
def reduce_piece(
    x, out, piece, piece_size, count, bases, rank, world_size, data_offset, region_bytes, results,
    scale, OP: tl.constexpr, ACC: tl.constexpr, ALIGN: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a piece of this rank's part, all of whose sources have come."""
    start, even, stop = span_of(piece, piece_size, count)
    for first in range(start, even, BLOCK):
        reduce_block(
            x, out, tl.multiple_of(first, 16), even, bases, rank, world_size, data_offset,
            region_bytes, results, scale, OP, ACC, ALIGN, SHARED, BLOCK,
        )  # fmt: skip
    if even < stop:
        reduce_block(
            x, out, even, stop, bases, rank, world_size, data_offset,
            region_bytes, results, scale, OP, ACC, ALIGN, SHARED, 16,
        )  # fmt: skip


@triton.jit(do_not_specialize=_PLACES)
def exchange_kernel(
    x,
    out,
    send_table,
    recv_table,
    bases,
    rank,
    world_size,
    send_stride,
    send_size,
    send_total,
    recv_stride,
    recv_size,
    recv_total,
    root,
    pieces,
    piece_size,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    TABLE: tl.constexpr,
    SEND_ALIGN: tl.constexpr,
    RECV_ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All-gather, all-to-all, broadcast: part p of x to rank p, part q of out from rank q.

    Programs: ``(W - 1) * pieces`` push, ``W * pieces`` take, the own part first. With ``root >= 0``
    only the part of that source exists.
    """
    ok = tl.load(record) == 0
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    pushes = (world_size - 1) * pieces
    program = tl.program_id(0)
    piece = program % pieces
    if ok:
        if program < pushes:
            push_piece(
                x, bases, rank, world_size, program // pieces + 1, piece, piece_size,
                send_stride, send_size, send_total, send_table,
                epoch, ready_word, chunks, data_offset, region_bytes, TABLE, SEND_ALIGN, BLOCK,
            )  # fmt: skip
        else:
            source = (rank + world_size - (program - pushes) // pieces) % world_size
            first, count = part_of(source, recv_stride, recv_size, recv_total, recv_table, TABLE)
            if (root >= 0) & (source != root):
                count = tl.zeros_like(count)
            target = tl.multiple_of(out + first, RECV_ALIGN)
            if source == rank:
                start, _ = part_of(rank, send_stride, send_size, send_total, send_table, TABLE)
                mine = tl.multiple_of(x + start, SEND_ALIGN)
                copy_piece(mine, target, piece, piece_size, count, BLOCK)
            elif await_piece(own, source, piece, epoch, ready_word, chunks, limit, record):
                pushed = memory(bases, rank, data_offset, source, region_bytes, x.dtype.element_ty)
                copy_piece(pushed, target, piece, piece_size, count, BLOCK)


@triton.jit(do_not_specialize=_PLACES)
def reduce_kernel(
    x,
    out,
    bases,
    rank,
    world_size,
    stride,
    size,
    total,
    scale,
    skip,
    pieces,
    piece_size,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    OP: tl.constexpr,
    ACC: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce-scatter: out = this rank's part of x reduced. With ``stride = 0`` one-shot all-reduce.

    Programs: ``(W - 1) * pieces`` push, ``pieces`` reduce. Where ``out`` is ``x`` they are two
    launches, the second with ``skip`` the number of the first: a peer may be slower to take x than
    the others are to give theirs.
    """
    ok = tl.load(record) == 0
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    pushes = (world_size - 1) * pieces
    program = tl.program_id(0) + skip
    piece = program % pieces
    if ok:
        if program < pushes:
            push_piece(
                x, bases, rank, world_size, program // pieces + 1, piece, piece_size,
                stride, size, total, x, epoch, ready_word, chunks, data_offset, region_bytes,
                False, ALIGN, BLOCK,
            )  # fmt: skip
        elif await_sources(own, rank, world_size, piece, epoch, ready_word, chunks, limit, record):
            first, count = part_of(rank, stride, size, total, x, False)
            reduce_piece(
                tl.multiple_of(x + first, ALIGN), out, piece, piece_size, count, bases, rank,
                world_size, data_offset, region_bytes, data_offset, scale,
                OP, ACC, ALIGN, False, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=_PLACES)
def two_shot_kernel(
    x,
    out,
    bases,
    rank,
    world_size,
    size,
    total,
    scale,
    pieces,
    piece_size,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    OP: tl.constexpr,
    ACC: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All-reduce: every rank reduces its part and pushes the result to all; out may be x.

    Programs: ``(W - 1) * pieces`` push, ``pieces`` reduce, ``(W - 1) * pieces`` take. A region
    holds the source's partial of this rank's part, then, at half of ``region_bytes``, the result of
    the source's own. out may be x: an owner's result comes when it has this rank's piece.
    """
    ok = tl.load(record) == 0
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    dtype: tl.constexpr = x.dtype.element_ty
    results = data_offset + region_bytes // 2
    pushes = (world_size - 1) * pieces
    program = tl.program_id(0)
    piece = program % pieces
    if ok:
        if program < pushes:
            push_piece(
                x, bases, rank, world_size, program // pieces + 1, piece, piece_size,
                size, size, total, x, epoch, ready_word, chunks, data_offset, region_bytes,
                False, ALIGN, BLOCK,
            )  # fmt: skip
        elif program < pushes + pieces:
            came = await_sources(
                own, rank, world_size, piece, epoch, ready_word, chunks, limit, record
            )
            if came:
                first, count = part_of(rank, size, size, total, x, False)
                reduce_piece(
                    tl.multiple_of(x + first, ALIGN), tl.multiple_of(out + first, ALIGN), piece,
                    piece_size, count, bases, rank, world_size,
                    data_offset, region_bytes, results, scale, OP, ACC, ALIGN, True, BLOCK,
                )  # fmt: skip
                for step in range(1, world_size):
                    # Matched by the wait of the peer's take, below.
                    peer = (rank + step) % world_size
                    flag = ready_word + (rank * chunks + pieces + piece) * FLAG_WORDS
                    signal(words(bases, peer) + flag, epoch)
        else:
            owner = (rank + (program - pushes) // pieces) % world_size
            chunk = pieces + piece
            if await_piece(own, owner, chunk, epoch, ready_word, chunks, limit, record):
                first, count = part_of(owner, size, size, total, x, False)
                pushed = memory(bases, rank, results, owner, region_bytes, dtype)
                target = tl.multiple_of(out + first, ALIGN)
                copy_piece(pushed, target, piece, piece_size, count, BLOCK)
