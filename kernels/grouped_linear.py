"""The experts' products, on rows that are still arriving, and on their way back.

Index spaces: a rank's E experts have blocks of rows, ``first_E`` the first of each and ``counts_E``
how many it has (padding apart), int64. Within a block lie the segments of the sources, ``first_WE``
and ``counts_WE`` int64 ``[W, E]``, each in pieces (``moe_rows``). Features: K in, N out.

============= ================================== =================================================
kernel        raises                             awaits
============= ================================== =================================================
up_kernel     –                                  ready[s][source][4 e + piece] of all pieces that
                                                 its tile's rows overlap
down_kernel   ready[s][me][closing] on every     –  (``begin`` awaited consumed)
              source, when its rows are back
============= ================================== =================================================

``up_kernel`` is ``z = rows · w13ᵀ + b13, a = activation(z)``; ``down_kernel`` is ``h = a · w2ᵀ +
b2``, and stores each row straight into the memory of the rank that it came from. In the backward
pass the same two run with the other weights: ``up_kernel`` without an activation makes ``da`` from
the rows' gradients, ``down_kernel`` makes ``dx``.

A tile waits before its loop over K. Row blocks of an expert begin with this rank's own rows, which
are there already.

Worked example: W = 2, an expert with rows 0..5 of rank 0 and 6..7 of rank 1, tiles of 4 rows. Rank
1 begins with rows 4..7: it awaits piece 0 of rank 0 and then multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activation
from .moe_rows import MAX_PIECES, piece_size
from .signals import FLAG_WORDS, PLACES, READY, count_in, memory, signal, wait_at_least, words
from .tiles import accumulate, bias_of, block_of, first_tile, tile_position

_PLACES = [*PLACES, "closing", "experts", "region_bytes"]


@triton.jit
def await_rows(
    own, first_WE, counts_WE, experts, expert, top, bottom, rank, world_size, epoch, ready_word,
    chunks, limit, record, ok,
):  # fmt: skip
    """Await all pieces of an expert's rows ``[top, bottom)``."""
    for step in range(1, world_size):
        source = (rank + step) % world_size
        first = tl.load(first_WE + source * experts + expert)
        count = tl.load(counts_WE + source * experts + expert)
        size = piece_size(count)
        low, high = tl.maximum(top, first), tl.minimum(bottom, first + count)
        stop = tl.where(high > low, (high - 1 - first) // size + 1, 0)
        for piece in range((low - first) // size, stop):
            if ok:
                # Matches the source's signal in moe_rows.push_rows_kernel.
                chunk = expert * MAX_PIECES + tl.cast(piece, tl.int32)
                flag = own + ready_word + (source * chunks + chunk) * FLAG_WORDS
                ok = wait_at_least(flag, epoch, limit, record, READY, source, chunk)
    return ok


@triton.jit
def weight_of(expert, weight, stride_we, ok, other):
    """An expert's weight; ``other``, of which nothing must be read, unless ``ok``.

    A pointer out of a choice is one value to the compiler. Of a sum it sees the terms, keeps one of
    them apart and adds it to every address of the loop over K.
    """
    return tl.where(ok, weight + tl.cast(expert, tl.int64) * stride_we, other)


@triton.jit(do_not_specialize=_PLACES)
def up_kernel(
    weight,
    bias,
    z,
    a,
    first_E,
    counts_E,
    first_WE,
    counts_WE,
    bases,
    rank,
    world_size,
    experts,
    N,
    K,
    up_shift,
    stride_we,
    stride_wn,
    stride_wk,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PAIRED: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a ``[rows, N]``, and z ``[rows, 2 N]`` (GATED) or ``[rows, N]`` if KEEP; persistent.

    Feature n has its gate in row n of the weight, and its up-projection ``up_shift`` rows further;
    if PAIRED, in rows 2 n and 2 n + 1, which one product of BN columns makes for BN / 2 features.
    The bias is ``[experts, 2 N]`` or ``[experts, N]``.
    """
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    dtype: tl.constexpr = a.dtype.element_ty
    rows_here = memory(bases, rank, data_offset, 0, region_bytes, dtype)
    program, programs = tl.program_id(0), tl.num_programs(0)
    FEATURES: tl.constexpr = BN // 2 if PAIRED else BN
    column_blocks = tl.cdiv(N, FEATURES)
    width = 2 * N if GATED else N
    done = 0
    for expert in range(0, experts):
        first, count = tl.load(first_E + expert), tl.load(counts_E + expert).to(tl.int32)
        row_blocks = tl.cdiv(count, BM).to(tl.int32)
        mine = (tl.load(first_WE + rank * experts + expert) - first) // BM
        tiles = tl.where(ok, row_blocks * column_blocks, 0)
        x = rows_here + first * K
        w = weight_of(expert, weight, stride_we, ok, a)
        w_up = weight_of(expert, weight + up_shift * stride_wn, stride_we, ok, a)
        for tile in range(first_tile(program, done, programs), tiles, programs):
            row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
            row_block = ((row_block + mine) % row_blocks).to(tl.int32)
            top = first + row_block * BM
            rows = tl.minimum(count - row_block * BM, BM)
            # Its rows alone: what would be read past the last one has perhaps not come.
            x_tile = x + tl.cast(row_block, tl.int64) * BM * K
            ok = await_rows(
                own, first_WE, counts_WE, experts, expert, top, tl.minimum(top + BM, first + count),
                rank, world_size, epoch, ready_word, chunks, limit, record, ok,
            )  # fmt: skip
            # The masks of what is stored behind the loops over K: living through one costs it moves
            # of predicates. So the bias is what the sums begin with.
            bias_e = bias + expert * width
            total_MN = tl.zeros((BM, BN), dtype=tl.float32)
            if HAS_BIAS:
                total_MN += bias_of(bias_e, column_block, width if PAIRED else N, BN)
            total_MN = accumulate(
                total_MN, x_tile, w, 0, column_block, rows, width if PAIRED else N, K, K,
                stride_wn, stride_wk, BM, BN, BK, EVEN_K, PRECISION,
            ).to(dtype)  # fmt: skip
            if PAIRED:
                gate_MN, up_MN = tl.split(tl.reshape(total_MN, (BM, FEATURES, 2)))
            else:
                gate_MN = total_MN
                up_MN = tl.zeros((BM, BN), dtype=tl.float32)
                if GATED:
                    if HAS_BIAS:
                        up_MN += bias_of(bias_e + up_shift, column_block, N, BN)
                    up_MN = accumulate(
                        up_MN, x_tile, w_up, 0, column_block, rows, N, K, K,
                        stride_wn, stride_wk, BM, BN, BK, EVEN_K, PRECISION,
                    )  # fmt: skip
                up_MN = up_MN.to(dtype)
            m, m_exists = block_of(row_block, count, BM)
            n, n_exists = block_of(column_block, N, FEATURES)
            mask_MN = m_exists[:, None] & n_exists[None, :] & ok
            row_M = (first + m)[:, None]
            if KEEP:
                if PAIRED:
                    column, exists = block_of(column_block, width, BN)
                    place_MN = z + row_M * width + column[None, :]
                    tl.store(place_MN, total_MN, mask=m_exists[:, None] & exists[None, :] & ok)
                else:
                    place_MN = z + row_M * width + n[None, :]
                    tl.store(place_MN, gate_MN, mask=mask_MN)
                    if GATED:
                        tl.store(place_MN + up_shift, up_MN, mask=mask_MN)
            value_MN = activation(gate_MN.to(tl.float32), up_MN.to(tl.float32), ACTIVATION)
            tl.store(a + row_M * N + n[None, :], value_MN.to(dtype), mask=mask_MN)
        done += tiles


@triton.jit(
    do_not_specialize=["rank", "experts", "closing", "epoch_word", "ready_word", "data_offset"]
)
def down_kernel(
    x,
    weight,
    bias,
    first_E,
    counts_E,
    first_WE,
    counts_WE,
    back_WE,
    tiles_W,
    counters,
    bases,
    rank,
    world_size,
    experts,
    closing,
    N,
    K,
    stride_we,
    stride_wn,
    stride_wk,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    record,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x ``[rows, K]`` times the experts' weights, ``[rows, N]`` back to the sources; persistent.

    ``back_WE`` int64: at which of its source's rows a segment lies there. ``tiles_W`` int32: row
    blocks with rows of each source, of all experts. ``counters`` int32 ``[W]``, zero between
    launches.
    """
    epoch = tl.load(words(bases, rank) + epoch_word)
    ok = tl.load(record) == 0
    dtype: tl.constexpr = x.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    flag = ready_word + (rank * chunks + closing) * FLAG_WORDS
    column_blocks = tl.cdiv(N, BN)
    if ok & (program == 0):
        for step in range(1, world_size):
            source = (rank + step) % world_size
            if tl.load(tiles_W + source) == 0:
                signal(words(bases, source) + flag, epoch)
    done = 0
    for expert in range(0, experts):
        first, count = tl.load(first_E + expert), tl.load(counts_E + expert).to(tl.int32)
        row_blocks = tl.cdiv(count, BM).to(tl.int32)
        mine = (tl.load(first_WE + rank * experts + expert) - first) // BM
        tiles = tl.where(ok, row_blocks * column_blocks, 0)
        w = weight_of(expert, weight, stride_we, ok, x)
        for tile in range(first_tile(program, done, programs), tiles, programs):
            row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
            row_block = ((row_block + mine) % row_blocks).to(tl.int32)
            total_MN = tl.zeros((BM, BN), dtype=tl.float32)
            total_MN = accumulate(
                total_MN, x + first * K, w, row_block, column_block, count, N, K, K,
                stride_wn, stride_wk, BM, BN, BK, EVEN_K, PRECISION,
            )  # fmt: skip
            n, n_exists = block_of(column_block, N, BN)
            if HAS_BIAS:
                total_MN += bias_of(bias + expert * N, column_block, N, BN)
            result_MN = total_MN.to(dtype)
            m, m_exists = block_of(row_block, count, BM)
            row_M = first + m
            for source in range(0, world_size):
                at = source * experts + expert
                start, rows = tl.load(first_WE + at), tl.load(counts_WE + at)
                theirs = m_exists & (row_M >= start) & (row_M < start + rows)
                target = memory(bases, source, data_offset, 0, region_bytes, dtype)
                place_M = tl.load(back_WE + at) + row_M - start
                tl.store(
                    target + place_M[:, None] * N + n[None, :],
                    result_MN,
                    mask=theirs[:, None] & n_exists[None, :],
                )
            for step in range(1, world_size):
                source = (rank + step) % world_size
                at = source * experts + expert
                start, rows = tl.load(first_WE + at), tl.load(counts_WE + at)
                top = first + row_block * BM
                if (rows > 0) & (start < top + BM) & (start + rows > top):
                    if count_in(counters + source, tl.load(tiles_W + source) * column_blocks):
                        # Matched by moe_rows.await_kernel.
                        signal(words(bases, source) + flag, epoch)
        done += tiles
