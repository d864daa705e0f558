"""Counts and losses of routers over cut tokens, against all tokens at once and transformers'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm.nn import Router, Routing, expert_counts, load_balancing_loss, router_z_loss
from tests.conftest import Pools

HIDDEN, EXPERTS, TOP_K = 16, 8, 3
#: Tokens of each rank; unequal, and none.
CUTS = {1: [37], 2: [20, 17], 3: [20, 0, 17]}


def whole(dtype: torch.dtype = torch.float32) -> tuple[Router, Tensor, Tensor]:
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, TOP_K, dtype=dtype)
    return router, torch.randn(37, HIDDEN, dtype=dtype), torch.rand(37) < 0.7


def reference(masked: bool) -> tuple[Tensor, Tensor]:
    """transformers' loss of all tokens, and its gradient."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    router, x, mask = whole()
    loss = load_balancing_loss_func((router(x).logits,), EXPERTS, TOP_K, mask if masked else None)
    (gradient,) = torch.autograd.grad(loss, router.weight)
    return loss.detach(), gradient


def check_losses(rank: int, masked: bool, right: Tensor, expected: Tensor) -> None:
    """The mean over ranks, value and gradient, is the loss of all tokens."""
    comm = fc.Communicator.of()
    router, x, mask = whole()
    cuts = CUTS[comm.world_size]
    own, own_mask = x.split(cuts)[rank], mask.split(cuts)[rank]
    routing = router(own)
    loss = load_balancing_loss(routing, mask=own_mask if masked else None)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss, router.weight)
    mean = torch.cat([loss.detach().reshape(1), gradient.flatten()]) / comm.world_size
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(mean[0], right)
    torch.testing.assert_close(mean[1:].view_as(expected), expected)
    counts = expert_counts(routing.ids, EXPERTS)
    assert torch.equal(counts, router(x).ids.flatten().bincount(minlength=EXPERTS))


def check_edges(rank: int) -> None:
    """Ids that are none are not counted; no token that counts is a loss of 0, not NaN."""
    ids = torch.tensor([[-1, 0], [3, 4], [3, 99]], dtype=torch.int32)
    assert expert_counts(ids, 4).tolist() == [2, 0, 0, 4]
    router, x, _ = whole(torch.bfloat16)
    for tokens, mask in ((x[:0], None), (x, torch.zeros(37, dtype=torch.bool))):
        for function in (load_balancing_loss, router_z_loss):
            loss = function(router(tokens), mask=mask)
            assert loss.item() == 0.0 and loss.dtype == torch.float32
            loss.backward()
            assert router.weight.grad is not None and not router.weight.grad.any()
    with pytest.raises(ValueError, match="one entry per token, 37; got 5"):
        load_balancing_loss(router(x), mask=torch.ones(5))


def test_z_loss() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, -1.0], [5.0, 2.0]])
    routing = Routing(logits, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64))
    each = logits.exp().sum(-1).log() ** 2
    torch.testing.assert_close(router_z_loss(routing), each.mean())
    mask = torch.tensor([[True], [False], [True]])
    torch.testing.assert_close(router_z_loss(routing, mask=mask), (each[0] + each[2]) / 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_over_ranks_is_the_loss_of_all_tokens(
    pools: Pools, world_size: int, masked: bool
) -> None:
    pools(world_size).run(check_losses, masked, *reference(masked))


def test_edges(pools: Pools) -> None:
    pools(2).run(check_edges)
