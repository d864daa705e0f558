"""fc.nn.MoE against the same mixture written out for one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from fusedcomm.nn import MoE, Router, full_state_dict, load_full_state_dict
from fusedcomm.parallel import sync_replicated
from tests.conftest import Pools
from tests.ranks.checking import relative_error
from tests.ranks.moe_layers import (
    ACTIVATIONS,
    EXPERTS,
    FFN,
    HIDDEN,
    OPTIONS,
    TOKENS,
    TOP_K,
    check_compiled,
    check_copies,
    check_equals_whole,
    check_gradients,
    check_ways_to_train,
    inputs,
    made,
    own,
    softsign_glu,
    written_out,
)


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


def soft_relu(z: Tensor) -> Tensor:
    return F.softplus(z)


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
