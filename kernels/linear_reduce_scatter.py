"""``y = rows of Σ_ranks (init + Σ_i x_i · weight_iᵀ) + bias``, the sum beside the product.

Index spaces: T tokens (rows), owned in W shards of ``shard_rows`` by torch.chunk's rule, each in
``pieces`` of ``piece_rows``; K_i input features of this rank; N output features. A *segment* is one
piece of one owner; a rank makes its successor's segments first and its own last.

================ ========================================== ========================================
kernel           raises                                     awaits
================ ========================================== ========================================
produce_kernel   ready[s][me][piece] on the piece's owner   –  (``begin`` awaited consumed)
reduce_kernel    –                                          ready[s][source][piece] of every source
================ ========================================== ========================================

A tile's epilogue stores it straight into the owner's memory, in the region of its source. Programs
count themselves in at the end of a segment; the last one raises its flag.

Worked example: T = 7 on W = 3 (shards 3, 3, 1), pieces = 1. Rank 1 makes row 6 in rank 2's memory,
then rows 0..2 in rank 0's, then rows 3..5 in its own, and adds regions 0, 1, 2 for rows 3..5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import FLAG_WORDS, PLACES, READY, count_in, memory, signal, wait_at_least, words
from .tiles import accumulate, block_of, first_tile, segment_rows, tile_position


@triton.jit(do_not_specialize=PLACES)
def produce_kernel(
    x0,
    weight0,
    x1,
    weight1,
    init,
    bases,
    counters,
    rank,
    world_size,
    shard_rows,
    piece_rows,
    pieces,
    total_rows,
    N,
    K0,
    K1,
    stride_wn0,
    stride_wk0,
    stride_wn1,
    stride_wk1,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    record,
    PAIRS: tl.constexpr,
    HAS_INIT: tl.constexpr,
    WIRE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The products, persistent. x_i ``[T, K_i]`` contiguous; one or two pairs.

    ``counters`` int32 ``[W * pieces]``, zero between launches.
    """
    epoch = tl.load(words(bases, rank) + epoch_word)
    ok = tl.load(record) == 0
    program, programs = tl.program_id(0), tl.num_programs(0)
    column_blocks = tl.cdiv(N, BN)
    done = 0
    for segment in range(0, world_size * pieces):
        owner = (rank + 1 + segment // pieces) % world_size
        piece = segment % pieces
        first, rows = segment_rows(owner, piece, shard_rows, piece_rows, total_rows)
        start = piece.to(tl.int64) * piece_rows * N
        target = memory(bases, owner, data_offset, rank, region_bytes, WIRE) + start
        row_blocks = tl.cdiv(rows, BM)
        tiles = tl.where(ok, row_blocks * column_blocks, 0)
        for tile in range(first_tile(program, done, programs), tiles, programs):
            row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
            total_MN = tl.zeros((BM, BN), dtype=tl.float32)
            total_MN = accumulate(
                total_MN, x0 + first.to(tl.int64) * K0, weight0, row_block, column_block,
                rows, N, K0, K0, stride_wn0, stride_wk0, BM, BN, BK, EVEN_K, PRECISION,
            )  # fmt: skip
            if PAIRS > 1:
                total_MN = accumulate(
                    total_MN, x1 + first.to(tl.int64) * K1, weight1, row_block, column_block,
                    rows, N, K1, K1, stride_wn1, stride_wk1, BM, BN, BK, EVEN_K, PRECISION,
                )  # fmt: skip
            n, n_exists = block_of(column_block, N, BN)
            m, m_exists = block_of(row_block, rows, BM)
            mask_MN = m_exists[:, None] & n_exists[None, :]
            if HAS_INIT:
                row = (first + m)[:, None].to(tl.int64) * N
                total_MN += tl.load(init + row + n[None, :], mask=mask_MN, other=0.0)
            place_MN = m[:, None].to(tl.int64) * N + n[None, :]
            tl.store(target + place_MN, total_MN.to(WIRE), mask=mask_MN)
        done += tiles
        # Every program counts, also one without a tile here: so empty segments are signalled too.
        if ok & (owner != rank):
            if count_in(counters + segment, programs):
                # Matched by the owner's wait in reduce_kernel.
                flag = ready_word + (rank * chunks + piece) * FLAG_WORDS
                signal(words(bases, owner) + flag, epoch)


@triton.jit(do_not_specialize=PLACES)
def reduce_kernel(
    bases,
    bias,
    y,
    rank,
    world_size,
    rows,
    piece_rows,
    N,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    HAS_BIAS: tl.constexpr,
    WIRE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the W partials of y ``[rows, N]`` in float32, in the order of ranks; round once.

    One program per (BM, BN) block; ``piece_rows`` is a multiple of BM. The own partial is there:
    ``produce_kernel`` ran before on this stream.
    """
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    column_blocks = tl.cdiv(N, BN)
    row_block = tl.program_id(0) // column_blocks
    piece = row_block * BM // piece_rows
    m, m_exists = block_of(row_block, rows, BM)
    n, n_exists = block_of(tl.program_id(0) % column_blocks, N, BN)
    mask_MN = m_exists[:, None] & n_exists[None, :]
    place_MN = m[:, None].to(tl.int64) * N + n[None, :]
    total_MN = tl.zeros((BM, BN), dtype=tl.float32)
    for source in range(0, world_size):
        if ok & (source != rank):
            # Matches the signal of the source's produce_kernel.
            flag = own + ready_word + (source * chunks + piece) * FLAG_WORDS
            ok = wait_at_least(flag, epoch, limit, record, READY, source, piece)
        part = memory(bases, rank, data_offset, source, region_bytes, WIRE)
        total_MN += tl.load(part + place_MN, mask=mask_MN & ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total_MN += tl.load(bias + n, mask=n_exists, other=0.0)[None, :].to(tl.float32)
    tl.store(y + place_MN, total_MN.to(y.dtype.element_ty), mask=mask_MN & ok)
