"""fc.nn.MoE against the same mixture written out for one rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from fusedcomm.nn import MoE, Router, Routing, full_state_dict, load_full_state_dict
from fusedcomm.parallel import sync_replicated
from tests.conftest import Pools
from tests.ranks.checking import relative_error

HIDDEN, FFN, EXPERTS, TOP_K = 12, 10, 7, 3
#: Tokens of each rank: uneven, and none.
TOKENS = {1: [9], 2: [5, 4], 3: [5, 0, 4], 4: [3, 2, 0, 4]}


def softsign_glu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.softsign(gate) * up


def soft_relu(z: Tensor) -> Tensor:
    return F.softplus(z)


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


def check_autocast(rank: int) -> None:
    """Products in bfloat16, parameters and gradients in float32: as a bfloat16 mixture's."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shared_ffn": 6, "bias": True}
    router = Router(HIDDEN, EXPERTS, TOP_K, float32=True)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, router=router, **options)
    low = copy.deepcopy(moe).bfloat16()
    low.router = copy.deepcopy(router)
    x = own(inputs()[0], rank).float().bfloat16().float()  # the same for both routers
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    right = low(x.bfloat16())
    assert y.dtype == right.dtype == torch.bfloat16
    assert torch.equal(y, right)
    y.float().square().sum().backward()
    right.float().square().sum().backward()
    for (name, parameter), other in zip(moe.named_parameters(), low.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert relative_error(parameter.grad, other.grad) < 0.02, name


def check_autocast_of_a_function(rank: int) -> None:
    """Experts by a function travel, compute and come back in autocast's dtype, too."""
    named, own = (
        MoE(HIDDEN, FFN, EXPERTS, TOP_K, activation=activation, bias=True)
        for activation in ("swiglu", ACTIVATIONS["swiglu"])
    )
    load_full_state_dict(own, full_state_dict(named))
    x = inputs()[0].float().split(TOKENS[own.experts.comm.world_size])[rank]
    with torch.autocast("cpu", dtype=torch.bfloat16), fc.trace() as recorded:
        y, right = own(x), named(x)
    assert y.dtype == right.dtype == torch.bfloat16
    assert relative_error(y, right) < 0.02
    assert recorded.plans
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in own.parameters())


def check_one_choice(rank: int) -> None:
    """With k = 1 the router learns where its weights are not renormalised to 1."""
    router = Router(HIDDEN, EXPERTS, 1, renormalize=False, dtype=torch.float64)
    moe = MoE(HIDDEN, FFN, EXPERTS, 1, router=router, dtype=torch.float64)
    full = {n: v.requires_grad_() for n, v in full_state_dict(moe).items()}
    x, dy = inputs()
    rows = []
    for row, dy_row in zip(x, dy, strict=True):
        scores = (full["router.weight"] @ row).softmax(0)
        e = int(scores.argmax())
        z = full["experts.gate_up_proj"][e] @ row
        y = scores[e] * (full["experts.down_proj"][e] @ ACTIVATIONS["swiglu"](z))
        rows.append((y * dy_row).sum())
    torch.stack(rows).sum().backward()
    moe(own(x, rank)).backward(own(dy, rank))
    grads = {n: v.grad for n, v in full.items()}
    assert grads["router.weight"].norm() > 1e-3
    check_gradients(moe, grads)


def check_dropped(rank: int, activation: Any) -> None:
    """The layer says how many choices found no room; what remains is computed."""
    options = {"capacity": 6, "overflow": "drop", "activation": activation}
    moe = made(options)
    assert made({"capacity": 60}).experts.dropped is None
    assert moe.experts.dropped.item() == 0 and "experts.dropped" not in moe.state_dict()
    x, _ = inputs()
    mine = own(x, rank)
    for _ in range(2):
        y, routing = moe(mine, return_routing=True)
        d = fc.dispatch(mine, routing.ids, None, EXPERTS, capacity=6, overflow="drop")
        assert torch.equal(moe.experts.dropped, d.dropped)
    total = fc.all_reduce(d.dropped.double().reshape(1))
    world_size = moe.experts.comm.world_size
    assert total.item() > 0 and total.item() >= 9 * TOP_K - 6 * world_size
    full = full_state_dict(moe)
    slots = d.routing.slot
    expected = torch.zeros_like(mine)
    act = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    for token, choice in (slots >= 0).nonzero().tolist():
        e = int(routing.ids[token, choice])
        z = full[f"experts.{moe.experts.up_name}"][e] @ mine[token]
        row = full["experts.down_proj"][e] @ act(z)
        expected[token] += routing.weights[token, choice] * row
    assert relative_error(y, expected) < 1e-12


def check_dropped_compiled(rank: int) -> None:
    """Compilers see the count, under activation checkpointing, too."""
    moe = made({"capacity": 6, "overflow": "drop"})
    mine = own(inputs()[0], rank)
    y = moe(mine)
    count = moe.experts.dropped.item()

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(moe, x, use_reentrant=False)

    for function in (moe, recomputed):
        moe.experts.dropped.fill_(-1)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(mine), y) < 1e-14
        assert moe.experts.dropped.item() == count
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.moe = made({"shared_ffn": 6})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def check_inside_a_synchronised_model(rank: int) -> None:
    """sync_replicated completes the norm's gradients, and leaves the mixture's alone."""
    block = Block()
    x, dy = inputs()
    full = {n: v.requires_grad_() for n, v in full_state_dict(block).items()}
    normed = F.layer_norm(x, [HIDDEN], full["norm.weight"], full["norm.bias"])
    mixture = {n.removeprefix("moe."): v for n, v in full.items() if n.startswith("moe.")}
    (x + written_out(block.moe, mixture, normed)).backward(dy)
    sync_replicated(block)
    block(own(x, rank)).backward(own(dy, rank))
    for name in ("norm.weight", "norm.bias"):
        got = block.get_parameter(name).grad
        assert relative_error(got, full[name].grad) < 1e-12, name
    check_gradients(block.moe, {n: v.grad for n, v in mixture.items()})


