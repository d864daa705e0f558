"""A product that waits, multiplies, stores and signals, with a fault if one is named."""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks._compiled import loading

signal = loading.kernels("signals").signal
wait_at_least = loading.kernels("signals").wait_at_least


@triton.jit
def product_kernel(
    x, weight, y, flags, record, M, N, K, stride_wn, limit,
    FAULT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y ``[M, N]`` = x ``[M, K]`` · weightᵀ; extents are multiples of the tiles'."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if FAULT == "waits for a load":
        while tl.load(flags) < 1:
            pass
    elif FAULT == "waits without order":
        while tl.atomic_add(flags, 0, sem="relaxed", scope="sys") < 1:
            pass
    elif FAULT == "acquires and does not look":
        tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    else:
        wait_at_least(flags, 1, limit, record, 2, 0, 0)
    x_MK = x + m[:, None] * K + k[None, :]
    w_KN = weight + n[None, :] * stride_wn + k[:, None]
    total_MN = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if FAULT == "waits in the K loop":
            wait_at_least(flags + start, 1, limit, record, 2, 0, 0)
        if FAULT == "counts in the K loop":
            tl.atomic_add(flags + 32, 1, sem="relaxed", scope="gpu")
        if FAULT == "fences in the K loop":
            tl.atomic_xchg(flags + 32, 1, sem="release", scope="sys")
        a, b = tl.load(x_MK + start), tl.load(w_KN + start)
        if FAULT == "barrier in the K loop":
            tl.debug_barrier()
        if FAULT == "multiplies in full precision":
            total_MN = tl.dot(a, b, total_MN, input_precision="ieee")
        else:
            total_MN = tl.dot(a, b, total_MN)
        if FAULT == "works in the K loop":
            total_MN = total_MN * 0.5
    y_MN = y + m[:, None] * N + n[None, :]
    if FAULT == "knows no alignment":
        address = tl.load(flags.to(tl.pointer_type(tl.int64)) + 8)
        y_MN = address.to(tl.pointer_type(y.dtype.element_ty)) + m[:, None] * N + n[None, :]
    if FAULT == "stores a tile in bulk":
        to = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BM, BN])
        place = [tl.program_id(0) * BM, tl.program_id(1) * BN]
        to.store(place, total_MN.to(y.dtype.element_ty))
    else:
        tl.store(y_MN, total_MN.to(y.dtype.element_ty))
    if FAULT == "signals without a barrier":
        tl.atomic_xchg(flags + 64, 1, sem="release", scope="sys")
    elif FAULT == "signals without order":
        tl.debug_barrier()
        tl.atomic_xchg(flags + 64, 1, sem="relaxed", scope="sys")
    elif FAULT == "signals with a store":
        tl.debug_barrier()
        tl.store(flags + 64, 1)
    else:
        signal(flags + 64, 1)
