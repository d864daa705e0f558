"""The GEMM tile: ``A[rows, K] · W[columns, K]ᵀ`` in float32, and the order of tiles in a chunk.

Index spaces: a chunk has ``rows`` rows of A and gives ``[rows, N]``; it is cut into tiles
``[BM, BN]``; tile ids run over groups of ``GROUP`` row blocks, columns inside, so that the tiles in
flight share rows of A and of W in the second-level cache.

Worked example: 3 row blocks, 2 column blocks, GROUP = 2. Tiles 0..5 are the (row, column) blocks
(0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """The (row, column) block of a tile id."""
    in_group = GROUP * column_blocks
    group = tile // in_group
    first = group * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    within = tile % in_group
    return first + within % height, within // height


@triton.jit
def first_tile(program, done, programs):
    """The first tile of a chunk that falls to ``program`` when ``done`` tiles came before it.

    Tiles are dealt round-robin over all chunks, so that no chunk's short last wave is paid alone.
    """
    return (program - done % programs + programs) % programs


@triton.jit
def operands(
    a, w, row_block, column_block, rows, N, stride_am, stride_ak, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile's first step along K: a ``[BM, BK]`` and w ``[BK, BN]``.

    Rows and columns past the edge are wrapped around; whoever stores the product masks them.
    """
    m = (row_block * BM + tl.arange(0, BM)) % rows
    n = (column_block * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a_MK = a + m[:, None].to(tl.int64) * stride_am + k[None, :].to(tl.int64) * stride_ak
    w_KN = w + n[None, :].to(tl.int64) * stride_wn + k[:, None].to(tl.int64) * stride_wk
    return a_MK, w_KN


@triton.jit
def accumulate(
    total_MN,
    a,
    w,
    row_block,
    column_block,
    rows,
    N,
    K,
    stride_am,
    stride_wn,
    stride_wk,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    stride_ak=1,
):
    """``total + A[rows, K] · W[columns, K]ᵀ`` for one tile, float32 ``[BM, BN]``.

    ``rows`` and ``N`` must not be 0. What lies past the edges is garbage. ``EVEN_K``: K is a
    multiple of BK.
    """
    a_MK, w_KN = operands(
        a, w, row_block, column_block, rows, N, stride_am, stride_ak, stride_wn, stride_wk,
        BM, BN, BK,
    )  # fmt: skip
    k = tl.arange(0, BK)
    # How far along K, in elements. A stride that Triton knows to be 1 is an int here, and base +
    # k in 32 bits is the shortest loop. With another one the product needs 64 bits; carried as a
    # scalar it costs two instructions, while carried pointers cost two a load.
    a_step, w_step = tl.zeros((), dtype=tl.int64), tl.zeros((), dtype=tl.int64)
    a_stride, w_stride = tl.cast(stride_ak, tl.int64) * BK, tl.cast(stride_wk, tl.int64) * BK
    for start in range(0, K, BK):
        x_MK = a_MK + (start if isinstance(stride_ak, int) else a_step)
        y_KN = w_KN + (start if isinstance(stride_wk, int) else w_step)
        if EVEN_K:
            y, x = tl.load(y_KN), tl.load(x_MK)  # this order leaves fewer moves in the loop
        else:
            x = tl.load(x_MK, mask=k[None, :] < K - start, other=0.0)
            y = tl.load(y_KN, mask=k[:, None] < K - start, other=0.0)
        total_MN = tl.dot(x, y, total_MN, input_precision=PRECISION)
        a_step += a_stride
        w_step += w_stride
    return total_MN


@triton.jit
def accumulate_rest(
    total_MN, a, w, row_block, column_block, rows, N, K, rest,
    stride_am, stride_ak, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What ``accumulate`` with EVEN_K leaves over: the last ``rest`` of K, less than BK."""
    a_MK, w_KN = operands(
        a + tl.cast(K - rest, tl.int64) * stride_ak, w + tl.cast(K - rest, tl.int64) * stride_wk,
        row_block, column_block, rows, N, stride_am, stride_ak, stride_wn, stride_wk, BM, BN, BK,
    )  # fmt: skip
    k = tl.arange(0, BK)
    x = tl.load(a_MK, mask=k[None, :] < rest, other=0.0)
    y = tl.load(w_KN, mask=k[:, None] < rest, other=0.0)
    return tl.dot(x, y, total_MN, input_precision=PRECISION)


@triton.jit
def segment_rows(owner, piece, shard_rows, piece_rows, total_rows):
    """The first row of a rank's piece in the whole tensor, and how many rows it has (maybe 0).

    >>> # 7 rows on 3 ranks (3, 3, 1), pieces of 2 rows: rank 1's second piece is row 5, one row
    """
    first = owner * shard_rows + piece * piece_rows
    stop = tl.minimum(tl.minimum(first + piece_rows, (owner + 1) * shard_rows), total_rows)
    return first, tl.maximum(stop - first, 0)


@triton.jit
def block_of(block, size, SIZE: tl.constexpr):
    """The indices of a block along one axis, and which of them exist."""
    index = block * SIZE + tl.arange(0, SIZE)
    return index, index < size


@triton.jit
def bias_of(bias, column_block, N, BN: tl.constexpr):
    """The bias of a tile's columns, float32 ``[1, BN]``."""
    n, n_exists = block_of(column_block, N, BN)
    return tl.load(bias + n, mask=n_exists, other=0.0)[None, :].to(tl.float32)


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    y,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``y = x · weightᵀ + bias``, persistent, no signals: what the others are compared with."""
    row_blocks, column_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0)):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        total_MN = tl.zeros((BM, BN), dtype=tl.float32)
        total_MN = accumulate(
            total_MN, x, weight, row_block, column_block, M, N, K,
            stride_xm, stride_wn, stride_wk, BM, BN, BK, EVEN_K, PRECISION, stride_xk,
        )  # fmt: skip
        n, n_exists = block_of(column_block, N, BN)
        m, m_exists = block_of(row_block, M, BM)
        if HAS_BIAS:
            total_MN += bias_of(bias, column_block, N, BN)
        place = y + m[:, None].to(tl.int64) * stride_ym + n[None, :]
        tl.store(place, total_MN.to(y.dtype.element_ty), mask=m_exists[:, None] & n_exists[None, :])
