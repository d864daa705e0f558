"""Inputs that lie in symmetric memory are read there by the peers, until the call returns."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import fusedcomm as fc
from fusedcomm import protocol
from fusedcomm.protocol import Call
from fusedcomm.testing import RankError, straggler
from tests.conftest import Pools
from tests.ranks.cases import Case, shard
from tests.ranks.checking import MAX_PIECES, bound, check, compare, planned

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"min_chunk_rows": 1},
    {"min_chunk_rows": 1, "pieces": MAX_PIECES},
    {"min_chunk_rows": 1 << 30, "pieces": MAX_PIECES},
)
K, N = 6, 5
LATE_S = 0.02


def weights(dtype: torch.dtype, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N * world_size, K, generator=generator, dtype=torch.float64).to(dtype)


def rows(total: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total, K, generator=generator, dtype=torch.float64).to(dtype)


def check_in_place(rank: int, late: int | None) -> None:
    """The caller overwrites its tensor as soon as the call returns, while a rank reads late."""
    comm = fc.Communicator.of(channel="in place")
    world_size = comm.world_size
    for dtype in (torch.float32, torch.bfloat16):
        memory = comm.symmetric_empty(10, K, dtype=dtype)
        w = weights(dtype, world_size)
        own_w = shard(w, 0, rank, world_size)
        # Even and uneven shards, empty ones, none at all; beginning anywhere in the tensor.
        for seed, total in enumerate((8, 7, 2, 1, 0, 5)):
            for start, plan in zip((0, 0, 2, 1), PLANS, strict=True):
                x = rows(total, seed, dtype)
                right = F.linear(x.double(), w.double())
                own = shard(x, 0, rank, world_size)
                place = memory.local[start : start + own.shape[0]]
                place.copy_(own)
                delay = nullcontext() if late is None or not total else once_late(late, total)
                with planned(**plan), delay:
                    y = fc.all_gather_linear(place, own_w, group=comm, gathered_size=total)
                memory.local.fill_(torch.nan)
                what = f"{dtype}, {total} rows at {start}, {plan}: y on rank {rank}"
                compare(what, y, shard(right, 1, rank, world_size), bound(dtype, K, 3))
                comm.barrier()
    comm.close()


def once_late(late: int, total: int) -> Any:
    """Delays a rank at its first read, if it reads anything."""
    others = [rank for rank in range(dist.get_world_size()) if rank != late]
    x = torch.empty(total, 1)
    reads = any(len(shard(x, 0, rank, dist.get_world_size())) for rank in others)
    return straggler(late, "read", LATE_S, nth=0) if reads else nullcontext()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_are_right_when_the_input_is_overwritten_at_once(
    pools: Pools, world_size: int
) -> None:
    pools(world_size).run(check_in_place, None)
    for late in range(world_size if world_size > 1 else 0):
        pools(world_size).run(check_in_place, late)


def check_without_end(rank: int) -> None:
    with mock.patch.object(Call, "await_done", lambda *_: None):
        check_in_place(rank, 1)


def test_a_call_that_does_not_await_its_readers_is_found(pools: Pools) -> None:
    with pytest.raises(RankError, match="are NaN"):
        pools(2).run(check_without_end)


def check_events(rank: int) -> None:
    """Nothing is copied into a slot, forward or backward; everything else is copied as usual."""
    comm = fc.Communicator.of(channel="events")
    memory = comm.symmetric_empty(4, 3, K)
    memory.local.normal_()
    w = torch.randn(N, K, requires_grad=True)
    seen: list[tuple[str, str]] = []

    def recorder(event: str, workspace: str = "", **_: Any) -> None:
        seen.append((event, workspace))

    previous = protocol.set_recorder(recorder)
    x = memory.local.detach().requires_grad_()
    y = fc.all_gather_linear(x, w, group=comm)
    reads = {workspace for event, workspace in seen if event == "read"}
    assert reads == {f"symmetric {memory.number}"}, seen
    assert not any(event == "write" for event, _ in seen), seen

    # Of the backward pass, the weight's gradient gathers x again, and x's pushes into slots.
    seen.clear()
    y.sum().backward()
    assert ("write", "gather") not in seen and ("write", "scatter") in seen, seen
    assert ("read", f"symmetric {memory.number}") in seen, seen

    # A transposed view has to be copied, on all ranks alike; so has memory of another channel.
    for group, gather_dim in ((comm, 1), (None, 0)):
        seen.clear()
        fc.all_gather_linear(memory.local, w, group=group, gather_dim=gather_dim)
        assert ("write", "gather") in seen and ("read", "gather") in seen, (gather_dim, seen)

    # The incoming gradient of a reduce-scatter is gathered, too.
    inner = torch.randn(4 * comm.world_size, 2, requires_grad=True)
    w = torch.randn(K, 2)
    dys = comm.symmetric_empty(4, K)
    dys.local.fill_(1.0)
    y = fc.linear_reduce_scatter(inner, w, group=comm)
    seen.clear()
    y.backward(dys.local)
    assert ("write", "gather") not in seen, seen
    assert inner.grad is not None
    compare(f"dx on rank {rank}", inner.grad, w.sum(0).double().expand(inner.shape), 1e-6)
    protocol.set_recorder(previous)
    comm.close()


def test_nothing_is_copied_in(pools: Pools) -> None:
    for world_size in (2, 3):
        pools(world_size).run(check_events)


def check_lifetime(rank: int) -> None:
    """A tensor that is gone, an empty one, and two alive at once are told apart."""
    comm = fc.Communicator.of(channel="lifetime")
    for _ in range(3):
        memory = comm.symmetric_empty(2, K)
        memory.local.fill_(1.0)
        y = fc.all_gather_linear(memory.local, torch.ones(1, K), group=comm)
        assert torch.equal(y, torch.full((2 * comm.world_size, 1), float(K)))
        del memory
    both = [comm.symmetric_empty(2, K), comm.symmetric_empty(2, K)]
    for number, memory in enumerate(both):
        memory.local.fill_(number)
    for number, memory in enumerate(both):
        y = fc.all_gather_linear(memory.local, torch.ones(1, K), group=comm)
        assert torch.equal(y, torch.full((2 * comm.world_size, 1), float(K * number)))
        assert memory.pointers.shape == (comm.world_size,)
        assert len(memory.peers) == comm.world_size
    empty = comm.symmetric_empty(0, K)
    assert empty.local.shape == (0, K)
    # Shards without rows have no address; they are not in the empty symmetric tensor.
    check(rank, [Case("all_gather_linear", (rows,), engine="host") for rows in (1, 2, 0)], comm)
    y = fc.all_gather_linear(empty.local, torch.ones(1, K), group=comm)
    assert y.shape == (0, 1)
    comm.close()


def test_symmetric_tensors_are_told_apart(pools: Pools) -> None:
    for world_size in (1, 3):
        pools(world_size).run(check_lifetime)


def check_disagreement(rank: int, odd: int, how: str) -> None:
    """One rank's input lies elsewhere than the others'."""
    comm = fc.Communicator.of(channel="disagreement")
    memory, other = comm.symmetric_empty(8, K), comm.symmetric_empty(8, K)
    x = memory.local[2:4]
    if rank == odd:
        x = {"ordinary": torch.zeros(2, K), "offset": memory.local[3:5], "other": other.local[2:4]}[
            how
        ]
    with pytest.raises(fc.MismatchError, match="ranks disagree on call"):
        fc.all_gather_linear(x, torch.ones(3, K), group=comm)
    with pytest.raises(fc.ClosedError, match="unusable after an error"):
        fc.all_gather_linear(x, torch.ones(3, K), group=comm)
    comm.close()


@pytest.mark.parametrize("how", ["ordinary", "offset", "other"])
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_whose_inputs_lie_in_other_places_are_told(pools: Pools, odd: int, how: str) -> None:
    pools(3).run(check_disagreement, odd, how)


def check_plain(rank: int) -> None:
    """The plain engine takes such tensors like any other."""
    comm = fc.Communicator.of(channel="plain")
    x, w = rows(7, 0, torch.float32), weights(torch.float32, comm.world_size)
    own = shard(x, 0, rank, comm.world_size)
    place = comm.symmetric_empty(4, K).local[: len(own)]
    place.copy_(own)
    own_w = shard(w, 0, rank, comm.world_size)
    y = fc.all_gather_linear(place, own_w, group=comm, gathered_size=7, engine="plain")
    right = F.linear(x.double(), w.double())
    compare(f"rank {rank}", y, shard(right, 1, rank, comm.world_size), bound(torch.float32, K))
    comm.close()


def test_the_plain_engine_takes_them_too(pools: Pools) -> None:
    pools(3).run(check_plain)
