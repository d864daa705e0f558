"""Gradients of the experts' weights and biases, of rows whose number the device alone knows.

``dW[e] = dYᵀ · X`` and ``db[e] = Σ dY`` over the rows of expert e, the sums in float32 and rounded
once.

Index spaces: rows as in ``grouped_linear``, ``first_E`` the first of each expert and ``counts_E``
how many it has, int64; N output features (columns of dY), K input features (columns of X). How many
programs there are follows from the shape of the gradient, so that the host need not know the
counts. Rows of no expert, such as padding, are never read: they may hold anything.

========================== ====== =====================
kernel                     raises awaits
========================== ====== =====================
grouped_weight_grad_kernel –      –  (behind an await)
grouped_bias_grad_kernel   –      –  (behind an await)
========================== ====== =====================

No program adds to another one's sum, so results are the same in every run.

Worked example: three experts, ``first_E`` 0, 4, 4 and ``counts_E`` 3, 0, 2, a gradient of 2 by 2
tiles: 12 programs. Programs 0..3 add up rows 0..2, programs 4..7 store zeros, 8..11 add up rows 4
and 5. Nobody reads row 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import accumulate, accumulate_rest, block_of, tile_position


@triton.jit
def grouped_weight_grad_kernel(
    dy,
    x,
    grad,
    first_E,
    counts_E,
    N,
    K,
    stride_ge,
    stride_gn,
    stride_gk,
    record,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``grad[e, n, k] = Σ_r dy[r, n] · x[r, k]`` over the rows r of e; zeros for an expert of none.

    ``dy`` ``[rows, N]``, ``x`` ``[rows, K]``, both contiguous. One program per expert and tile
    ``[BN, BK]``; rows in steps of BM. The strides of ``grad`` may exchange its last two dimensions.
    """
    n_blocks, k_blocks = tl.cdiv(N, BN), tl.cdiv(K, BK)
    tiles = n_blocks * k_blocks
    expert = tl.program_id(0) // tiles
    n_block, k_block = tile_position(tl.program_id(0) % tiles, n_blocks, k_blocks, GROUP)
    ok = tl.load(record) == 0
    first = tl.load(first_E + expert)
    count = tl.where(ok, tl.load(counts_E + expert), 0).to(tl.int32)
    rest = count % BM  # apart, so that the loop needs no masks
    left, right = dy + first * N, x + first * K
    total_NK = tl.zeros((BN, BK), dtype=tl.float32)
    if count > 0:
        total_NK = accumulate(
            total_NK, left, right, n_block, k_block, N, K, count - rest,
            1, 1, K, BN, BK, BM, True, PRECISION, N,
        )  # fmt: skip
        if rest > 0:
            total_NK = accumulate_rest(
                total_NK, left, right, n_block, k_block, N, K, count, rest,
                1, N, 1, K, BN, BK, BM, PRECISION,
            )  # fmt: skip
    n, n_exists = block_of(n_block, N, BN)
    k, k_exists = block_of(k_block, K, BK)
    own = grad + tl.cast(expert, tl.int64) * stride_ge
    place_NK = own + n[:, None].to(tl.int64) * stride_gn + k[None, :].to(tl.int64) * stride_gk
    mask_NK = n_exists[:, None] & k_exists[None, :] & ok
    tl.store(place_NK, total_NK.to(grad.dtype.element_ty), mask=mask_NK)


@triton.jit
def grouped_bias_grad_kernel(
    dy, grad, first_E, counts_E, N, record, BM: tl.constexpr, BN: tl.constexpr
):
    """``grad[e, n] = Σ_r dy[r, n]`` over the rows r of e; zeros for an expert of none.

    ``dy`` ``[rows, N]`` and ``grad`` ``[experts, N]`` are contiguous. One program per expert and BN
    columns; rows in steps of BM.
    """
    n_blocks = tl.cdiv(N, BN)
    expert = tl.program_id(0) // n_blocks
    n, n_exists = block_of(tl.program_id(0) % n_blocks, N, BN)
    ok = tl.load(record) == 0
    first, count = tl.load(first_E + expert), tl.load(counts_E + expert)
    total_MN = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, tl.where(ok, count, 0), BM):
        m = start + tl.arange(0, BM)
        place_MN = dy + (first + m)[:, None] * N + n[None, :]
        mask_MN = (m < count)[:, None] & n_exists[None, :]
        total_MN += tl.load(place_MN, mask=mask_MN, other=0.0).to(tl.float32)
    total_N = tl.sum(total_MN, 0)  # over the threads once, behind the loop
    place_N = grad + tl.cast(expert, tl.int64) * N + n
    tl.store(place_N, total_N.to(grad.dtype.element_ty), mask=n_exists & ok)
