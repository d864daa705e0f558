"""The experts' activations and their gradients, of rows whose number the device alone knows.

``a = f(g) · u`` of the gate g and the up-projection u, which z holds, or ``a = relu(z)²``; from da,
the gradient of a: ``dg = da · u · f'(g)`` and ``du = da · f(g)``, or ``dz = 2 · da · relu(z)``.
Everything in float32, rounded once.

Index spaces: rows as in ``grouped_linear``, ``first_E`` the first of each expert and ``counts_E``
how many it has, int64. Features: N of a and da, the width of z and dz is 2 N, or N without a gate.
Feature n has its gate in column n and its up-projection in column N + n; if PAIRED, in columns 2 n
and 2 n + 1. Rows of no expert, such as padding, are neither read nor written: whoever reads a and
dz (``grouped_linear``, ``grouped_weight_grad``) does not read them either.

====================== ====== =====================
kernel                 raises awaits
====================== ====== =====================
activation_kernel      –      –  (behind an await)
activation_grad_kernel –      –  (behind an await)
====================== ====== =====================

``grouped_linear.up_kernel`` takes the same functions, of a tile that it has just multiplied.

Worked example: ``first_E`` 0, 6, 6 and ``counts_E`` 5, 0, 2, blocks of 4 rows. Program 0 has rows
0..3, program 1 row 4, program 2 rows 6 and 7; others find none left and stop.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(tl.PropagateNan.ALL)  # a NaN stays one, as in torch


@triton.jit
def limited(gate, up, ACTIVATION: tl.constexpr):
    """What gpt-oss's activation makes of both beforehand; others leave them as they are."""
    if ACTIVATION == "gpt_oss":
        gate = tl.minimum(gate, 7.0, propagate_nan=_ALL)
        up = tl.minimum(tl.maximum(up, -7.0, propagate_nan=_ALL), 7.0, propagate_nan=_ALL) + 1.0
    return gate, up


@triton.jit
def gate_function(gate, ACTIVATION: tl.constexpr):
    """f(g) and f'(g), float32; see ``engines.experts``."""
    if ACTIVATION == "geglu":
        below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))  # the normal distribution's
        value = gate * below
        slope = below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif ACTIVATION == "geglu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        part = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        value = gate * part
        inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        slope = part + 2.0 * value * (1.0 - part) * inner_slope
    else:
        sharpness: tl.constexpr = 1.702 if ACTIVATION == "gpt_oss" else 1.0
        part = tl.sigmoid(sharpness * gate)
        value = gate * part
        slope = part + sharpness * value * (1.0 - part)
    return value, slope


@triton.jit
def activation(gate, up, ACTIVATION: tl.constexpr):
    """a, of float32 gate and up-projection; "relu2" and "none" look at the former alone."""
    if ACTIVATION == "relu2":
        root = tl.maximum(gate, 0.0, propagate_nan=_ALL)
        result = root * root
    elif ACTIVATION == "none":
        result = gate
    else:
        gate, up = limited(gate, up, ACTIVATION)
        value, _ = gate_function(gate, ACTIVATION)
        result = value * up
    return result


@triton.jit
def activation_grad(gate, up, d, ACTIVATION: tl.constexpr):
    """a, and the gradients of the gate and the up-projection from d, that of a; all float32."""
    if ACTIVATION == "relu2":
        root = tl.maximum(gate, 0.0, propagate_nan=_ALL)
        result = root * root
        d_gate = 2.0 * d * root
        d_up = d_gate
    else:
        g, u = limited(gate, up, ACTIVATION)
        value, slope = gate_function(g, ACTIVATION)
        result = value * u
        d_gate, d_up = d * u * slope, d * value
        if ACTIVATION == "gpt_oss":
            d_gate *= (gate <= 7.0).to(tl.float32)
            d_up *= (tl.abs(up) <= 7.0).to(tl.float32)
    return result, d_gate, d_up