class EveryThird(nn.Module):
    """A router without logits or parameters, one that no table of variants has."""

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        ids = torch.arange(len(x)).unsqueeze(1) * 3 % EXPERTS
        return None, torch.full((len(x), 1), 0.5, dtype=x.dtype), ids.to(torch.int32)


def check_any_router(rank: int, function: bool) -> None:
    torch.manual_seed(0)
    router = EveryThird().forward if function else EveryThird()
    moe = MoE(HIDDEN, FFN, EXPERTS, 1, router=router, dtype=torch.float64)
    full = full_state_dict(moe)
    x = own(inputs()[0], rank)
    y = moe(x)
    for token, row in enumerate(x):
        e = token * 3 % EXPERTS
        z = full["experts.gate_up_proj"][e] @ row
        expected = 0.5 * (full["experts.down_proj"][e] @ ACTIVATIONS["swiglu"](z))
        assert relative_error(y[token], expected) < 1e-13


def check_same_draw(rank: int) -> None:
    """With one random state, mixtures are parts of the same one, and ranks stay in step."""
    moe = made({"bias": True, "shared_ffn": 6})
    after = torch.rand(1)
    torch.manual_seed(0)
    alone = fc.nn.experts.Experts(
        HIDDEN, FFN, EXPERTS, bias=True, dtype=torch.float64, group=fc.Communicator.of()
    )
    for name, parameter in full_state_dict(moe).items():
        gathered = [torch.empty_like(parameter) for _ in range(alone.comm.world_size)]
        torch.distributed.all_gather(gathered, parameter)
        assert all(torch.equal(parameter, other) for other in gathered), name
        assert parameter.std() > 0, name
    both = [torch.empty_like(after) for _ in range(alone.comm.world_size)]
    torch.distributed.all_gather(both, after)
    assert all(torch.equal(after, other) for other in both)


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


def reshard(rank: int, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], Tensor]:
    """The state that a mixture has after loading ``state``, and what it makes of all tokens."""
    moe = made({"shared_ffn": 6, "bias": True})
    if state is not None:
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.fill_(torch.nan)
        load_full_state_dict(moe, state)
    x = inputs()[0]
    y = moe(x if rank == 0 else x[:0])
    return full_state_dict(moe), y.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixture_equals_the_whole(pools: Pools, name: str, world_size: int) -> None:
    pools(world_size).run(check_equals_whole, OPTIONS[name])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ways_to_train(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_ways_to_train)


def test_autocast(pools: Pools) -> None:
    pools(2).run(check_autocast)


def test_autocast_of_a_function(pools: Pools) -> None:
    pools(2).run(check_autocast_of_a_function)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_choice(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_one_choice)


@pytest.mark.parametrize("activation", ["swiglu", softsign_glu])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_layer_drops(pools: Pools, world_size: int, activation: Any) -> None:
    pools(world_size).run(check_dropped, activation)


def test_what_the_layer_drops_compiled(pools: Pools) -> None:
    pools(2).run(check_dropped_compiled, timeout_s=120)


def test_copies(pools: Pools) -> None:
    pools(2).run(check_copies)


@pytest.mark.parametrize("world_size", [1, 3])
def test_inside_a_synchronised_model(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_inside_a_synchronised_model)


@pytest.mark.parametrize("function", [False, True])
def test_any_router(pools: Pools, function: bool) -> None:
    pools(3).run(check_any_router, function)


def test_ranks_draw_the_same_mixture(pools: Pools) -> None:
    pools(3).run(check_same_draw)


def test_compiled(pools: Pools) -> None:
    pools(2).run(check_compiled, timeout_s=300.0)


def test_resharding_from_2_ranks_to_3_to_1(pools: Pools) -> None:
    state, y = pools(2).run(reshard, None)[0]
    for world_size in (3, 1):
        outcomes = pools(world_size).run(reshard, state)
        for again, _ in outcomes:
            assert again.keys() == state.keys()
            assert all(torch.equal(again[name], value) for name, value in state.items())
        assert relative_error(outcomes[0][1], y) < 1e-13


def check_wrong_arguments(rank: int) -> None:
    for options, complaint in (
        ({"activation": "tanh"}, "activation must be one of swiglu"),
        ({"layout": "up_gate"}, "layout must be one of gate_up, interleaved"),
        ({"room": 3}, r"unknown arguments \['room'\]"),
        ({"shared_gate": True}, "there is no shared expert"),
        ({"activation": "gpt_oss", "shared_ffn": 6}, "a shared expert's activation must be one"),
        ({"activation": soft_relu, "shared_ffn": 6}, "give a module as shared_ffn"),
        ({"router": Router(HIDDEN, 8, 3)}, "num_experts is 7, but the router's is 8"),
        ({"router": Router(HIDDEN, 7, 2)}, "top_k is 3, but the router's is 2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            MoE(HIDDEN, FFN, EXPERTS, TOP_K, **options)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K)
    state = full_state_dict(moe)
    state["experts.down_proj"] = state["experts.down_proj"][:6]
    with pytest.raises(ValueError, match=r"the whole layer's is \[7, 12, 10\]"):
        load_full_state_dict(moe, state)


def test_wrong_arguments_are_refused(pools: Pools) -> None:
    pools(2).run(check_wrong_arguments)
