"""``y = gathered(x) · weightᵀ + bias`` with the gather beside the product.

Index spaces: T tokens (rows), in W shards of ``shard_rows`` by torch.chunk's rule, each in
``pieces`` of ``piece_rows``; K input features; N output features of this rank. A *segment* is one
piece of one source; a rank takes its own segments first, then its successors'.

==================== ==================================== =======================================
kernel               raises                               awaits
==================== ==================================== =======================================
push_kernel          ready[s][me][piece] on every peer    –  (``begin`` awaited consumed)
consume_kernel       –                                    ready[s][source][piece], once a segment
weight_grad_kernel   –                                    the same
==================== ==================================== =======================================

Pushed rows lie in the reader's memory, in the region of their source. The rank's own rows are read
where they are. Programs of one launch do not wait for each other: the pushes are a launch of their
own, before the products, or a copy engine's work.

Worked example: T = 7 on W = 3 (shards 3, 3, 1), pieces = 1. Rank 1 takes the segments of sources
1, 2, 0: rows 3..5 from x, row 6 and rows 0..2 from its memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import FLAG_WORDS, PLACES, READY, count_in, memory, signal, wait_at_least, words
from .tiles import (
    accumulate,
    accumulate_rest,
    bias_of,
    block_of,
    first_tile,
    segment_rows,
    tile_position,
)


@triton.jit(do_not_specialize=PLACES)
def push_kernel(
    x,
    bases,
    counters,
    rank,
    world_size,
    rows,
    piece_rows,
    pieces,
    K,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    record,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Copy x ``[rows, K]`` (contiguous) into every peer's memory, piece by piece.

    One program per (peer, row block, piece), nearest peer first, blocks of ``BM`` rows.
    ``counters`` int32 ``[W * pieces]``, zero between launches.
    """
    epoch = tl.load(words(bases, rank) + epoch_word)
    dtype = x.dtype.element_ty
    blocks = tl.cdiv(piece_rows, BM)
    program = tl.program_id(0)
    step = program // (pieces * blocks) + 1
    piece = program // blocks % pieces
    peer = (rank + step) % world_size
    if tl.load(record) == 0:
        target = memory(bases, peer, data_offset, rank, region_bytes, dtype)
        first = piece * piece_rows
        m = first + program % blocks * BM + tl.arange(0, BM)
        exists = (m < rows) & (m < first + piece_rows)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            place_MK = m[:, None].to(tl.int64) * K + k[None, :]
            mask_MK = exists[:, None] & (k < K)[None, :]
            tl.store(target + place_MK, tl.load(x + place_MK, mask=mask_MK), mask=mask_MK)
        if count_in(counters + step * pieces + piece, blocks):
            # Matched by the wait of the peer's segment (me, piece).
            flag = ready_word + (rank * chunks + piece) * FLAG_WORDS
            signal(words(bases, peer) + flag, epoch)


@triton.jit
def segment_data(x, bases, rank, source, piece, piece_rows, K, data_offset, region_bytes):
    """Where the rows of a segment lie: in x if they are this rank's own, else pushed."""
    dtype: tl.constexpr = x.dtype.element_ty
    start = piece.to(tl.int64) * piece_rows * K
    pushed = memory(bases, rank, data_offset, source, region_bytes, dtype)
    address = tl.where(source == rank, x.to(tl.int64), pushed.to(tl.int64))
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + start


