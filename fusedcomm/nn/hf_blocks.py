"""Hugging Face's sparse blocks (transformers ≥ 5), read by their structure, not by their names.

An experts module says by flags how it is to be understood (``is_transposed``, ``is_concatenated``,
``has_bias``, ``has_gate``, ``has_post_expert_norm``) and holds its activation as a function
(``_apply_gate``, or ``act_fn`` without a gate), which is recognised by what it does to numbers.
Nothing here imports transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedcomm.engines.experts import ACTIVATIONS, GATED, Style, activate

ROUTERS = ("gate", "router")
SHARED = ("shared_experts", "shared_expert", "shared_mlp")
SHARED_GATE = "shared_expert_gate"
_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


class ExpertsForm(NamedTuple):
    """What an experts module computes.

    Attributes:
        activation: one of the library's by name; None if it is none of them.
        layout, transposed, gated, bias: see ``fusedcomm.nn.experts.Experts``.
        normed: a norm follows each expert.
    """

    activation: str | None
    layout: str
    transposed: bool
    gated: bool
    bias: bool
    normed: bool

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"


class BlockForm(NamedTuple):
    """The names of a block's parts; "" where there is none."""

    experts: str
    router: str
    shared: str
    shared_gate: str


def read_experts(experts: nn.Module) -> ExpertsForm:
    """What an experts module computes, by its flags.

    Raises:
        ValueError: it has no such flags.
    """
    missing = [flag for flag in _FLAGS if not hasattr(experts, flag)]
    if missing:
        raise ValueError(
            f"{type(experts).__name__} does not say how its weights lie: it lacks "
            f"{', '.join(missing)}, which transformers >= 5 sets on its experts"
        )
    form = ExpertsForm(
        None,
        "gate_up" if experts.is_concatenated else "interleaved",
        bool(experts.is_transposed),
        bool(experts.has_gate),
        bool(experts.has_bias),
        bool(getattr(experts, "has_post_expert_norm", False)),
    )
    return form._replace(activation=_recognised(activation_of(experts), form, experts))


def activation_of(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    """What experts apply between their projections, from ``[rows, 2 ffn]`` with a gate."""
    return experts._apply_gate if experts.has_gate else experts.act_fn  # type: ignore


def activation_alone(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same as a function that keeps no weights alive."""
    alone = copy.copy(experts)
    alone._parameters = {}
    return activation_of(alone)


@torch.no_grad()
def _recognised(
    activation: Callable[[Tensor], Tensor], form: ExpertsForm, experts: Any
) -> str | None:
    """The name under which this library has an activation; None if under none.

    It is tried on numbers of both signs, within and far beyond the limits where some are clamped.
    """
    down: Tensor = experts.down_proj
    ffn = down.shape[-2 if form.transposed else -1]
    generator = torch.Generator("cpu").manual_seed(0)
    z = torch.randn(
        32, ffn * (2 if form.gated else 1), generator=generator, dtype=torch.float64, device="cpu"
    )
    z *= torch.logspace(-1, 4, 32, dtype=torch.float64, device="cpu").unsqueeze(1)
    found = activation(z.clone())
    expected = torch.empty(32, ffn, dtype=torch.float64, device="cpu")
    if found.shape != expected.shape:
        return None
    for name in ACTIVATIONS:
        if (name in GATED) == form.gated:
            activate(z, Style(name, form.layout, False), expected)
            # Some compute it in float32.
            if torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6):
                return name
    return None


def read_block(block: nn.Module) -> BlockForm:
    """The parts of a sparse block.

    Raises:
        ValueError: there is not one experts module and one router, or more than what a mixture has.
    """
    kind = type(block).__name__
    children = dict(block.named_children())
    experts = [
        name
        for name, child in children.items()
        if getattr(child, "down_proj", None) is not None
        and isinstance(child.down_proj, Tensor)
        and child.down_proj.dim() == 3
    ]
    if len(experts) != 1:
        raise ValueError(f"{kind} has {len(experts)} modules of stacked experts, not one")
    routers = [name for name in ROUTERS if name in children]
    if len(routers) != 1:
        raise ValueError(
            f"{kind} has {len(routers)} routers (modules called {' or '.join(ROUTERS)}), not one"
        )
    shared = next((name for name in SHARED if name in children), "")
    gate = SHARED_GATE if shared and SHARED_GATE in children else ""
    form = BlockForm(experts[0], routers[0], shared, gate)
    own = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
    other = sorted({*children} - {*form} | {name for name in own if "." not in name})
    if other:
        raise ValueError(f"{kind} holds {', '.join(other)} besides experts, router, shared expert")
    return form


class _Stand(nn.Module):
    """Stands in for experts: a function of all that they are given, and cheap."""

    comm: Any = None

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        beside: Callable[[], Tensor] | None = None,
    ) -> Any:
        y = x * (weights * (ids + 1)).sum(-1, keepdim=True).to(x.dtype)
        return y if beside is None else (y, beside())


@torch.no_grad()
def outputs_without_experts(block: nn.Module, name: str) -> Any:
    """What a block makes of a few fixed tokens if its experts are replaced by a simple function."""
    experts = getattr(block, name)
    trial = copy.copy(block)
    stand = _Stand()
    stand.comm = getattr(experts, "comm", None)
    trial._modules = {**block._modules, name: stand}
    weight: Tensor = experts.down_proj
    transposed = getattr(experts, "is_transposed", getattr(experts, "transposed", False))
    hidden = weight.shape[-1 if transposed else -2]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 5, hidden, generator=generator).to(weight.device, weight.dtype)
    with _evaluating(trial):
        return trial(x)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without what blocks do in training only: noise, dropout."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
