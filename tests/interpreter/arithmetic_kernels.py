"""Small kernels that do one kind of arithmetic each; to be imported under TRITON_INTERPRET=1."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedcomm.kernels.signals import memory

#: What ``binary_kernel`` computes, in the order of its rows.
BINARY = ("add", "sub", "mul", "div", "minimum", "maximum", "where", "abs")


@triton.jit
def binary_kernel(a, b, out, N, SIZE: tl.constexpr):
    """Row i of out ``[len(BINARY), N]`` is BINARY[i] of a and b, ``[N]`` each, all of one dtype."""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = n < N
    x = tl.load(a + n, mask=mask, other=1.0)
    y = tl.load(b + n, mask=mask, other=1.0)
    tl.store(out + n, x + y, mask=mask)
    tl.store(out + N + n, x - y, mask=mask)
    tl.store(out + 2 * N + n, x * y, mask=mask)
    tl.store(out + 3 * N + n, (x / y).to(out.dtype.element_ty), mask=mask)
    tl.store(out + 4 * N + n, tl.minimum(x, y), mask=mask)
    tl.store(out + 5 * N + n, tl.maximum(x, y), mask=mask)
    tl.store(out + 6 * N + n, tl.where((x < y) | (x != x), x, x + y), mask=mask)
    tl.store(out + 7 * N + n, tl.abs(x), mask=mask)


@triton.jit
def cast_kernel(source, target, N, SIZE: tl.constexpr):
    """target = source, in target's dtype."""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = n < N
    tl.store(target + n, tl.load(source + n, mask=mask).to(target.dtype.element_ty), mask=mask)


@triton.jit
def round_kernel(source, target, N, SIZE: tl.constexpr):
    """As ``cast_kernel``, with the rounding named."""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = n < N
    value = tl.load(source + n, mask=mask)
    value = value.to(target.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(target + n, value, mask=mask)


@triton.jit
def dot_kernel(a, b, init, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out = init + a · b, ``[M, K]`` and ``[K, N]``; init is float32."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.load(init + m[:, None] * N + n[None, :])
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty))


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def reduce_kernel(a, out, M: tl.constexpr, N: tl.constexpr):
    """Columns of out ``[M, 4]``: sum, max, min, and the sum by a function of the caller's."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    dtype = out.dtype.element_ty
    tl.store(out + m * 4, tl.sum(x, 1).to(dtype))
    tl.store(out + m * 4 + 1, tl.max(x, 1).to(dtype))
    tl.store(out + m * 4 + 2, tl.min(x, 1).to(dtype))
    tl.store(out + m * 4 + 3, tl.reduce(x, 1, _plus).to(dtype))


@triton.jit
def masked_kernel(a, out, N, SIZE: tl.constexpr):
    """out ``[2, SIZE]`` = a where there is something, else 3.25; and twice that."""
    n = tl.arange(0, SIZE)
    x = tl.load(a + n, mask=n < N, other=3.25)
    tl.store(out + n, x)
    tl.store(out + SIZE + n, x + x)


@triton.jit
def constant_kernel(a, out, SIZE: tl.constexpr):
    """out ``[3, SIZE]`` = 1.5; 2.5 a + 0.75; -a."""
    n = tl.arange(0, SIZE)
    x = tl.load(a + n)
    tl.store(out + n, tl.full((SIZE,), 1.5, dtype=out.dtype.element_ty))
    tl.store(out + SIZE + n, x * 2.5 + 0.75)
    tl.store(out + 2 * SIZE + n, 0.0 - x)


@triton.jit
def counter_kernel(flags, wanted, out, N):
    """out[i] = whether flags[i] has reached wanted[i]; flags[i] moves on by one."""
    for i in range(0, N):
        flag = tl.load(flags + i)
        tl.store(out + i, (flag - tl.load(wanted + i) >= 0).to(tl.int32))
        tl.store(flags + i, flag + 1)


@triton.jit(do_not_specialize=["writer"])
def address_kernel(bases, offset, writer, region_bytes, out):
    """Where the region of ``writer`` lies on two ranks."""
    for rank in range(0, 2):
        place = memory(bases, rank, offset, writer, region_bytes, tl.float32)
        tl.store(out + rank, place.to(tl.int64))