@triton.jit(do_not_specialize=PLACES)
def consume_kernel(
    x,
    bases,
    weight,
    bias,
    y,
    rank,
    world_size,
    shard_rows,
    piece_rows,
    pieces,
    total_rows,
    N,
    K,
    stride_wn,
    stride_wk,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product, persistent: y ``[total_rows, N]`` contiguous. One wait per segment."""
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    program, programs = tl.program_id(0), tl.num_programs(0)
    column_blocks = tl.cdiv(N, BN)
    done = 0
    for segment in range(0, world_size * pieces):
        source = (rank + segment // pieces) % world_size
        piece = segment % pieces
        first, rows = segment_rows(source, piece, shard_rows, piece_rows, total_rows)
        if ok & (source != rank):
            # Matches the signal of push_kernel (or of the copy engine) on the source.
            flag = own + ready_word + (source * chunks + piece) * FLAG_WORDS
            ok = wait_at_least(flag, epoch, limit, record, READY, source, piece)
        a = segment_data(x, bases, rank, source, piece, piece_rows, K, data_offset, region_bytes)
        row_blocks = tl.cdiv(rows, BM)
        tiles = row_blocks * column_blocks
        # None after a wait that failed; said by the first, not by the number: the loop over K has
        # fewer moves.
        begin = tl.where(ok, first_tile(program, done, programs), tiles)
        for tile in range(begin, tiles, programs):
            row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
            total_MN = tl.zeros((BM, BN), dtype=tl.float32)
            if HAS_BIAS:
                total_MN += bias_of(bias, column_block, N, BN)
            total_MN = accumulate(
                total_MN, a, weight, row_block, column_block, rows, N, K,
                K, stride_wn, stride_wk, BM, BN, BK, EVEN_K, PRECISION,
            )  # fmt: skip
            m, m_exists = block_of(row_block, rows, BM)
            n, n_exists = block_of(column_block, N, BN)
            place_MN = (first + m)[:, None].to(tl.int64) * N + n[None, :]
            mask_MN = m_exists[:, None] & n_exists[None, :]
            tl.store(y + place_MN, total_MN.to(y.dtype.element_ty), mask=mask_MN)
        done += tiles


@triton.jit(do_not_specialize=PLACES)
def weight_grad_kernel(
    x,
    bases,
    other,
    grad,
    rank,
    world_size,
    shard_rows,
    piece_rows,
    pieces,
    total_rows,
    N,
    K,
    stride_on,
    stride_om,
    stride_gn,
    stride_gk,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``grad[n, k] = Σ_t other[t, n] · gathered(x)[t, k]``, the sum in float32, rounded once.

    ``other`` ``[total_rows, N]`` lies on this rank. One program per (BN, BK) tile of the gradient;
    tokens in blocks of BM, a wait before each segment's. The strides of ``grad`` may exchange its
    dimensions.
    """
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    k_blocks = tl.cdiv(K, BK)
    n_block, k_block = tl.program_id(0) // k_blocks, tl.program_id(0) % k_blocks
    total_NK = tl.zeros((BN, BK), dtype=tl.float32)
    for segment in range(0, world_size * pieces):
        source = (rank + segment // pieces) % world_size
        piece = segment % pieces
        first, rows = segment_rows(source, piece, shard_rows, piece_rows, total_rows)
        if ok & (source != rank):
            flag = own + ready_word + (source * chunks + piece) * FLAG_WORDS
            ok = wait_at_least(flag, epoch, limit, record, READY, source, piece)
        a = segment_data(x, bases, rank, source, piece, piece_rows, K, data_offset, region_bytes)
        left = other + first.to(tl.int64) * stride_om
        rows = tl.where(ok & (N > 0) & (K > 0), rows, 0)  # an empty gradient has a program too
        rest = rows % BM  # apart, so that the loop needs no masks
        total_NK = accumulate(
            total_NK, left, a, n_block, k_block, N, K, rows - rest,
            stride_on, 1, K, BN, BK, BM, True, PRECISION, stride_om,
        )  # fmt: skip
        if rest > 0:
            total_NK = accumulate_rest(
                total_NK, left, a, n_block, k_block, N, K, rows, rest,
                stride_on, stride_om, 1, K, BN, BK, BM, PRECISION,
            )  # fmt: skip
    n, n_exists = block_of(n_block, N, BN)
    k, k_exists = block_of(k_block, K, BK)
    place_NK = grad + n[:, None].to(tl.int64) * stride_gn + k[None, :].to(tl.int64) * stride_gk
    mask_NK = n_exists[:, None] & k_exists[None, :] & ok
    tl.store(place_NK, total_NK.to(grad.dtype.element_ty), mask=mask_NK)
