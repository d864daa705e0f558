"""Mixtures as modules for tests: made, written out for one rank, and checked against that."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from fusedcomm.nn import MoE, Router, Routing, full_state_dict
from tests.ranks.checking import relative_error

HIDDEN, FFN, EXPERTS, TOP_K = 12, 10, 7, 3
#: Tokens of each rank: uneven, and none.
TOKENS = {1: [9], 2: [5, 4], 3: [5, 0, 4], 4: [3, 2, 0, 4]}


def softsign_glu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.softsign(gate) * up


def gpt_oss(z: Tensor) -> Tensor:
    gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: function(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": gated(F.silu),
    "geglu": gated(F.gelu),
    "geglu_tanh": gated(lambda g: F.gelu(g, approximate="tanh")),
    "gpt_oss": gpt_oss,
    "relu2": lambda z: F.relu(z).square(),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_ffn": 6},
    "shared with a gate": {"shared_ffn": 6, "shared_gate": True, "activation": "geglu"},
    "gpt-oss": {
        "activation": "gpt_oss",
        "layout": "interleaved",
        "transposed": True,
        "bias": True,
        "router": "gpt-oss",
    },
    "no gate": {"activation": "relu2", "bias": True, "shared_ffn": 6},
    "tanh": {"activation": "geglu_tanh", "transposed": True},
    "function": {"activation": softsign_glu, "bias": True, "transposed": True},
    "aligned, with room": {"align": 4, "capacity": 64, "max_tokens": 9},
    "without overlap": {"engine": "plain", "shared_ffn": 6},
    "function, aligned, with room": {
        "activation": softsign_glu,
        "align": 4,
        "capacity": 64,
        "max_tokens": 9,
    },
}


def made(options: dict[str, Any], **factory: Any) -> MoE:
    torch.manual_seed(0)
    options = dict(options)
    if options.pop("router", None):
        options["router"] = Router(
            HIDDEN, EXPERTS, TOP_K, score="topk_softmax", bias=True, dtype=torch.float64
        )
    return MoE(HIDDEN, FFN, EXPERTS, TOP_K, **options, dtype=torch.float64, **factory)


def written_out(moe: MoE, full: dict[str, Tensor], x: Tensor) -> Tensor:
    """``[T, hidden]`` to the same, with the whole mixture's parameters, token by token."""
    experts = moe.experts
    own_router = copy.deepcopy(moe.router)
    prefix = "router."
    names = {n[len(prefix) :]: v for n, v in full.items() if n.startswith(prefix)}
    _, weights, ids = torch.func.functional_call(own_router, names, (x,))
    activation = experts.activation
    act = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def matrix(name: str, expert: int) -> Tensor:
        found = full[f"experts.{name}"][expert]
        return found.t() if experts.transposed else found

    def bias(name: str, expert: int) -> Tensor | None:
        return full[f"experts.{name}_bias"][expert] if experts.has_bias else None

    rows = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for choice in range(TOP_K):
            e = int(ids[token, choice])
            z = F.linear(x[token], matrix(experts.up_name, e), bias(experts.up_name, e))
            out = F.linear(act(z), matrix("down_proj", e), bias("down_proj", e))
            total = total + weights[token, choice] * out
        rows.append(total)
    y = torch.stack(rows)
    if "shared_expert.up_proj.weight" in full:
        up = F.linear(x, full["shared_expert.up_proj.weight"])
        if activation == "relu2":
            inside = F.relu(up).square()
        else:
            gate = F.linear(x, full["shared_expert.gate_proj.weight"])
            inside = act(torch.cat([gate, up], -1))
        shared = F.linear(inside, full["shared_expert.down_proj.weight"])
        if "shared_gate.weight" in full:
            shared = shared * torch.sigmoid(F.linear(x, full["shared_gate.weight"]))
        y = y + shared
    return y


def reference(moe: MoE, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """y, dx and the gradients of the whole mixture's parameters, from all tokens."""
    full = {n: v.requires_grad_() for n, v in full_state_dict(moe).items()}
    x = x.clone().requires_grad_()
    y = written_out(moe, full, x)
    y.backward(dy)
    grads = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in full.items()}
    assert x.grad is not None
    return y.detach(), x.grad, grads


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(9, HIDDEN, generator=generator, dtype=torch.float64) for _ in "xy")  # type: ignore


