"""Derivatives of the collectives: those of torch's functional collectives; and tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.collective_calls import counts_of

#: x of every rank -> y of every rank, in one process, for autograd to differentiate.
Reference = Callable[[list[Tensor]], list[Tensor]]


def _cases(world_size: int) -> dict[str, tuple[Reference, Callable[[Tensor, int], Tensor], Any]]:
    """name -> reference, the call on a rank, the shape of a rank's x."""
    n = world_size
    counts = counts_of(1, n)

    def reduced(xs: list[Tensor], op: str) -> Tensor:
        total = torch.stack(xs).sum(0)
        return total / n if op == "avg" else total

    def to_all(xs: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
        parts = [x.split(row) for x, row in zip(xs, counts, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(n)]

    def exchange(x: Tensor, rank: int) -> Tensor:
        receives = [counts[source][rank] for source in range(n)]
        return fc.all_to_all(x, send_counts=counts[rank], recv_counts=receives)

    cases: dict[str, Any] = {
        "all_to_all": (lambda xs: to_all(xs, counts), exchange, lambda r: (sum(counts[r]), 3)),
        "all_to_all, equal": (
            lambda xs: to_all(xs, [[2] * n] * n),
            lambda x, _: fc.all_to_all(x),
            lambda r: (2 * n, 3),
        ),
        "broadcast": (
            lambda xs: [xs[n - 1]] * n,
            lambda x, _: fc.broadcast(x, n - 1),
            lambda r: (4, 3),
        ),
    }
    for op in ("sum", "avg"):
        cases[f"all_reduce {op}"] = (
            lambda xs, op=op: [reduced(xs, op)] * n,
            lambda x, _, op=op: fc.all_reduce(x, op=op),
            lambda r: (5, 3),
        )
        for dim in (0, 1):
            cases[f"reduce_scatter {op} {dim}"] = (
                lambda xs, op=op, dim=dim: [shard(reduced(xs, op), dim, r, n) for r in range(n)],
                lambda x, _, op=op, dim=dim: fc.reduce_scatter(x, op=op, dim=dim),
                lambda r: (5, 7),
            )
    for dim in (0, 1):
        cases[f"all_gather {dim}"] = (
            lambda xs, dim=dim: [torch.cat(xs, dim)] * n,
            lambda x, _, dim=dim: fc.all_gather(x, dim=dim, gathered_size=7),
            lambda r, dim=dim: shard(torch.empty(7, 7), dim, r, n).shape,
        )
    return cases


def differentiate(rank: int, world_size: int, twice: bool) -> None:
    """The ranks' losses differ; every rank's gradient is that of their sum."""
    for name, (reference, call, shape) in _cases(world_size).items():
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Any, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        xs = [draw(shape(r)).requires_grad_() for r in range(world_size)]
        ys = reference(xs)
        dys = [draw(y.shape) for y in ys]
        loss = torch.stack([(y.sin() * dy).sum() for y, dy in zip(ys, dys, strict=True)]).sum()
        grads = torch.autograd.grad(loss, xs, create_graph=twice, materialize_grads=True)
        x = xs[rank].detach().requires_grad_()
        y = call(x, rank)
        torch.testing.assert_close(y, ys[rank], msg=name)
        mine = (y.sin() * dys[rank].t().contiguous().t()).sum()
        (grad,) = torch.autograd.grad(mine, x, create_graph=twice)
        torch.testing.assert_close(grad, grads[rank], msg=name)
        if twice:
            squares = torch.stack([g.square().sum() for g in grads]).sum()
            second = torch.autograd.grad(squares, xs, materialize_grads=True)[rank]
            (found,) = torch.autograd.grad(grad.square().sum(), x)
            torch.testing.assert_close(found, second, msg=f"{name}, second derivative")


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients(pools: Pools, world_size: int, twice: bool) -> None:
    pools(world_size).run(differentiate, world_size, twice)


def as_torch_does(rank: int) -> None:
    """The same numbers as torch's functional collectives, forward and backward."""
    group = torch.distributed.group.WORLD
    pairs = (
        (fc.all_reduce, lambda x: funcol.all_reduce(x, "sum", group)),
        (fc.all_gather, lambda x: funcol.all_gather_single_autograd(x, 0, group)),
        (fc.reduce_scatter, lambda x: funcol.reduce_scatter_single_autograd(x, "sum", 0, group)),
        (fc.all_to_all, lambda x: funcol.all_to_all_single_autograd(x, None, None, group)),
    )
    for ours, theirs in pairs:
        x = torch.arange(8.0).view(4, 2) + rank
        grads = []
        for function in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            (y * (rank + 1)).sum().backward()
            grads.append((y.detach().clone(), leaf.grad))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_as_torch_does(pools: Pools) -> None:
    pools(2).run(as_torch_does)


def without_derivative(rank: int) -> None:
    x = torch.ones(3, requires_grad=True)
    for op in ("max", "min"):
        for call in (fc.all_reduce, fc.reduce_scatter):
            with pytest.raises(RuntimeError, match=f"op='{op}' has no derivative"):
                call(x, op=op).sum().backward()
    with pytest.raises(ValueError, match="out= has no derivative"):
        fc.all_reduce(x, out=torch.empty(3))
    with torch.no_grad():
        assert (fc.all_reduce(x, out=x) == 2).all()


def test_what_has_no_derivative(pools: Pools) -> None:
    pools(2).run(without_derivative)


# Tracing


def traced(rank: int, world_size: int) -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        y = fc.all_reduce(x.sin(), op="avg")
        y = fc.all_gather(y, dim=1)
        y = fc.reduce_scatter(y, dim=0)
        y = fc.all_to_all(fc.broadcast(y, 0))
        fc.all_reduce(x.detach(), out=out)
        return y.cos() + out.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (world_size**2, 2 * world_size**2):
        results = []
        for function in (step, compiled):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(rows, 3, generator=generator).requires_grad_()
            out = torch.zeros(rows, 3)
            y = function(x, out)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, out))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(eager, other)


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled(pools: Pools, world_size: int) -> None:
    pools(world_size).run(traced, world_size, timeout_s=120)


def in_modes(rank: int) -> None:
    """Inference mode, fake tensors, deferred gradients."""
    with torch.inference_mode():
        x = torch.ones(5)
        assert (fc.all_reduce(x) == 2).all()
        assert (fc.all_gather(x) == 1).all()
    assert (fc.all_reduce(torch.ones(5)) == 2).all()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = fc.reduce_scatter(torch.ones(5, 3), dim=0)
        assert y.shape == ((3, 3) if rank == 0 else (2, 3))
        assert fc.all_gather(torch.ones(5, 3), dim=1).shape == (5, 6)


def test_modes(pools: Pools) -> None:
    pools(2).run(in_modes)
