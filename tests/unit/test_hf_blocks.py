"""How experts modules of transformers are read: by flags and by what their activation does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.activations import ACT2FN

from fusedcomm.nn.hf_blocks import activation_alone, read_experts

FFN, HIDDEN = 6, 10


class Experts(nn.Module):
    """What transformers' decorator makes of an experts class."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor] | None, **flags: Any) -> None:
        super().__init__()
        self.has_gate = function is not None
        self.is_concatenated = flags.get("is_concatenated", True)
        self.is_transposed = flags.get("is_transposed", False)
        self.has_bias = flags.get("has_bias", False)
        shape = (FFN, HIDDEN) if self.is_transposed else (HIDDEN, FFN)
        self.down_proj = nn.Parameter(torch.empty(3, *shape, device="meta"))
        self.function = function
        self.act_fn = flags.get("act_fn")

    def _apply_gate(self, z: Tensor) -> Tensor:
        assert self.function is not None
        gate, up = z.chunk(2, -1) if self.is_concatenated else (z[..., ::2], z[..., 1::2])
        return self.function(gate, up)


def clamped(limit: float, alpha: float = 1.702) -> Callable[[Tensor, Tensor], Tensor]:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)

    return function


def clamped_swiglu(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


#: Name in this library, and the function of gate and up.
GATED: list[tuple[str | None, Callable[[Tensor, Tensor], Tensor]]] = [
    ("swiglu", lambda g, u: ACT2FN["silu"](g) * u),
    ("swiglu", lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype)),
    ("geglu", lambda g, u: ACT2FN["gelu"](g) * u),
    ("geglu_tanh", lambda g, u: ACT2FN["gelu_pytorch_tanh"](g) * u),
    ("gpt_oss", clamped(7.0)),
    # Near to one of these, and none of them.
    (None, clamped(7.5)),
    (None, clamped(7.0, alpha=1.7)),
    (None, clamped_swiglu(7.0)),
    (None, clamped_swiglu(200.0)),
    (None, lambda g, u: F.silu(u) * g),
    (None, lambda g, u: ACT2FN["quick_gelu"](g) * u),
    (None, lambda g, u: F.relu(g) * u),
    (None, lambda g, u: F.silu(g) * u * 1.001),
    (None, lambda g, u: (F.silu(g) * u)[..., :-1]),
]


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize(("name", "function"), GATED)
def test_activations_are_recognised(
    name: str | None, function: Callable[[Tensor, Tensor], Tensor], concatenated: bool
) -> None:
    form = read_experts(Experts(function, is_concatenated=concatenated))
    assert form.activation == name
    assert form.layout == ("gate_up" if concatenated else "interleaved")
    assert form.up_name == "gate_up_proj" and not form.transposed and not form.bias


@pytest.mark.parametrize(
    ("name", "act_fn"), [("relu2", "relu2"), (None, "relu"), (None, "silu")], ids=str
)
def test_without_a_gate(name: str | None, act_fn: str) -> None:
    form = read_experts(Experts(None, act_fn=ACT2FN[act_fn], is_transposed=True, has_bias=True))
    assert form.activation == name
    assert form.up_name == "up_proj" and form.transposed and form.bias


def test_an_activation_alone_keeps_no_weights() -> None:
    experts = Experts(clamped(3.0))
    function = activation_alone(experts)
    z = torch.randn(4, 2 * FFN)
    assert torch.equal(function(z), experts._apply_gate(z))
    assert not list(function.__self__.parameters())  # type: ignore[attr-defined]
    assert len(list(experts.parameters())) == 1


def test_reading_does_not_draw_from_the_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    read_experts(Experts(clamped(3.0)))
    assert torch.equal(torch.rand(1), expected)
