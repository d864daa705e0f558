"""``torch.compile(fullgraph=True)`` sees the mixture of experts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from tests.conftest import Pools

E, H, F = 6, 8, 4


def experts(world_size: int) -> tuple[Tensor, Tensor]:
    local = fc.planning.routing.place(E, world_size).experts[dist.get_rank()]
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(E, 2 * F, H, generator=generator)[list(local)]
    w2 = torch.randn(E, H, F, generator=generator)[list(local)]
    return w13.requires_grad_(), w2.requires_grad_()


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * count + dist.get_rank())
    x = torch.randn(count, H, generator=generator).requires_grad_()
    ids = torch.randint(-1, E, (count, 2), generator=generator)
    weights = torch.rand(count, 2, generator=generator).requires_grad_()
    return x, ids, weights


def static(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Every size is known to the compiler: d.x has ``capacity`` rows."""
    d = fc.dispatch(x, ids, weights, E, capacity=64, max_tokens=32, align=4)
    return fc.combine(torch.tanh(d.x) * 2.0, d)


def dynamic(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The number of rows is data."""
    d = fc.dispatch(x, ids, weights, E)
    return fc.combine(torch.tanh(d.x) * 2.0, d)


def layer(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return x + fc.moe_ffn(x, ids, weights, w13, w2, num_experts=E)


def layer_beside(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    y, square = fc.moe_ffn(x, ids, weights, w13, w2, num_experts=E, beside=lambda: x * x)
    return y + square


def layer_static(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return x + fc.moe_ffn(x, ids, weights, w13, w2, num_experts=E, capacity=64, max_tokens=32)


def results(fn: Callable[..., Tensor], count: int) -> list[Tensor]:
    x, ids, weights = tokens(count)
    w13, w2 = experts(dist.get_world_size())
    y = fn(x, ids, weights, w13, w2)
    leaves = [x, weights] + ([w13, w2] if "layer" in str(fn) else [])
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) * 0.5)]


FUNCTIONS = (static, dynamic, layer, layer_static, layer_beside)


def compiled(rank: int, backend: str, functions: tuple[Any, ...]) -> None:
    for fn in functions:
        torch._dynamo.reset()
        made: Any = torch.compile(fn, fullgraph=True, backend=backend)
        for count in (8, 5)[: dist.get_world_size()]:
            right = results(fn, count)
            x, ids, weights = tokens(count)
            w13, w2 = experts(dist.get_world_size())
            y = made(x, ids, weights, w13, w2)
            leaves = [x, weights] + ([w13, w2] if "layer" in fn.__name__ else [])
            found = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) * 0.5)]
            for got, eager in zip(found, right, strict=True):
                torch.testing.assert_close(got, eager, msg=f"{fn.__name__}: {got} {eager}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_as_eager(pools: Pools, world_size: int) -> None:
    pools(world_size).run(compiled, "aot_eager", FUNCTIONS, timeout_s=120)


def test_sizes_that_are_data_are_compiled_down_to_code(pools: Pools) -> None:
    pools(2).run(compiled, "inductor", (dynamic,), timeout_s=120)


def checkpointed(rank: int) -> None:
    """Recomputed under activation checkpointing, the gradients are the same."""
    for fn in (dynamic, layer):
        right = results(fn, 9)
        for reentrant in (False, True):
            x, ids, weights = tokens(9)
            w13, w2 = experts(dist.get_world_size())
            y = checkpoint(fn, x, ids, weights, w13, w2, use_reentrant=reentrant)
            y.backward(torch.ones_like(y) * 0.5)
            torch.testing.assert_close([x.grad, weights.grad], right[1:3])


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpointing(pools: Pools, world_size: int) -> None:
    pools(world_size).run(checkpointed)


def operators(rank: int) -> None:
    """torch's own checks of the custom operators: schemas, fakes and autograd registrations."""
    comm = fc.Communicator.of()
    x, ids, weights = tokens(6)
    w13, w2 = experts(comm.world_size)
    library: Any = fc.ops.library
    where = (E, "", 1, 64, 32, comm.group.group_name, "", "host")
    route = library.moe.moe_route(ids, "error", *where)[:4]
    h = library.moe.moe_dispatch(x, *route, *where)[0].detach().requires_grad_()
    checked = (
        (library.moe.moe_route, (ids, "error", *where)),
        (library.moe.moe_dispatch, (x, *route, *where)),
        (library.moe.moe_combine, (h, weights, None, *route, True, *where)),
        (
            library.moe_ffn.moe_ffn,
            (x, weights, w13, w2, None, None, *route, True, True, "swiglu", "gate_up", False)
            + (*where, None),
        ),
    )
    for op, arguments in checked:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor",
                              "test_autograd_registration"))  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_operators(pools: Pools, world_size: int) -> None:
    pools(world_size).run(operators, timeout_s=120)
