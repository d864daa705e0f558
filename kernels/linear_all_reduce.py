"""``y = Σ_ranks Σ_i x_i · weight_iᵀ + bias`` on every rank, for few tokens, in one launch.

Index spaces: M tokens; K_i input features of this rank; N output features; the result is cut into
tiles ``[BM, BN]``, and every tile is a chunk with flags of its own.

================ ======================================= ========================================
kernel           raises                                  awaits
================ ======================================= ========================================
one_shot_kernel  ready[s][me][tile] on every peer        ready[s][source][tile] of every source
two_shot_kernel  ready[s][me][tile] on the tile's owner  ready[s][source][tile], on the owner
                 ready[s][owner][tiles + tile] on every  the same of the owner, elsewhere
                 peer, by the owner
================ ======================================= ========================================

One-shot: a rank pushes its partial of a tile to all peers and adds everybody's itself. Two-shot: it
pushes to the tile's owner, ``tile % W``, which adds and pushes the result. Both add in float32, in
the order of ranks, so the results are bitwise equal on all ranks.

A tile is finished before the next one of a program begins. The smallest unfinished tile of all
ranks is never waited out: whoever makes it has nothing before it. So the waits cannot form a ring,
whatever the grids, while all programs of a launch are resident.

Worked example, two-shot, W = 2, 3 tiles: rank 0 owns tiles 0 and 2. For tile 1 it pushes its
partial into rank 1's memory, region 0, and awaits flag 3 + 1 of rank 1, whose result then lies in
region 1 of its own memory, behind the partials.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import FLAG_WORDS, PLACES, READY, memory, signal, wait_at_least, words
from .tiles import accumulate, block_of, tile_position


@triton.jit
def partial_tile(
    x0, weight0, x1, weight1, row_block, column_block, M, N, K0, K1,
    stride_wn0, stride_wk0, stride_wn1, stride_wk1,
    PAIRS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """This rank's partial of a tile, float32."""
    total_MN = tl.zeros((BM, BN), dtype=tl.float32)
    total_MN = accumulate(
        total_MN, x0, weight0, row_block, column_block, M, N, K0,
        K0, stride_wn0, stride_wk0, BM, BN, BK, EVEN_K, PRECISION,
    )  # fmt: skip
    if PAIRS > 1:
        total_MN = accumulate(
            total_MN, x1, weight1, row_block, column_block, M, N, K1,
            K1, stride_wn1, stride_wk1, BM, BN, BK, EVEN_K, PRECISION,
        )  # fmt: skip
    return total_MN


