"""Tensors moved between layouts, forward and backward, against the unsharded tensor."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm as fc
from fusedcomm.ops import layouts
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.fault_calls import Record, Seen, assert_lost, die, see, survivors

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((7, 4), (2, 5), (3, 2, 8), (1, 1, 3), (0, 2))


def cut(full: Tensor, dim: int) -> Tensor:
    return shard(full, dim, dist.get_rank(), dist.get_world_size())


def check_rows(rank: int) -> None:
    """Split and gathered along every token dimension and along the features."""
    for shape in SHAPES:
        for dim in range(-len(shape), len(shape)):
            features = dim in (-1, len(shape) - 1)
            torch.manual_seed(1)
            full, d_full = torch.randn(shape), torch.randn(shape)
            x = full.clone().requires_grad_()
            y = layouts.split_features(x) if features else layouts.split_tokens(x, dim=dim)
            assert torch.equal(y, cut(full, dim)), f"split {shape} {dim} on rank {rank}"
            y.backward(cut(d_full, dim))
            assert x.grad is not None and torch.equal(x.grad, d_full), f"split {shape} {dim}"
            own = cut(full, dim).clone().requires_grad_()
            size = shape[dim]
            if features:
                z = layouts.gather_features(own, gathered_size=size)
            else:
                z = layouts.gather_tokens(own, dim=dim, gathered_size=size)
            assert torch.equal(z, full), f"gather {shape} {dim} on rank {rank}"
            z.backward(d_full)
            assert own.grad is not None and torch.equal(own.grad, cut(d_full, dim))
    even = torch.arange(6.0).view(3, 2) + 10 * rank
    gathered = layouts.gather_tokens(even)
    assert torch.equal(
        gathered, torch.cat([even + 10 * (r - rank) for r in range(dist.get_world_size())])
    )


def check_sums(rank: int) -> None:
    world_size = dist.get_world_size()
    everyone = sum(range(1, world_size + 1))
    for shape, dtype in product(((3,), (2, 4), (0, 3), ()), (torch.float32, torch.bfloat16)):
        x = torch.full(shape, rank + 1.0, dtype=dtype).requires_grad_()
        y = layouts.sum_partials(x)
        assert torch.equal(y, torch.full(shape, everyone, dtype=dtype))
        y.backward(torch.full(shape, 3.0, dtype=dtype))
        assert x.grad is not None and torch.equal(x.grad, torch.full(shape, 3.0, dtype=dtype))
        x = torch.full(shape, 5.0, dtype=dtype).requires_grad_()
        for count in (1, 2):  # accumulated: each backward pass's own sum is added
            y = layouts.sum_gradient(x)
            assert torch.equal(y, x) and y.data_ptr() != x.data_ptr() or not x.numel()
            y.backward(torch.full(shape, rank + 1.0, dtype=dtype))
            right = torch.full(shape, count * everyone, dtype=dtype)
            assert x.grad is not None and torch.equal(x.grad, right), f"{shape} {count}: {x.grad}"
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(layouts.sum_partials(strided), world_size * strided)


def check_errors(rank: int) -> None:
    x = torch.zeros(4, 3)
    wrong = [
        (lambda: layouts.split_tokens(x, dim=1), "dim=1 is none of the token dimensions"),
        (lambda: layouts.gather_tokens(x, dim=-1), "dim=-1 is none"),
        (lambda: layouts.split_tokens(torch.zeros(3)), "none of the token dimensions"),
        (lambda: layouts.gather_tokens(x, gathered_size=5), "4 rows .* gathered_size=5"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()


def disagree(rank: int) -> str:
    comm = fc.Communicator.of(channel="layouts")
    try:
        layouts.sum_partials(torch.zeros(3 + rank), group=comm, what="something")
    except fc.MismatchError as error:
        return str(error)
    finally:
        comm.close()
    return "nothing"


def lose(rank: int) -> Seen:
    x = torch.zeros(3, requires_grad=True)
    layouts.sum_partials(x.detach())
    if rank == 1:
        die()
    return see(fc.Communicator.of(), lambda: layouts.sum_gradient(x, what="it").sum().backward())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_rows)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_sums)


def test_errors(pools: Pools) -> None:
    pools(2).run(check_errors)


def test_ranks_that_disagree(pools: Pools) -> None:
    for message in pools(2).run(disagree):
        assert "[4] sum of something" in message and "[3] sum of something" in message


def test_a_lost_rank(pools: Pools, record_property: Record) -> None:
    outcomes = pools(3).outcomes(lose, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, "all_reduce")
