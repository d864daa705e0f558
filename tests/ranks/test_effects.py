"""The compiler neither removes nor reorders what the ranks do together.

Rank 0 throws away a result, or a gradient, that the others use. Its compiled graph must make all
the calls that eager mode makes, in the same order.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.checking import calls

FEATURES = 6
FORWARD_DONE = "the forward pass is done"


class Discard(torch.autograd.Function):
    """The identity, whose gradient is zero whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.zeros(dy.shape)


def unused(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    first = fc.linear_all_reduce(x, w)
    second = fc.linear_all_reduce(x * 2, w)
    return second if apart else second + first


def unused_shards(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    gathered = fc.all_gather_linear(x, w)
    scattered = fc.linear_reduce_scatter(x * 3, w)
    other = fc.all_gather_linear(x, w * 2)
    return other if apart else other + gathered + scattered.sum()


def swapped(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    """The results are needed in the other order, and one of them only at the very end."""
    first = fc.linear_all_reduce(x, w)
    second = fc.linear_reduce_scatter(x, w)
    if apart:
        return first * second.sin().sum().exp()
    return second.sum() * first.sin().exp()


def gather_backward(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    return fc.all_gather_linear(Discard.apply(x) if apart else x, w)


def weight_backward(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    return fc.all_gather_linear(x, Discard.apply(w) if apart else w)


def scatter_backward(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    if apart:
        x, w = Discard.apply(x), Discard.apply(w)
    return fc.linear_reduce_scatter(x, w)


def replicated_backward(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    return fc.replicated_linear(Discard.apply(x) if apart else x, w)


def recomputed(x: Tensor, w: Tensor, apart: bool) -> Tensor:
    """Throws away a result within a checkpointed region, on every rank."""

    def region(x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(fc.all_gather_linear(x, w))
        fc.linear_all_reduce(x * 2, w)
        return fc.linear_reduce_scatter(hidden, w)

    hidden = checkpoint(region, checkpoint(region, x, use_reentrant=False), use_reentrant=False)
    return fc.all_gather_linear(hidden, w)


def run(work: Callable[..., Tensor], apart: bool, graded: bool) -> tuple[list[str], list[Tensor]]:
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_(graded)
    w = torch.eye(FEATURES).add(0.1).requires_grad_(graded)
    with calls(fc.Communicator.of()) as texts:
        y = work(x, w, apart)
        texts.append(FORWARD_DONE)
        if not graded:
            return texts, [y]
        grads = torch.autograd.grad(y.square().sum(), [x, w], allow_unused=True)
    return texts, [y, *(grad for grad in grads if grad is not None)]


def check(rank: int, backend: str, work: Callable[..., Tensor], graded: bool) -> list[str]:
    torch._dynamo.reset()
    right, expected = run(work, rank == 0, graded)
    compiled = torch.compile(work, fullgraph=True, backend=backend)
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
        issued, found = run(compiled, rank == 0, graded)
    for got, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(got, eager)
    if work is recomputed:  # compilers recompute at another time than eager mode, and all of it
        done = right.index(FORWARD_DONE)
        assert issued[: done + 1] == right[: done + 1], f"compiled {issued}, eager {right}"
        assert sum("all_gather_linear" in call for call in issued[done:]) == 2, f"{issued}"
    else:
        assert issued == right, f"{work.__name__}: compiled {issued}, eager {right}"
    return issued


FORWARD = (unused, unused_shards, swapped)
BACKWARD = (
    unused, swapped, gather_backward, weight_backward, scatter_backward, replicated_backward,
    recomputed,
)  # fmt: skip


CASES = [
    *[("aot_eager", work, False) for work in FORWARD],
    *[("aot_eager", work, True) for work in BACKWARD],
    ("inductor", unused_shards, False),
    *[("inductor", work, True) for work in (swapped, gather_backward, recomputed)],
]


@pytest.mark.parametrize(("backend", "work", "graded"), CASES)
def test_every_rank_makes_every_call(
    pools: Pools, backend: str, work: Callable[..., Tensor], graded: bool
) -> None:
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    first, second = pools(2).run(check, backend, work, graded, timeout_s=120)
    assert first == second


class Unused(torch.nn.Module):
    """Throws away the first of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(FEATURES) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return unused(x, self.weight, True)


def check_export(rank: int) -> None:
    """An exported program makes both calls, before and after torch's decompositions.

    The communicator is first made while the model is traced.
    """
    model, x = Unused(), torch.randn(4, FEATURES)
    fc.Communicator.of().close()
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        for stage in (program, program.run_decompositions()):
            with calls(fc.Communicator.of()) as texts:
                found = stage.module()(x)
            assert len(texts) == 2, f"{strict=}: {texts}"
            torch.testing.assert_close(found, model(x))


def test_export_keeps_every_call(pools: Pools) -> None:
    pools(2).run(check_export, timeout_s=120)
