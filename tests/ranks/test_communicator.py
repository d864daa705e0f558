"""The communicator: its counters, its memory, its end and its successor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusedcomm as fc
from fusedcomm.protocol import SLOTS
from tests.conftest import Pools
from tests.ranks.cases import OPS, Case, Problem, call
from tests.ranks.checking import check, check_own_memory, check_values, planned

#: One call of everything, by both ways of each, growing and shrinking.
CASES = [Case(op, (rows,)) for rows in (3, 40, 2, 0, 33) for op in OPS]


# Epochs


def check_epochs(rank: int, first_epoch: int) -> None:
    """Every counter passes the largest int32 (or -1) after a few calls."""
    for number, plans in enumerate(
        (
            {},
            {"min_chunk_rows": 1, "pieces": 2},
            {"min_chunk_rows": 1 << 30, "one_shot_bytes": 0},
        )
    ):
        comm = fc.Communicator.of(channel=f"epochs {number}")
        comm.memory.first_epoch = first_epoch
        with planned(**plans):
            check(rank, CASES, comm)
        for workspace in comm.memory.workspaces.values():
            words = workspace.segments[comm.rank].words
            epochs = [words[slot * 32] for slot in range(SLOTS)]
            assert all((epoch - first_epoch) % (1 << 32) > 3 for epoch in epochs), epochs
            if first_epoch > 0:
                assert all(epoch < 0 for epoch in epochs), epochs
        comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_epochs_wrap_around(pools: Pools, world_size: int) -> None:
    for first_epoch in (2**31 - 3, -3):
        pools(world_size).run(check_epochs, first_epoch)


# Memory


def sizes_after(comm: fc.Communicator, case: Case) -> dict[str, dict[str, int]]:
    rank, world_size = comm.rank, comm.world_size
    problem = Problem.of(case, world_size)
    found = call(case, problem, rank, world_size, comm)
    check_values(case, problem, found, rank, world_size)
    return comm.workspace_bytes()


def check_bounds(rank: int) -> None:
    """At most SLOTS shards for a gather, SLOTS partials for a scatter, and flags."""
    world_size = dist.get_world_size()
    for engine, tokens, dim, dtype in (
        ("host", (64,), 0, torch.float32),
        ("host", (7, 3), 0, torch.bfloat16),
        ("host", (3, 7), 1, torch.float64),
        ("host", (256 * world_size,), 0, torch.bfloat16),
    ):
        rows = 1
        for extent in tokens:
            rows *= extent
        chunk = -(-tokens[dim] // world_size) * (rows // tokens[dim])
        k, n = 24, 40

        def spent(op: str, needs: str) -> dict[str, int]:
            comm = fc.Communicator.of(channel="bounds")
            case = Case(op, tokens, dim, k, n, dtype=dtype, engine=engine, needs=needs)  # noqa: B023
            sizes = sizes_after(comm, case)
            assert all(size["flags"] <= 4096 * -(-world_size // 4) for size in sizes.values())
            comm.close()
            return {kind: size["data"] for kind, size in sizes.items()}

        line, item = 128, dtype.itemsize

        def at_most(regions: int, nbytes: int) -> int:
            return SLOTS * regions * (-(-nbytes // line) * line)  # noqa: B023

        forward = spent("all_gather_linear", "")
        assert list(forward) == ["gather"] and forward["gather"] <= at_most(1, chunk * k * item)
        both = spent("all_gather_linear", "xwb")
        assert both["gather"] == forward["gather"], both
        assert both["scatter"] <= at_most(world_size, chunk * k * item), both
        forward = spent("linear_reduce_scatter", "")
        assert list(forward) == ["scatter"], forward
        assert forward["scatter"] <= at_most(world_size, chunk * n * item), forward
        both = spent("linear_reduce_scatter", "xwb")
        assert both["gather"] <= at_most(1, chunk * n * item), both


def check_reserve(rank: int) -> None:
    """After ``reserve``, neither calls of these shapes nor smaller ones allocate anything."""
    world_size = dist.get_world_size()
    large = 256 * world_size
    for op, tokens, n, backward, dtype, wire in (
        ("all_gather_linear", (37,), 1024, False, torch.float32, None),
        ("all_gather_linear", (5, 6, 2), 1024, True, torch.bfloat16, None),
        ("all_gather_linear", (large,), 1024, True, torch.float32, None),
        ("linear_reduce_scatter", (37,), 1024, False, torch.float32, None),
        ("linear_reduce_scatter", (5, 6), 1024, True, torch.bfloat16, torch.float32),
        ("linear_reduce_scatter", (large,), 1024, True, torch.float16, None),
        ("linear_all_reduce", (1,), 1024, False, torch.float32, None),
        ("linear_all_reduce", (37,), 1024, True, torch.bfloat16, torch.float32),
        ("linear_all_reduce", (large,), 1024, True, torch.float32, None),
        ("linear_all_reduce", (3, 170), 256, True, torch.float32, None),
        ("linear_all_reduce", (4, 190), 256, True, torch.float32, None),
        ("linear_all_reduce", (170, 3), 256, True, torch.float32, None),
    ):
        what = f"{op} {tokens} {dtype} over {wire}"
        k = 16
        options: dict[str, Any] = {} if wire is None else {"wire_dtype": wire}
        case = Case(op, tokens, k=k, n=n, dtype=dtype, needs="xwb" * backward, options=options)
        comm = fc.Communicator.of(channel="reserve")
        crossing = k if op == "all_gather_linear" else n
        comm.reserve(op, (*tokens, crossing), dtype=wire or dtype, backward=backward)
        reserved = comm.workspace_bytes()
        assert reserved, what
        for smaller in (0, 1):
            shorter = Case(op, (tokens[0] - smaller, *tokens[1:]), k=k, n=n, dtype=dtype,
                           needs=case.needs, options=options)  # fmt: skip
            assert sizes_after(comm, shorter) == reserved, f"{what}: grew"
            assert comm.workspace_bytes() == reserved, what
        comm.close()
    # Several shapes at once; and errors that leave the communicator as it was.
    comm = fc.Communicator.of(channel="reserve")
    comm.reserve("all_gather_linear", (4, 16), [40, 16], torch.Size((9, 16)), backward=True)
    reserved = comm.workspace_bytes()
    for rows in (40, 4, 9):
        case = Case("all_gather_linear", (rows,), k=16)
        assert sizes_after(comm, case) == reserved
    for bad, message in (
        (("gather", (4, 4)), "knows no operation 'gather'"),
        (("all_gather_linear", (4,)), "global shape"),
        (("all_gather_linear", ()), "global shape"),
        (("all_gather_linear", (4, -1)), "global shape"),
    ):
        with pytest.raises(ValueError, match=message):
            comm.reserve(*bad)
    assert sizes_after(comm, case) == reserved
    comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_workspaces_hold_two_shards_or_two_partials(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_bounds)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_grows_after_reserve(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_reserve)


@pytest.mark.parametrize("domains", ["0,1;2,3", "0,2;1,3"])
def test_nothing_grows_after_reserve_in_domains(pools: Pools, domains: str) -> None:
    pools(4, FUSEDCOMM_DOMAINS=domains).run(check_reserve)


# Life


def check_life(rank: int) -> None:
    """Closing gives everything back; a new one starts from nothing and works."""
    comm = fc.Communicator.of(channel="life")
    assert comm in fc.Communicator.live()
    layer = fc.nn.RowParallelLinear(6, 4, group=comm)
    x = torch.ones(3, layer.weight.shape[1])
    for _ in range(3):
        check(rank, CASES[:4], comm)
        leaf = torch.ones(2, 3, requires_grad=True)
        pending = fc.all_gather_linear(leaf, torch.ones(4, 3), group=comm).sum()
        found = call(CASES[0], Problem.of(CASES[0], comm.world_size), rank, comm.world_size, comm)
        with comm:
            comm.barrier()
        comm.close()
        assert comm not in fc.Communicator.live() and comm.workspace_bytes() == {}
        uses: list[Callable[[], Any]] = [
            partial(fc.all_gather_linear, torch.ones(2, 3), torch.ones(4, 3), group=comm),
            comm.barrier,
            partial(comm.symmetric_empty, 2),
            partial(comm.reserve, "all_gather_linear", (2, 2)),
            partial(layer, x),
            pending.backward,
        ]
        for use in uses:
            with pytest.raises(fc.ClosedError, match="closed"):
                use()
        successor = fc.Communicator.of(channel="life")
        assert successor is not comm
        successor.barrier()
        check_own_memory(CASES[0], found, successor)
        with pytest.raises(fc.ClosedError, match="closed"):
            layer(x)
        comm, layer = successor, fc.nn.RowParallelLinear(6, 4, group=successor)
    comm.close()


def check_barrier(rank: int) -> None:
    """No rank leaves before the last has come."""
    comm = fc.Communicator.of()
    board = comm.symmetric_empty(1, dtype=torch.int64)
    for number in range(1, 30):
        board.local.fill_(number)
        comm.barrier()
        assert all(int(peer) >= number for peer in board.peers), [int(p) for p in board.peers]
        comm.barrier()
        assert all(int(peer) >= number for peer in board.peers)


def test_a_closed_communicator_refuses_work_and_has_a_successor(pools: Pools) -> None:
    for world_size in (1, 2):
        pools(world_size).run(check_life)


def test_barrier(pools: Pools) -> None:
    for world_size in (1, 4):
        pools(world_size).run(check_barrier)


def check_made_among_fakes(rank: int) -> None:
    """One is made of real memory while a model is built on the meta device, or of fake tensors."""
    for number, mode in enumerate((torch.device("meta"), FakeTensorMode())):
        with mode:
            layer = fc.nn.ColumnParallelLinear(4, 6, group=fc.Communicator.of(channel=f"{number}"))
        assert layer.weight.device.type == "meta" or isinstance(layer.weight, FakeTensor)
        with layer.comm as comm:
            comm.barrier()
            x = torch.randn(2, 4)
            y = fc.all_gather_linear(x, torch.eye(4), group=comm)
        assert torch.equal(y[2 * rank : 2 * rank + 2], x)


def test_made_among_fakes(pools: Pools) -> None:
    pools(2).run(check_made_among_fakes)