def own(tensor: Tensor, rank: int) -> Tensor:
    return tensor.split(TOKENS[fc.Communicator.of().world_size])[rank]


def check_gradients(moe: MoE, grads: dict[str, Tensor], times: float = 1.0) -> None:
    """Every parameter's gradient is that of the whole mixture: of an expert, its part."""
    for name, parameter in moe.named_parameters():
        expected = grads[name] * times
        if name.startswith("experts."):
            expected = moe.experts.own_part(name.removeprefix("experts."), expected)
        assert parameter.grad is not None, f"{name} has no gradient"
        error = relative_error(parameter.grad, expected)
        assert error < 1e-12, f"{name}: {error}"


def check_equals_whole(rank: int, options: dict[str, Any]) -> None:
    moe = made(options)
    x, dy = inputs()
    y_all, dx_all, grads = reference(moe, x, dy)
    mine = own(x, rank).clone().requires_grad_()
    y = moe(mine)
    y.backward(own(dy, rank))
    assert y.shape == mine.shape
    assert relative_error(y, own(y_all, rank)) < 1e-13
    assert mine.grad is not None
    assert relative_error(mine.grad, own(dx_all, rank)) < 1e-12
    check_gradients(moe, grads)
    for name, buffer in moe.named_buffers():
        assert not buffer.requires_grad, name


def check_ways_to_train(rank: int) -> None:
    """Accumulation, checkpointing, leading dimensions, frozen parts, no gradient at all."""
    moe = made({"shared_ffn": 6, "shared_gate": True})
    x, dy = inputs()
    _, _, grads = reference(moe, x, dy)
    mine, mine_dy = own(x, rank), own(dy, rank)
    for _ in range(2):
        moe(mine).backward(mine_dy)
    check_gradients(moe, grads, times=2.0)
    moe.zero_grad()
    xs = mine.clone().requires_grad_()
    checkpoint(moe, xs, use_reentrant=False).backward(mine_dy)
    check_gradients(moe, grads)
    moe.zero_grad()
    wide = mine.reshape(1, -1, 1, HIDDEN)
    y, routing = moe(wide, return_routing=True)
    assert y.shape == wide.shape and isinstance(routing, Routing)
    assert routing.ids.shape == (len(mine), TOP_K)
    y.backward(mine_dy.reshape(wide.shape))
    check_gradients(moe, grads)
    moe.zero_grad()
    for part in (moe.router, moe.shared_gate):
        part.requires_grad_(False)
    moe(mine).backward(mine_dy)
    for name, parameter in moe.named_parameters():
        if name.startswith(("router", "shared_gate")):
            assert parameter.grad is None
        else:
            assert (
                relative_error(
                    parameter.grad,
                    moe.experts.own_part(name.removeprefix("experts."), grads[name])
                    if name.startswith("experts")
                    else grads[name],
                )
                < 1e-12
            ), name
    with torch.no_grad():
        assert not moe(mine).requires_grad


def check_copies(rank: int, **options: Any) -> None:
    """A deep copy, and a module that was saved and loaded, have complete gradients, too."""
    moe = made({"shared_ffn": 6, **options})
    x, dy = inputs()
    _, _, grads = reference(moe, x, dy)
    buffer = io.BytesIO()
    torch.save(moe, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(moe), torch.load(buffer, weights_only=False)):
        copied(own(x, rank)).backward(own(dy, rank))
        check_gradients(copied, grads)
        assert all(parameter.grad is None for parameter in moe.parameters())
        assert copied.experts.comm is moe.experts.comm


def check_compiled(rank: int, **options: Any) -> None:
    """No graph break, forward or backward, for any number of tokens; the same numbers."""
    moe = made({"shared_ffn": 6, "shared_gate": True, "bias": True, **options})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for tokens in (4, 6 - rank, 5 + 3 * rank, 9):
        x = torch.randn(tokens, HIDDEN, dtype=torch.float64)
        found = []
        for call in (moe, compiled):
            moe.zero_grad()
            xs = x.clone().requires_grad_()
            y = call(xs)
            y.square().sum().backward()
            found.append([y, xs.grad, *(p.grad.clone() for p in moe.parameters())])
        for right, got in zip(*found, strict=True):
            assert relative_error(got, right) < 1e-14
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0, f"compiled anew: {graphs}"
    torch._dynamo.reset()
