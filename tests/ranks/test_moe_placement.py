"""fc.nn.MoE with a rank named for every expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedcomm as fc
from fusedcomm.nn import MoE, full_state_dict, load_full_state_dict
from tests.conftest import Pools
from tests.ranks.checking import relative_error
from tests.ranks.moe_layers import (
    EXPERTS,
    FFN,
    HIDDEN,
    OPTIONS,
    TOP_K,
    check_compiled,
    check_copies,
    check_equals_whole,
    inputs,
    made,
)
from tests.ranks.moe_models import EXPERTS as HF_EXPERTS
from tests.ranks.moe_models import block
from tests.ranks.test_hf_blocks import check_block


def placements(world_size: int, experts: int = EXPERTS) -> dict[str, list[int]]:
    return {
        "in turn": [expert % world_size for expert in range(experts)],
        "uneven": [int(expert in (1, 4)) * (world_size - 1) for expert in range(experts)],
        "backwards": [world_size - 1 - expert * world_size // experts for expert in range(experts)],
        "on one rank": [world_size // 2] * experts,
    }


def check_placed(rank: int, options: dict[str, Any], owners: list[int]) -> None:
    """The same mixture as the one in blocks, and this rank has what its placement says."""
    options = options | {"placement": owners}
    moe = made(options)
    mine = [expert for expert, owner in enumerate(owners) if owner == rank]
    assert list(moe.experts.local_experts) == mine
    blocks = full_state_dict(made({**options, "placement": None}))
    state = full_state_dict(moe)
    assert state.keys() == blocks.keys()
    for name, whole in state.items():
        assert torch.equal(whole, blocks[name]), name
    for name, parameter in moe.experts.named_parameters():
        assert torch.equal(parameter, blocks[f"experts.{name}"][mine]), name
    check_equals_whole(rank, options)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("placement", placements(2))
def test_a_placed_mixture_equals_the_whole(pools: Pools, placement: str, world_size: int) -> None:
    owners = placements(world_size)[placement]
    names = ["shared", "gpt-oss", "function, aligned, with room", "without overlap"]
    for name in names if world_size == 3 else names[:: world_size - 1]:
        pools(world_size).run(check_placed, OPTIONS[name], owners)


def check_on_kernels(rank: int, owners: list[int]) -> None:
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, placement=owners, engine="triton")
    blocks = MoE(HIDDEN, FFN, EXPERTS, TOP_K, engine="host")
    load_full_state_dict(blocks, full_state_dict(moe))
    x = inputs()[0].float()[: 3 + rank]
    found = []
    for module in (moe, blocks):
        own = x.clone().requires_grad_()
        y = module(own)
        y.square().sum().backward()
        assert own.grad is not None
        found.append((y, own.grad))
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("world_size", [2, 3])
def test_placed_experts_on_kernels(pools: Pools, world_size: int) -> None:
    owners = placements(world_size)["uneven"]
    pools(world_size, TRITON_INTERPRET="1").run(check_on_kernels, owners, timeout_s=200)


def check_ways(rank: int, owners: list[int]) -> None:
    check_copies(rank, placement=owners)
    check_compiled(rank, placement=owners)


def test_copies_and_compiled(pools: Pools) -> None:
    pools(2).run(check_ways, placements(2)["uneven"], timeout_s=300)


def moved(
    rank: int, owners: list[int] | None, state: dict[str, Tensor] | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The state after loading ``state``, and what the mixture makes of all tokens."""
    moe = made({"shared_ffn": 6, "bias": True, "placement": owners})
    if state is not None:
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.fill_(torch.nan)
        load_full_state_dict(moe, state)
    x = inputs()[0]
    y = moe(x if rank == 0 else x[:0])
    return full_state_dict(moe), y.detach()


def test_state_moves_between_placements_and_numbers_of_ranks(pools: Pools) -> None:
    state, y = pools(2).run(moved, placements(2)["uneven"], None)[0]
    for world_size, name in (
        (3, "backwards"),
        (4, "in turn"),
        (2, None),
        (1, None),
        (2, "in turn"),
    ):
        owners = None if name is None else placements(world_size)[name]
        outcomes = pools(world_size).run(moved, owners, state)
        for again, _ in outcomes:
            assert again.keys() == state.keys()
            assert all(torch.equal(again[key], value) for key, value in state.items())
        assert relative_error(outcomes[0][1], y) < 1e-13


def test_blocks_of_models(pools: Pools) -> None:
    for world_size in (2, 3):
        owners = placements(world_size, HF_EXPERTS)["uneven"]
        for name in ("mixtral", "gpt_oss", "deepseek_v3"):
            pools(world_size).run(check_block, name, owners)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, **options)


def check_refused(rank: int) -> None:
    for owners, complaint in (
        ([0] * 6, "for each of 7 experts"),
        ([0, 1, 2, 0, 1, 2, 0], "a rank, 0 to 1"),
        ([0, 0, 0, 0, 0, 0, -1], "a rank, 0 to 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            MoE(HIDDEN, FFN, EXPERTS, TOP_K, placement=owners)
        with pytest.raises(ValueError, match="for each of"):
            MoE.from_hf(block("mixtral"), placement=owners)
    tensor = torch.tensor([1, 0, 1, 0, 1, 0, 1])
    assert MoE(HIDDEN, FFN, EXPERTS, TOP_K, placement=tensor).experts.placement == (1, 0) * 3 + (1,)


def check_disagreement(rank: int, step: str) -> None:
    """Ranks with other placements are told so, whichever they do first."""
    with fc.Communicator.of(channel="placements", timeout_s=20) as comm:
        owners = [0, 0, 0, 1, 1, 1, 1] if rank == 0 else [0, 0, 1, 0, 1, 1, 1]
        model = Model(group=comm, placement=owners)
        with pytest.raises(fc.MismatchError) as seen:
            if step == "state":
                full_state_dict(model)
            else:
                model.moe(torch.ones(2, HIDDEN))
        words = {
            "state": ("of [0, 1, 2, 3, 4, 5, 6]", "of [0, 1, 3, 2, 4, 5, 6]"),
            "forward": ("placed 0 0 0 1 1 1 1", "placed 0 0 1 0 1 1 1"),
        }
        assert all(word in str(seen.value) for word in words[step]), seen.value


def test_wrong_placements_are_refused(pools: Pools) -> None:
    pools(2).run(check_refused)


@pytest.mark.parametrize("step", ["state", "forward"])
def test_ranks_with_other_placements(pools: Pools, step: str) -> None:
    pools(2).run(check_disagreement, step)
