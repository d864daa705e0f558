"""The stand-in for CUDA graphs: what it makes again, and what it lets nobody do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.recorded import record

#: A communicator of one rank, as far as a replay needs it.
ALONE: Any = SimpleNamespace(
    collective=lambda text: contextlib.nullcontext(),
    calls=SimpleNamespace(await_any=lambda op: lambda: None),
)


def test_torch_operations_are_made_again_on_new_data() -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    index = torch.tensor([1, 0])

    def calls() -> list[Tensor]:
        y = (x * 2.0)[index].t().reshape(-1).to(torch.float64)
        kept = torch.zeros_like(x)
        kept.add_(x.detach())[0].mul_(10.0)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        return [y.detach(), kept, dx, *torch.sort(x.detach(), dim=1)]

    replay, found = record(ALONE, calls)
    for number in range(3):
        with torch.no_grad():
            x.copy_(torch.rand(2, 3) + number)
            index.copy_(torch.tensor([number % 2, 1]))
        for result in found:
            result.fill_(-1)
        replay()
        for got, right in zip(found, calls(), strict=True):
            assert torch.equal(got, right)


def test_a_number_that_the_host_has_read_stays_as_it_was() -> None:
    x, factor = torch.ones(3), [2.0]
    replay, (y,) = record(ALONE, lambda: [x * factor[0]])
    factor[0] = 5.0
    x.fill_(3.0)
    replay()
    assert y.tolist() == [6.0] * 3


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.bincount(x.long()),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
    ],
)
def test_nobody_looks_into_a_tensor(look: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="the host"):
        record(ALONE, lambda: [look(x)])
    look(x)
