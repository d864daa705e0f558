"""Rows of a mixture of experts on their way: to the experts' ranks, back, and summed at home.

Index spaces: what a rank sends are *segments*, each a run of rows for one place of one peer:
``segments`` int64 ``[S, 5]`` holds (peer, first row here, first row there, rows, flag). On the way
to experts there is one per expert, cut into pieces of equal size, each with a flag of its own
(``flag``, ``flag + 1``, …); on the way back there is one per expert and source, and ``flag`` is -1.

================ ============================================ ===================================
kernel           raises                                       awaits
================ ============================================ ===================================
push_rows_kernel ready[s][me][flag + piece] on the peer;      –  (``begin`` awaited consumed)
                 ready[s][me][closing] on every peer, when
                 it has everything, also if that is nothing
await_kernel     –                                            ready[s][source][closing] of every
                                                              source
take_kernel,     –                                            –  (behind ``await_kernel``)
sum_kernel
================ ============================================ ===================================

The memory is shared: all sources write into one region of their reader's, by the plan. So a reader
says consumed (``end``) behind ``await_kernel``, when no source has anything left to write.

Worked example: 2,500 rows for expert e are pieces of 834, 834 and 832 rows with flags 4 e, 4 e + 1
and 4 e + 2. Blocks of rows are dealt round-robin to the programs; each counts itself in on its
piece's counter, and the last one raises the flag and counts the piece in on the peer's counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import FLAG_WORDS, PLACES, READY, count_in, memory, signal, wait_at_least, words
from .tiles import first_tile

_PLACES = [*PLACES, "count", "closing", "experts", "tokens", "region_bytes"]


#: As in ``planning.routing``: rows from which a segment is cut, and its most pieces.
PIECE_ROWS, MAX_PIECES = tl.constexpr(1024), tl.constexpr(4)
#: int64 words of a segment.
FIELDS = tl.constexpr(5)


@triton.jit
def piece_size(rows):
    """Rows of a segment's pieces; the last may have fewer."""
    pieces = tl.minimum(tl.maximum(tl.cdiv(rows, PIECE_ROWS), 1), MAX_PIECES)
    return tl.maximum(tl.cdiv(rows, pieces), 1)


