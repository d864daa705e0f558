"""fc.nn.MoE on tokens with padding behind them: as if only the tokens were there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedcomm.nn import MoE, Routing, expert_counts, load_balancing_loss, router_z_loss
from tests.conftest import Pools
from tests.ranks.checking import relative_error
from tests.ranks.moe_layers import (
    EXPERTS,
    HIDDEN,
    OPTIONS,
    TOKENS,
    TOP_K,
    check_gradients,
    inputs,
    made,
    own,
    reference,
)

#: Places of each rank behind its tokens.
PADDING = 3
NAN = float("nan")
#: Padding takes room among the tokens.
ROOM = {"aligned, with room": {"max_tokens": max(map(max, TOKENS.values())) + PADDING}}

#: How a number of tokens may be given.
FORMS: list[Callable[[int], int | Tensor]] = [
    int,
    lambda number: torch.tensor(number, dtype=torch.int32),
    lambda number: torch.tensor([number]),
]
NAMES = ("shared with a gate", "gpt-oss", "function", "aligned, with room", "without overlap")


class Shifting(nn.Module):
    """A shared expert that makes something of zeros, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cos()


def padded(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.full((PADDING, tensor.shape[1]), NAN, dtype=tensor.dtype)])


def check(moe: MoE, rank: int, right: list[Any], number: int | Tensor) -> None:
    """``right``: y, dx and the parameters' gradients of all ranks' tokens."""
    y_all, dx_all, grads = right
    x, dy = (own(each, rank) for each in inputs())
    tokens = len(x)
    mine = padded(x).requires_grad_()
    moe.zero_grad()
    y, routing = moe(mine, num_tokens=number, return_routing=True)
    y.backward(padded(dy))
    assert y.shape == mine.shape and mine.grad is not None
    assert relative_error(y[:tokens], own(y_all, rank)) < 1e-13
    assert relative_error(mine.grad[:tokens], own(dx_all, rank)) < 1e-12
    assert not y[tokens:].any() and not mine.grad[tokens:].any()
    check_gradients(moe, grads)
    assert routing.ids.shape == (tokens + PADDING, TOP_K)
    assert bool((routing.ids[tokens:] == -1).all()) and not routing.weights[tokens:].any()


def check_statistics(moe: MoE, rank: int) -> None:
    """Counts and losses, and the router's gradients of these, are of the tokens alone."""
    x = own(inputs()[0], rank)
    found = []
    for tokens, number in ((x, None), (padded(x), len(x))):
        moe.zero_grad()
        _, routing = moe(tokens, num_tokens=number, return_routing=True)
        balance, small = load_balancing_loss(routing), router_z_loss(routing)
        (balance + small).backward()
        gradients = [p.grad for p in moe.router.parameters()]
        found.append([expert_counts(routing.ids, EXPERTS), balance, small, *gradients])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right)
    assert int(found[1][0].sum()) == sum(TOKENS[moe.experts.comm.world_size]) * TOP_K


def check_named(rank: int, names: tuple[str, ...]) -> None:
    x, dy = inputs()
    for at, name in enumerate(names):
        moe = made({**OPTIONS[name], **ROOM.get(name, {})})
        number = FORMS[at % len(FORMS)](len(own(x, rank)))
        check(moe, rank, list(reference(moe, x, dy)), number)
        check_statistics(moe, rank)


def check_shared_module(rank: int) -> None:
    """What a shared expert makes of zeros is no part of y, nor of its bias's gradient."""
    x, dy = inputs()
    moe = made({"shared_ffn": Shifting(), "shared_gate": True})
    tokens = len(own(x, rank))
    found = []
    for padding, number in ((lambda t: t, None), (padded, tokens)):
        moe.zero_grad()
        mine = padding(own(x, rank)).requires_grad_()
        y = moe(mine, num_tokens=number)
        y.backward(padding(own(dy, rank)))
        found.append([y[:tokens], mine.grad[:tokens], *(p.grad for p in moe.parameters())])
        assert not y[tokens:].any()
    for right, got in zip(*found, strict=True):
        assert relative_error(got, right) < 1e-13


def check_compiled(rank: int) -> None:
    """One graph for every number of tokens in a tensor."""
    moe = made({"shared_ffn": 6})
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    places = torch.randn(6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    number = torch.zeros((), dtype=torch.int32)
    for tokens in (6, 4 - rank, 0):
        number.fill_(tokens)
        y = compiled(places, num_tokens=number)
        assert relative_error(y, moe(places, num_tokens=number)) < 1e-14
        assert not y[tokens:].any() and bool(y[:tokens].any(1).all())
    assert counter.frame_count == 1
    torch._dynamo.reset()


def check_wrong(rank: int) -> None:
    moe = made({})
    x = torch.zeros(4, HIDDEN, dtype=torch.float64)
    for number in (5, -1, True, 2.0, torch.tensor(2.0), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="num_tokens must be"):
            moe(x, num_tokens=number)


@pytest.mark.parametrize("world_size", [1, 2])
def test_padding_changes_nothing(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_named, NAMES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shared_expert_that_makes_something_of_zeros(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_shared_module)


def test_compiled(pools: Pools) -> None:
    pools(2).run(check_compiled, timeout_s=120)


def test_wrong_numbers_are_refused(pools: Pools) -> None:
    pools(2).run(check_wrong)


def check_struck_out(rank: int) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(5, EXPERTS), torch.randint(0, EXPERTS, (5, 2))
    logits[2:4], ids[2], ids[3] = NAN, -1, EXPERTS
    kept = [0, 1, 4]
    for function in (load_balancing_loss, router_z_loss):
        found = []
        for rows in ([*range(5)], kept):
            leaf = logits[rows].requires_grad_()
            loss = function(Routing(leaf, torch.ones(len(rows), 2), ids[rows]))
            found.append((loss, *torch.autograd.grad(loss, leaf)))
        (loss, gradient), (right, right_gradient) = found
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(gradient[kept], right_gradient)
        assert not gradient[2:4].any()


def test_losses_leave_out_tokens_without_an_expert(pools: Pools) -> None:
    """Whoever strikes tokens out by their ids: their logits may be anything."""
    pools(2).run(check_struck_out)