@triton.jit
def add_parts(
    own, bases, bias, place_MN, mask_MN, n, n_exists, rank, world_size, tile, epoch, ready_word,
    chunks, data_offset, region_bytes, limit, record, ok,
    HAS_BIAS: tl.constexpr, WIRE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Await every source's partial of a tile and add them in the order of ranks."""
    total_MN = tl.zeros((BM, BN), dtype=tl.float32)
    for source in range(0, world_size):
        if ok & (source != rank):
            # Matches the source's signal of this tile.
            flag = own + ready_word + (source * chunks + tile) * FLAG_WORDS
            ok = wait_at_least(flag, epoch, limit, record, READY, source, tile)
        part = memory(bases, rank, data_offset, source, region_bytes, WIRE)
        total_MN += tl.load(part + place_MN, mask=mask_MN & ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total_MN += tl.load(bias + n, mask=n_exists, other=0.0)[None, :].to(tl.float32)
    return total_MN, ok


@triton.jit(do_not_specialize=PLACES)
def one_shot_kernel(
    x0,
    weight0,
    x1,
    weight1,
    bias,
    y,
    bases,
    rank,
    world_size,
    M,
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
    limit,
    record,
    PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIRE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y ``[M, N]`` and x_i contiguous; persistent; ``chunks`` at least the number of tiles."""
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    row_blocks, column_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = tl.where(ok, row_blocks * column_blocks, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        total_MN = partial_tile(
            x0, weight0, x1, weight1, row_block, column_block, M, N, K0, K1,
            stride_wn0, stride_wk0, stride_wn1, stride_wk1,
            PAIRS, BM, BN, BK, EVEN_K, PRECISION,
        )  # fmt: skip
        m, m_exists = block_of(row_block, M, BM)
        n, n_exists = block_of(column_block, N, BN)
        place_MN = m[:, None].to(tl.int64) * N + n[None, :]
        mask_MN = m_exists[:, None] & n_exists[None, :] & ok
        for step in range(0, world_size):
            peer = (rank + step) % world_size
            target = memory(bases, peer, data_offset, rank, region_bytes, WIRE)
            tl.store(target + place_MN, total_MN.to(WIRE), mask=mask_MN)
        if ok:
            for step in range(1, world_size):
                peer = (rank + step) % world_size
                flag = ready_word + (rank * chunks + tile) * FLAG_WORDS
                signal(words(bases, peer) + flag, epoch)
        tl.debug_barrier()  # the own partial, which other threads stored, is read below
        total_MN, ok = add_parts(
            own, bases, bias, place_MN, mask_MN, n, n_exists, rank, world_size, tile, epoch,
            ready_word, chunks, data_offset, region_bytes, limit, record, ok,
            HAS_BIAS, WIRE, BM, BN,
        )  # fmt: skip
        tl.store(y + place_MN, total_MN.to(y.dtype.element_ty), mask=mask_MN & ok)


@triton.jit(do_not_specialize=PLACES)
def two_shot_kernel(
    x0,
    weight0,
    x1,
    weight1,
    bias,
    y,
    bases,
    rank,
    world_size,
    M,
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
    limit,
    record,
    PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIRE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``one_shot_kernel``; ``chunks`` at least twice the tiles.

    A region holds the source's partials, then, at half of ``region_bytes``, the results that it
    pushes as an owner, in y's dtype.
    """
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    ok = tl.load(record) == 0
    dtype: tl.constexpr = y.dtype.element_ty
    results = data_offset + region_bytes // 2
    row_blocks, column_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = row_blocks * column_blocks
    for tile in range(tl.program_id(0), tl.where(ok, tiles, 0), tl.num_programs(0)):
        owner = tile % world_size
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        total_MN = partial_tile(
            x0, weight0, x1, weight1, row_block, column_block, M, N, K0, K1,
            stride_wn0, stride_wk0, stride_wn1, stride_wk1,
            PAIRS, BM, BN, BK, EVEN_K, PRECISION,
        )  # fmt: skip
        m, m_exists = block_of(row_block, M, BM)
        n, n_exists = block_of(column_block, N, BN)
        place_MN = m[:, None].to(tl.int64) * N + n[None, :]
        mask_MN = m_exists[:, None] & n_exists[None, :] & ok
        target = memory(bases, owner, data_offset, rank, region_bytes, WIRE)
        tl.store(target + place_MN, total_MN.to(WIRE), mask=mask_MN)
        if owner == rank:
            tl.debug_barrier()  # the own partial, which other threads stored, is read below
            total_MN, ok = add_parts(
                own, bases, bias, place_MN, mask_MN, n, n_exists, rank, world_size, tile, epoch,
                ready_word, chunks, data_offset, region_bytes, limit, record, ok,
                HAS_BIAS, WIRE, BM, BN,
            )  # fmt: skip
            result_MN = total_MN.to(dtype)
            tl.store(y + place_MN, result_MN, mask=mask_MN & ok)
            for step in range(1, world_size):
                peer = (rank + step) % world_size
                result = memory(bases, peer, results, rank, region_bytes, dtype)
                tl.store(result + place_MN, result_MN, mask=mask_MN & ok)
            if ok:
                for step in range(1, world_size):
                    peer = (rank + step) % world_size
                    flag = ready_word + (rank * chunks + tiles + tile) * FLAG_WORDS
                    signal(words(bases, peer) + flag, epoch)
        else:
            if ok:
                # Matched by the owner's wait in add_parts.
                flag = ready_word + (rank * chunks + tile) * FLAG_WORDS
                signal(words(bases, owner) + flag, epoch)
                # Matches the owner's signal of the result, above.
                flag_here = own + ready_word + (owner * chunks + tiles + tile) * FLAG_WORDS
                ok = wait_at_least(flag_here, epoch, limit, record, READY, owner, tiles + tile)
            source = memory(bases, rank, results, owner, region_bytes, dtype)
            result_MN = tl.load(source + place_MN, mask=mask_MN & ok, other=0.0)
            tl.store(y + place_MN, result_MN, mask=mask_MN & ok)