@triton.jit
def copy_rows(
    data, index, scale, target, here, there, stop, block, hidden,
    INDEXED: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of a segment's rows, below ``stop``."""
    i = block + tl.arange(0, BM)
    exists = i < stop
    row = here + i
    if SCALED:
        factor = tl.load(scale + row, mask=exists, other=0.0)
    if INDEXED:
        row = tl.load(index + row, mask=exists, other=0)
    for column in range(0, hidden, BN):
        n = column + tl.arange(0, BN)
        mask = exists[:, None] & (n < hidden)[None, :]
        value = tl.load(data + row[:, None] * hidden + n[None, :], mask=mask, other=0.0)
        if SCALED:
            value = (value.to(tl.float32) * factor[:, None]).to(value.dtype)
        tl.store(target + (there + i)[:, None] * hidden + n[None, :], value, mask=mask)


@triton.jit(
    do_not_specialize=["rank", "count", "closing", "epoch_word", "ready_word", "data_offset"]
)
def push_rows_kernel(
    data,
    index,
    scale,
    segments,
    pieces_W,
    counters,
    bases,
    rank,
    world_size,
    count,
    closing,
    hidden,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    record,
    INDEXED: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Push ``count`` segments of ``data [rows, hidden]``; persistent.

    ``index`` int64 ``[sent]``: the rows of data that the rows sent are, if INDEXED; ``scale``
    float32 ``[sent]`` multiplies them, if SCALED. ``pieces_W`` int32: pieces with rows for each
    peer. ``counters`` int32 ``[count * MAX_PIECES + W]``, zero between launches.
    """
    ok = tl.load(record) == 0
    epoch = tl.load(words(bases, rank) + epoch_word)
    program, programs = tl.program_id(0), tl.num_programs(0)
    flags = ready_word + rank * chunks * FLAG_WORDS
    if ok & (program == 0):
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            if tl.load(pieces_W + peer) == 0:
                signal(words(bases, peer) + flags + closing * FLAG_WORDS, epoch)
    done = 0
    for segment in range(0, tl.where(ok, count, 0)):
        field = segments + segment * FIELDS
        peer = tl.load(field)
        here, there = tl.load(field + 1), tl.load(field + 2)
        rows, flag = tl.load(field + 3), tl.load(field + 4)
        size = tl.where(flag < 0, tl.maximum(rows, 1), piece_size(rows))
        target = memory(bases, peer, data_offset, 0, region_bytes, data.dtype.element_ty)
        for piece in range(0, tl.cdiv(rows, size)):
            start = piece * size
            stop = tl.minimum(start + size, rows)
            blocks = tl.cdiv(stop - start, BM).to(tl.int32)
            for block in range(first_tile(program, done, programs), blocks, programs):
                copy_rows(
                    data, index, scale, target, here, there, stop, start + block * BM, hidden,
                    INDEXED, SCALED, BM, BN,
                )  # fmt: skip
                if peer != rank:
                    if count_in(counters + segment * MAX_PIECES + piece, blocks):
                        if flag >= 0:
                            # Matched by the wait of grouped_linear.await_rows.
                            word = flags + (flag + piece) * FLAG_WORDS
                            signal(words(bases, peer) + word, epoch)
                        total = tl.load(pieces_W + peer)
                        if count_in(counters + count * MAX_PIECES + peer, total):
                            # Matched by await_kernel.
                            word = flags + closing * FLAG_WORDS
                            signal(words(bases, peer) + word, epoch)
            done += blocks


@triton.jit(do_not_specialize=_PLACES)
def await_kernel(
    bases, rank, world_size, closing, epoch_word, ready_word, chunks, limit, record
):  # fmt: skip
    """One program: await everything that all sources write in this call."""
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    for step in range(1, world_size):
        if ok:
            source = (rank + step) % world_size
            # Matches the closing signal of push_rows_kernel, or of grouped_linear's down_kernel.
            flag = own + ready_word + (source * chunks + closing) * FLAG_WORDS
            ok = wait_at_least(flag, epoch, limit, record, READY, source, closing)


@triton.jit(do_not_specialize=_PLACES)
def take_kernel(
    out,
    first_E,
    counts_E,
    bases,
    rank,
    experts,
    rows,
    hidden,
    data_offset,
    region_bytes,
    record,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out ``[rows, hidden]``: the experts' rows, and zeros where there is none; behind an await.

    One program per BM rows. Expert e has ``counts_E[e]`` rows from ``first_E[e]`` on.
    """
    if tl.load(record) == 0:
        row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
        real = row < 0
        for expert in range(0, experts):
            first = tl.load(first_E + expert)
            real = real | ((row >= first) & (row < first + tl.load(counts_E + expert)))
        source = memory(bases, rank, data_offset, 0, region_bytes, out.dtype.element_ty)
        for column in range(0, hidden, BN):
            n = column + tl.arange(0, BN)
            exists = (n < hidden)[None, :]
            place = row[:, None] * hidden + n[None, :]
            value = tl.load(source + place, mask=real[:, None] & exists, other=0.0)
            tl.store(out + place, value, mask=(row < rows)[:, None] & exists)


@triton.jit(do_not_specialize=_PLACES)
def sum_kernel(
    slot,
    weights,
    y,
    kept,
    bases,
    rank,
    tokens,
    hidden,
    data_offset,
    region_bytes,
    record,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    KEEP: tl.constexpr,
    BN: tl.constexpr,
):
    """``y[t] = Σ_j weights[t, j] · row[slot[t, j]]`` in float32, in order of j, rounded once.

    One program per token. The rows are those that came back; slot int64 ``[T, K]``, -1 for no
    expert, whose rows are not read; weights float32 ``[T, K]``. ``kept [T, K, hidden]``, if KEEP:
    those rows, zeros for no expert.
    """
    token = tl.program_id(0).to(tl.int64)
    if (tl.load(record) == 0) & (token < tokens):
        rows = memory(bases, rank, data_offset, 0, region_bytes, y.dtype.element_ty)
        for column in range(0, hidden, BN):
            n = column + tl.arange(0, BN)
            exists = n < hidden
            total = tl.zeros((BN,), dtype=tl.float32)
            for choice in range(0, K):
                place = token * K + choice
                row = tl.load(slot + place)
                value = tl.load(rows + row * hidden + n, mask=exists & (row >= 0), other=0.0)
                if KEEP:
                    tl.store(kept + place * hidden + n, value, mask=exists)
                value = value.to(tl.float32)
                if WEIGHTED:
                    factor = tl.load(weights + place)
                    value = tl.where(row >= 0, value * factor, 0.0)
                total += value
            tl.store(y + token * hidden + n, total.to(y.dtype.element_ty), mask=exists)
