"""The experts of one rank: up-projection, activation, down-projection, and their gradients.

For rows x of expert e: ``z = x · w13[e]ᵀ + b13[e]``, ``a = activation(z)``, ``h = a · w2[e]ᵀ +
b2[e]``. The activation is computed in float32 from z and rounded once:

========== ======================================================
activation of gate g and up u, or of z alone
========== ======================================================
swiglu     silu(g) · u
geglu      gelu(g) · u, with the error function
geglu_tanh gelu(g) · u, with the tanh approximation
gpt_oss    (u' + 1) · g' · sigmoid(1.702 · g'), g' = min(g, 7), u' = clamp(u, -7, 7)
relu2      relu(z)²; w13 has ffn rows instead of 2 · ffn
========== ======================================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from fusedcomm.engines.blocks import rows_at_once
from fusedcomm.engines.routed import Routed

Tensor = torch.Tensor

GATED = ("swiglu", "geglu", "geglu_tanh", "gpt_oss")
ACTIVATIONS = (*GATED, "relu2")
LAYOUTS = ("gate_up", "interleaved")

_ALPHA, _LIMIT = 1.702, 7.0  # gpt-oss's constants
#: Elements of z that are activated at once on a CPU, in float32.
_BLOCK = 1 << 18


class Style(NamedTuple):
    """How the experts' weights are to be understood.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        layout: "gate_up", all gate rows first, or "interleaved", gate and up in turn.
        transposed: whether weights are ``[in, out]``.
    """

    activation: str
    layout: str
    transposed: bool


class Experts(NamedTuple):
    """A rank's experts: ``w13 [E_local, 2 ffn, hidden]``, ``w2 [E_local, hidden, ffn]``, biases."""

    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None
    style: Style

    @property
    def ffn(self) -> int:
        return self.w2.shape[1 if self.style.transposed else 2]

    @property
    def hidden(self) -> int:
        return self.w2.shape[2 if self.style.transposed else 1]

    @property
    def width(self) -> int:
        """Features of z: 2 ffn, or ffn without a gate."""
        return self.w13.shape[2 if self.style.transposed else 1]

    def up(self, expert: int) -> Tensor:
        """``[hidden, width]``."""
        weight = self.w13[expert]
        return weight if self.style.transposed else weight.t()

    def down(self, expert: int) -> Tensor:
        """``[ffn, hidden]``."""
        weight = self.w2[expert]
        return weight if self.style.transposed else weight.t()

    def project_up(self, expert: int, x: Tensor, out: Tensor) -> None:
        product(x, self.up(expert), None if self.b13 is None else self.b13[expert], out)

    def project_down(self, expert: int, a: Tensor, out: Tensor) -> None:
        product(a, self.down(expert), None if self.b2 is None else self.b2[expert], out)


def product(x: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x · factor + bias``."""
    if bias is None:
        torch.mm(x, factor, out=out)
    else:
        torch.addmm(bias, x, factor, out=out)


def activate(z: Tensor, style: Style, out: Tensor) -> None:
    """``out = activation(z)``; z ``[rows, width]``, out ``[rows, ffn]``."""
    wide = torch.promote_types(z.dtype, torch.float32)
    step = rows_at_once(z.device, z.shape[1], _BLOCK)
    kind = style.activation
    for start in range(0, z.shape[0], step):
        # Widened in one piece, which is several times faster than a half with strides.
        gate, up = _halves(z[start : start + step].to(wide), style)
        if kind == "relu2":
            value = gate.relu().square_()
        elif kind == "swiglu":
            value = F.silu(gate).mul_(up)
        elif kind == "gpt_oss":
            gate = gate.clamp(max=_LIMIT)
            value = torch.sigmoid(gate * _ALPHA).mul_(gate)
            value.mul_(up.clamp(-_LIMIT, _LIMIT).add_(1.0))
        else:
            value = F.gelu(gate, approximate=_approximation(kind)).mul_(up)
        out[start : start + step].copy_(value)


def activate_backward(z: Tensor, da: Tensor, style: Style, a: Tensor, dz: Tensor) -> None:
    """``a = activation(z)`` again, and ``dz``, the gradient of z, from that of a.

    Args:
        z, dz: ``[rows, width]``.
        da, a: ``[rows, ffn]``. ``a`` may be the same tensor as ``da``.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    step = rows_at_once(z.device, z.shape[1], _BLOCK)
    for start in range(0, z.shape[0], step):
        rows = slice(start, start + step)
        gate, up = _halves(z[rows].to(wide), style)
        d_gate, d_up = _halves(dz[rows], style)
        d = da[rows].to(wide, copy=True)  # a may be da
        kind = style.activation
        if kind == "relu2":
            root = gate.relu()
            a[rows].copy_(root.square())
            d_gate.copy_(d.mul_(root).mul_(2.0))
            continue
        if kind == "swiglu":
            s = torch.sigmoid(gate)
            value = gate * s
            slope = s * (1.0 + gate * (1.0 - s))
        elif kind == "gpt_oss":
            passes, inside = gate <= _LIMIT, up.abs() <= _LIMIT
            gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT) + 1.0
            s = torch.sigmoid(_ALPHA * gate)
            value = gate * s
            slope = (s + _ALPHA * value * (1.0 - s)) * passes
            d_up.copy_(d * value * inside)
        else:
            how = _approximation(kind)
            value = F.gelu(gate, approximate=how)
            slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate=how)
        a[rows].copy_(value * up)
        if kind != "gpt_oss":
            d_up.copy_(d * value)
        d_gate.copy_(d.mul_(up).mul_(slope))


def experts_grads(
    dh: Tensor,
    a: Tensor,
    dz: Tensor,
    x_rows: Tensor,
    experts: Experts,
    routed: Routed,
    rank: int,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients of w13, w2, b13, b2 where ``needs`` says so: zeros for an expert of no rows."""
    like = [experts.w13, experts.w2, experts.b13, experts.b2]
    grads: list[Tensor | None] = [
        torch.zeros_like(weight, memory_format=torch.contiguous_format)
        if needed and weight is not None
        else None
        for needed, weight in zip(needs, like, strict=True)
    ]
    dw13, dw2, db13, db2 = grads
    layout, transposed = routed.layout, experts.style.transposed
    wide = torch.promote_types(dh.dtype, torch.float32)
    for expert, column in enumerate(layout.placement.columns(rank)):
        first = int(layout.first_row_E[column])
        part = slice(first, first + int(layout.counts_E[column]))
        if part.start == part.stop:
            continue
        if dw13 is not None:
            left, right = (x_rows, dz) if transposed else (dz, x_rows)
            torch.mm(left[part].t(), right[part], out=dw13[expert])
        if dw2 is not None:
            left, right = (a, dh) if transposed else (dh, a)
            torch.mm(left[part].t(), right[part], out=dw2[expert])
        if db13 is not None:
            db13[expert] = dz[part].sum(0, dtype=wide)
        if db2 is not None:
            db2[expert] = dh[part].sum(0, dtype=wide)
    return grads


def _halves(z: Tensor, style: Style) -> tuple[Tensor, Tensor]:
    """Gate and up; z twice where there is no gate."""
    if style.activation == "relu2":
        return z, z
    if style.layout == "interleaved":
        return z[:, ::2], z[:, 1::2]
    half = z.shape[1] // 2
    return z[:, :half], z[:, half:]


def _approximation(kind: str) -> str:
    return "tanh" if kind == "geglu_tanh" else "none"