@triton.jit
def block_of_expert(first_E, counts_E, experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """The rows of this program: the first, int64, and how many, up to BM; none: nothing is left.

    Programs are dealt the experts' blocks of BM rows in turn.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(counts_E + expert, mask=expert < experts, other=0).to(tl.int32)
    blocks = tl.cdiv(counts, BM)
    own = tl.sum((tl.cumsum(blocks, 0) <= program).to(tl.int32), 0)
    block = program - tl.sum(tl.where(expert < own, blocks, 0), 0)
    count = tl.sum(tl.where(expert == own, counts, 0), 0)
    first = tl.load(first_E + own, mask=own < experts, other=0) + block * BM
    return first, tl.minimum(count - block * BM, BM)


@triton.jit
def load_halves(
    z, start, rows, N,
    GATED: tl.constexpr, PAIRED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gate and up-projection of BN features from ``start`` on, float32; z twice without a gate."""
    m = tl.arange(0, BM)[:, None]
    if PAIRED:
        column = 2 * start + tl.arange(0, 2 * BN)[None, :]
        mask = (m < rows) & (column < 2 * N)
        pairs = tl.load(z + m * (2 * N) + column, mask=mask, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, (BM, BN, 2)))
    else:
        column = start + tl.arange(0, BN)[None, :]
        mask = (m < rows) & (column < N)
        place = z + m * (2 * N if GATED else N) + column
        gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(place + N, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_halves(
    dz, gate, up, start, rows, N,
    GATED: tl.constexpr, PAIRED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rounded to where ``load_halves`` has them from; the gate alone without one."""
    m = tl.arange(0, BM)[:, None]
    dtype: tl.constexpr = dz.dtype.element_ty
    if PAIRED:
        column = 2 * start + tl.arange(0, 2 * BN)[None, :]
        pairs = tl.reshape(tl.join(gate.to(dtype), up.to(dtype)), (BM, 2 * BN))
        tl.store(dz + m * (2 * N) + column, pairs, mask=(m < rows) & (column < 2 * N))
    else:
        column = start + tl.arange(0, BN)[None, :]
        mask = (m < rows) & (column < N)
        place = dz + m * (2 * N if GATED else N) + column
        tl.store(place, gate.to(dtype), mask=mask)
        if GATED:
            tl.store(place + N, up.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["experts"])
def activation_kernel(
    z,
    a,
    first_E,
    counts_E,
    experts,
    N,
    record,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PAIRED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """a ``[rows, N]`` of z ``[rows, width]``; one program per block, in steps of BN features.

    Programs: at least the experts' blocks of BM rows, so ``rows / BM`` and one more for each expert
    will do. EXPERTS: a power of two, at least ``experts``.
    """
    first, rows = block_of_expert(first_E, counts_E, experts, BM, EXPERTS)
    if (rows > 0) & (tl.load(record) == 0):
        z += first * (2 * N if GATED else N)
        a += first * N
        m = tl.arange(0, BM)[:, None]
        for start in range(0, N, BN):
            gate, up = load_halves(z, start, rows, N, GATED, PAIRED, BM, BN)
            result = activation(gate, up, ACTIVATION).to(a.dtype.element_ty)
            column = start + tl.arange(0, BN)[None, :]
            tl.store(a + m * N + column, result, mask=(m < rows) & (column < N))


@triton.jit(do_not_specialize=["experts"])
def activation_grad_kernel(
    z,
    da,
    a,
    dz,
    first_E,
    counts_E,
    experts,
    N,
    record,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PAIRED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """dz ``[rows, width]``, and a ``[rows, N]`` again, of z and da; as ``activation_kernel``.

    ``a`` may be the same tensor as ``da``: each element is read before it is written, by the
    program that writes it.
    """
    first, rows = block_of_expert(first_E, counts_E, experts, BM, EXPERTS)
    if (rows > 0) & (tl.load(record) == 0):
        z += first * (2 * N if GATED else N)
        dz += first * (2 * N if GATED else N)
        da += first * N
        a += first * N
        m = tl.arange(0, BM)[:, None]
        for start in range(0, N, BN):
            gate, up = load_halves(z, start, rows, N, GATED, PAIRED, BM, BN)
            column = start + tl.arange(0, BN)[None, :]
            mask = (m < rows) & (column < N)
            d = tl.load(da + m * N + column, mask=mask, other=0.0).to(tl.float32)
            result, d_gate, d_up = activation_grad(gate, up, d, ACTIVATION)
            tl.store(a + m * N + column, result.to(a.dtype.element_ty), mask=mask)
            store_halves(dz, d_gate, d_up, start, rows, N, GATED, PAIRED, BM, BN)
