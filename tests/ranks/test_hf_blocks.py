"""fc.nn.MoE.from_hf against the blocks of transformers, with their own routers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedcomm.nn import MoE, full_state_dict, load_full_state_dict
from tests.conftest import Pools
from tests.ranks.checking import relative_error
from tests.ranks.moe_models import CONFIGS, EXPERTS, HIDDEN, block, model

#: Tokens of each rank: uneven, and none.
TOKENS = {1: [11], 2: [4, 7], 3: [4, 0, 7], 4: [4, 3, 0, 4]}
#: Sums of some hundred float32 products, in another order.
LIMIT = 1e-5

#: What the library calls the models' activations.
ACTIVATIONS = {"gpt_oss": "gpt_oss", "mixtral with relu": None}


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def check_block(rank: int, name: str, placement: list[int] | None = None) -> None:
    whole = block(name)
    before = copy.deepcopy(whole.state_dict())
    moe = MoE.from_hf(whole, placement=placement)
    expected = ACTIVATIONS.get(name, "swiglu")
    assert callable(moe.experts.activation) if expected is None else True
    assert expected is None or moe.experts.activation == expected
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 11, HIDDEN, generator=generator) for _ in "xy")
    cut = TOKENS[moe.experts.comm.world_size]
    xs = x.clone().requires_grad_()
    y_all = first(whole(xs))
    y_all.backward(dy)
    mine = x.split(cut, 1)[rank].clone().requires_grad_()
    output = moe(mine)
    y = first(output)
    y.backward(dy.split(cut, 1)[rank])
    assert type(output) is type(whole(x))
    assert y.shape == mine.shape
    assert relative_error(y, y_all.split(cut, 1)[rank]) < LIMIT
    assert mine.grad is not None and xs.grad is not None
    assert relative_error(mine.grad, xs.grad.split(cut, 1)[rank]) < LIMIT
    if name == "gpt_oss":  # some inputs of the activation are clamped, some are not
        z = torch.einsum("th,ehf->tef", x[0], whole.experts.gate_up_proj)
        assert 0.02 < (z > 7).float().mean() < 0.5
    grads = dict(whole.named_parameters())
    named = dict(moe.named_parameters())
    assert named.keys() == grads.keys()
    for key, parameter in named.items():
        expected_grad = grads[key].grad
        assert expected_grad is not None and parameter.grad is not None, key
        if key.startswith("experts."):
            expected_grad = moe.experts.own_part(key.removeprefix("experts."), expected_grad)
        error = relative_error(parameter.grad, expected_grad)
        assert error < LIMIT, f"{key}: {error}"
    # The block is as it was, and its checkpoint is the mixture's.
    state = full_state_dict(moe)
    assert state.keys() == before.keys()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, before[key]) and torch.equal(value, state[key]), key


def check_model(rank: int, name: str) -> None:
    """Blocks exchanged inside a model: its other layers see token shards of several sequences."""
    whole, cut = model(name), model(name)
    for layer in cut.model.layers:
        layer.mlp = MoE.from_hf(layer.mlp)
        with torch.no_grad():
            for parameter in layer.mlp.parameters():
                parameter.fill_(torch.nan)
    load_full_state_dict(cut, whole.state_dict())
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 60, (3, 7), generator=generator)
    logits = whole(tokens).logits
    # One rank has two sequences, the other one.
    mine = slice(0, 2) if rank == 0 else slice(2, 3)
    assert relative_error(cut(tokens[mine]).logits, logits[mine]) < LIMIT
    if name in ("mixtral", "qwen3_moe"):  # whose router logits transformers records
        recorded = cut(tokens[mine], output_router_logits=True).router_logits
        assert len(recorded) == 2 and recorded[0].shape == (mine.stop * 7 - mine.start * 7, EXPERTS)


class Doubling(nn.Module):
    """What is put together otherwise than a mixture is refused, not computed wrongly."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = inner.gate, inner.experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        _, weights, ids = self.gate(rows)
        return 2 * self.experts(rows, ids, weights).reshape(x.shape)


def check_refused(rank: int) -> None:
    mixtral = block("mixtral")
    extra = block("mixtral")
    extra.norm = nn.LayerNorm(HIDDEN)
    without_flags = block("mixtral")
    del without_flags.experts.is_transposed
    with_norm = block("mixtral")
    with_norm.experts.has_post_expert_norm = True
    for refused, complaint in (
        (Doubling(mixtral), "does more than router, experts and shared expert"),
        (nn.Linear(3, 3), "0 modules of stacked experts"),
        (extra, "holds norm besides"),
        (without_flags, "lacks is_transposed"),
        (with_norm, "and a norm"),
    ):
        with pytest.raises(ValueError, match=complaint):
            MoE.from_hf(refused)


def check_jitter(rank: int) -> None:
    """Mixtral's noise on a training block's input."""
    whole = block("mixtral").train()
    whole.jitter_noise = 0.3
    moe = MoE.from_hf(whole)
    assert moe.training
    x = torch.randn(1, 5, HIDDEN)
    torch.manual_seed(3)
    y = moe(x)
    torch.manual_seed(3)
    assert relative_error(y, whole(x.clone())) < LIMIT
    assert relative_error(moe.eval()(x), whole.eval()(x)) < LIMIT
    assert not torch.equal(moe.eval()(x), y)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_equals_the_models(pools: Pools, name: str, world_size: int) -> None:
    pools(world_size).run(check_block, name)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_blocks_exchanged_in_a_model(pools: Pools, name: str) -> None:
    pools(2).run(check_model, name)


def test_other_blocks_are_refused(pools: Pools) -> None:
    pools(1).run(check_refused)


def test_jitter(pools: Pools) -> None:
    pools(1).run(check_jitter)
