"""All-reduce round a ring: W - 1 steps of reduce-scatter, W - 1 of all-gather.

Index spaces: x is a vector in W chunks of ``size`` elements; each chunk goes round in ``pieces``,
and one program carries its piece of every chunk: the pieces' rings do not touch each other. A rank
writes to its successor and reads what its predecessor wrote.

======= =============================================== ==============================
flag    raised by                                       awaited by
======= =============================================== ==============================
c       rank r on its successor: partial of chunk c     the successor, before it adds
W + c   rank r on its successor: result of chunk c      the successor, before it copies
======= =============================================== ==============================

each times ``pieces`` plus the piece. In step t of the first half rank r sends chunk r - 1 - t, so
that after W - 1 steps it holds the whole sum of chunk r. The result of a chunk may overwrite its
partial in the successor's memory: it exists because the successor has used the partial.

Every hop rounds to x's dtype, and the order of the additions is the ring's: the same on all ranks,
since only one makes each sum.

Worked example: W = 3, rank 0. It sends chunk 2, gets the partial 1 of rank 2, adds its own and
sends it on, gets chunk 0 with everyone's but its own in it, adds: that is the result. It sends
this, then passes on result 2, and keeps results 2 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .collectives import await_piece, combine, part_of, span_of
from .signals import FLAG_WORDS, PLACES, memory, signal, words

_PLACES = [*PLACES, "size", "total", "piece_size", "region_bytes"]


@triton.jit
def add_block(
    x, received, target, out, first, stop, step, last, scale,
    OP: tl.constexpr, ACC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add what was received, from the second step on, and send it on; the last is the result."""
    dtype: tl.constexpr = x.dtype.element_ty
    i = first + tl.arange(0, SIZE)
    mask = i < stop
    value = tl.load(x + i, mask=mask, other=0.0).to(ACC)
    theirs = tl.load(received + i, mask=mask & (step > 0), other=0.0).to(ACC)
    value = tl.where(step > 0, combine(theirs, value, OP), value)
    if OP == "avg":
        value = tl.where(step == last, value * scale, value)
    tl.store(target + i, value.to(dtype), mask=mask)
    tl.store(out + i, value.to(dtype), mask=mask & (step == last))


@triton.jit
def pass_block(received, target, out, first, stop, on, SIZE: tl.constexpr):
    """Keep a result and, if ``on``, send it on."""
    i = first + tl.arange(0, SIZE)
    value = tl.load(received + i, mask=i < stop)
    tl.store(out + i, value, mask=i < stop)
    tl.store(target + i, value, mask=(i < stop) & on)


@triton.jit(do_not_specialize=_PLACES)
def ring_kernel(
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
    BLOCK: tl.constexpr,
):
    """out = x reduced over the ranks. Programs: ``pieces``.

    out may be x; ``size`` and ``piece_size`` are multiples of 16. A region holds x: every chunk at
    its own place.
    """
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    dtype: tl.constexpr = x.dtype.element_ty
    piece = tl.program_id(0)
    before = (rank + world_size - 1) % world_size
    after = (rank + 1) % world_size
    received = memory(bases, rank, data_offset, before, region_bytes, dtype)
    target = memory(bases, after, data_offset, rank, region_bytes, dtype)
    flags = words(bases, after) + ready_word + rank * chunks * FLAG_WORDS
    for step in range(0, world_size):
        # The own chunk comes last: it has been everywhere else, and this step makes its result.
        chunk = (rank + 2 * world_size - 1 - step) % world_size
        if ok & (step > 0):
            ok = await_piece(
                own, before, chunk * pieces + piece, epoch, ready_word, chunks, limit, record
            )
        if ok:
            at, count = part_of(chunk, size, size, total, total, False)
            x_here, out_here = tl.multiple_of(x + at, 16), tl.multiple_of(out + at, 16)
            received_here = tl.multiple_of(received + at, 16)
            target_here = tl.multiple_of(target + at, 16)
            start, even, stop = span_of(piece, piece_size, count)
            for first in range(start, even, BLOCK):
                add_block(
                    x_here, received_here, target_here, out_here, tl.multiple_of(first, 16), even,
                    step, world_size - 1, scale, OP, ACC, BLOCK,
                )  # fmt: skip
            if even < stop:
                add_block(
                    x_here, received_here, target_here, out_here, even, stop,
                    step, world_size - 1, scale, OP, ACC, 16,
                )  # fmt: skip
            half = tl.where(step == world_size - 1, world_size, 0)
            signal(flags + ((half + chunk) * pieces + piece) * FLAG_WORDS, epoch)
    for step in range(1, world_size):
        chunk = (rank + world_size - step) % world_size
        number = (world_size + chunk) * pieces + piece
        if ok:
            ok = await_piece(own, before, number, epoch, ready_word, chunks, limit, record)
        if ok:
            at, count = part_of(chunk, size, size, total, total, False)
            out_here = tl.multiple_of(out + at, 16)
            received_here = tl.multiple_of(received + at, 16)
            target_here = tl.multiple_of(target + at, 16)
            start, even, stop = span_of(piece, piece_size, count)
            on = step < world_size - 1
            for first in range(start, even, BLOCK):
                pass_block(
                    received_here, target_here, out_here, tl.multiple_of(first, 16), even, on, BLOCK
                )
            if even < stop:
                pass_block(received_here, target_here, out_here, even, stop, on, 16)
            if on:
                signal(flags + number * FLAG_WORDS, epoch)
