"""Collectives of several domains: right, and every byte crosses once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.schedule import shard_bounds
from tests.conftest import Pools
from tests.ranks.collective_calls import Checker, check_dtypes, check_shapes
from tests.ranks.test_domains_tensor_parallel import FOUR_OF_TWO, INTERLEAVED, TWO_OF_TWO


@pytest.mark.parametrize(("domains", "slot"), [(TWO_OF_TWO, None), (INTERLEAVED, 64)])
def test_shapes(pools: Pools, domains: str, slot: int | None) -> None:
    pools(4, FUSEDCOMM_DOMAINS=domains).run(check_shapes, "host", slot, timeout_s=120)


def test_dtypes(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(check_dtypes, "host", timeout_s=120)


SOME_SHAPES = ((5, 3), (0, 2), (64, 33))


def some_calls(
    rank: int, engine: str = "host", shapes: tuple[tuple[int, ...], ...] = SOME_SHAPES
) -> None:
    checker = Checker(fc.Communicator.of(), engine)
    for shape in shapes:
        checker.every_op(shape)
    checker.all_reduce((29,), torch.bfloat16, "avg", "hierarchical")
    checker.finish()


def test_four_domains_of_two(pools: Pools) -> None:
    pools(8, FUSEDCOMM_DOMAINS=FOUR_OF_TWO).run(some_calls, timeout_s=120)


def few_send(rank: int) -> None:
    """Only rank 0 has something, for a rank of another domain: the others take part too."""
    send, recv = [0] * 8, [0] * 8
    if rank == 0:
        send[2] = 3
    if rank == 2:
        recv[0] = 3
    y = fc.all_to_all(torch.full((sum(send), 2), 7.0), send_counts=send, recv_counts=recv)
    assert torch.equal(y, torch.full((sum(recv), 2), 7.0))
    assert bool((fc.all_reduce(torch.ones(5)) == 8).all())


def test_an_all_to_all_in_which_few_send(pools: Pools) -> None:
    pools(8, FUSEDCOMM_DOMAINS=FOUR_OF_TWO).run(few_send, timeout_s=30)


def crossing(rank: int, size: int, engine: str) -> dict[str, list[int]]:
    """Bytes that every rank sends to other domains in one call on ``size`` float32."""
    comm = fc.Communicator.of()
    world_size = comm.world_size
    assert comm.between is not None
    x = torch.ones(size)
    first, last = shard_bounds(size, world_size)[rank]
    calls = {
        "all_reduce": lambda: fc.all_reduce(x, engine=engine),
        "all_gather": lambda: fc.all_gather(x[first:last], gathered_size=size, engine=engine),
        "reduce_scatter": lambda: fc.reduce_scatter(x, engine=engine),
        "all_to_all": lambda: fc.all_to_all(torch.ones(world_size, size), engine=engine),
        "broadcast": lambda: fc.broadcast(x, 1, engine=engine),
    }
    found = {}
    for op, one in calls.items():
        before = comm.between.bytes_sent
        with fc.trace() as t:
            one()
        (plan,) = t.plans
        assert plan.engine == engine and plan.chunks in ("hierarchical", "two_level"), plan
        counted = torch.tensor([comm.between.bytes_sent - before])
        everyone = [torch.empty_like(counted) for _ in range(world_size)]
        dist.all_gather(everyone, counted)
        found[op] = [int(count) for count in everyone]
    return found


@pytest.mark.parametrize(("world_size", "domains"), [(4, TWO_OF_TWO), (8, FOUR_OF_TWO)])
@pytest.mark.parametrize("size", [64, 61])
def test_bytes_across_are_those_of_the_table(
    pools: Pools, world_size: int, domains: str, size: int
) -> None:
    found = pools(world_size, FUSEDCOMM_DOMAINS=domains).run(crossing, size, "host")[0]
    check_bytes(found, world_size, domains, size)


def check_bytes(found: dict[str, list[int]], world_size: int, domains: str, size: int) -> None:
    n, g = domains.count(";") + 1, 2
    s = 4 * size
    assert sum(found["all_reduce"]) == 2 * (n - 1) * s
    assert sum(found["all_gather"]) == sum(found["reduce_scatter"]) == (n - 1) * s
    # Every rank has a row of S bytes for each rank, n g - g of them in other domains.
    assert found["all_to_all"] == [(n - 1) * g * s] * world_size
    assert found["broadcast"] == [(n - 1) * s if rank == 1 else 0 for rank in range(world_size)]
    if size % world_size == 0:
        assert found["all_reduce"] == [2 * (n - 1) * s // (n * g)] * world_size
        assert found["all_gather"] == [(n - 1) * s // (n * g)] * world_size


def bits(rank: int, engine: str) -> list[bytes]:
    torch.manual_seed(rank)
    xs = [torch.randn(1001, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    return [fc.all_reduce(x, engine=engine).view(torch.uint8).numpy().tobytes() for x in xs]


def test_sums_are_equal_on_all_ranks_and_from_run_to_run(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    first = pool.run(bits, "host")
    assert all(one == first[0] for one in first) and pool.run(bits, "host") == first


def errors(rank: int, engine: str) -> list[str]:
    found = []
    with pytest.raises(ValueError, match="needs ranks that all share memory.*2 domains") as caught:
        fc.all_reduce(torch.ones(3), algorithm="ring", engine=engine)
    found.append(type(caught.value).__name__)
    x = torch.full((40,), 60000.0, dtype=torch.float16)
    assert (fc.all_reduce(x, op="avg", engine=engine) == 60000).all(), "the sum overflowed"
    expected = [1 if peer == rank else 3 for peer in range(4)]  # but every rank sends 1
    with pytest.raises(fc.MismatchError, match="counts") as wrong:
        fc.all_to_all(torch.ones(4, 2), send_counts=[1] * 4, recv_counts=expected, engine=engine)
    found.append(str(wrong.value))
    return found


def test_what_is_wrong_is_said(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    for _, message in pool.run(errors, "host"):
        assert "disagree on all_to_all's counts" in message
    pool.restart()


def one_element(rank: int) -> None:
    """A result in every second element of something larger, which has one."""
    out = torch.zeros(2)[::2]
    x = torch.full((1,), float(rank))
    assert fc.broadcast(x, 3, out=out) is out and out.tolist() == [3]
    assert fc.all_reduce(x, out=out) is out and out.tolist() == [6]


def test_one_element(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(one_element)


def gradients(rank: int) -> None:
    """torch's derivatives, as in one domain."""
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    weight = torch.full((3, 2), float(rank + 1))
    (fc.all_reduce(x) * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 2), 10.0))


def test_gradients(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(gradients)
