"""Every collective equals what one process computes, on both CPU engines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.engines.host import collectives as host
from fusedcomm.planning.collectives import Plan
from fusedcomm.programs import ALGORITHMS
from fusedcomm.programs.all_reduce import Domains
from tests.conftest import Pools
from tests.ranks.collective_calls import (
    Checker,
    bits,
    check_algorithms,
    check_dtypes,
    check_shapes,
    draw,
    going_round,
    reduced,
    small_slots,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("engine", "slot"), [("host", None), ("host", 64), ("plain", None)])
def test_shapes(pools: Pools, world_size: int, engine: str, slot: int | None) -> None:
    pools(world_size).run(check_shapes, engine, slot, timeout_s=120)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_dtypes(pools: Pools, world_size: int, engine: str) -> None:
    pools(world_size).run(check_dtypes, engine, timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("slot", [None, 96], ids=["one piece", "pieces"])
def test_algorithms(pools: Pools, world_size: int, slot: int | None) -> None:
    pools(world_size).run(check_algorithms, slot, timeout_s=120)


def with_domains(rank: int, domains: Domains, slot_bytes: int | None) -> None:
    """The hierarchical program on shared memory, where domains are only a pattern of messages."""
    comm = fc.Communicator.of()
    for size in (0, 1, 10, 77):
        for dtype in (torch.float32, torch.bfloat16):
            text = f"a program {size} {dtype} {domains}"
            plan = Plan(text, "host", "hierarchical", domains, "it is a test")
            xs = [draw((text, r), (size,), dtype) for r in range(comm.world_size)]
            out = torch.empty(size, dtype=dtype)
            with small_slots(slot_bytes):
                host.all_reduce(comm, plan, xs[rank], out, "sum")
            assert torch.equal(out, reduced(xs, "sum")), (text, out)


@pytest.mark.parametrize("slot", [None, 64], ids=["one piece", "pieces"])
@pytest.mark.parametrize(
    "domains",
    [((0, 1), (2, 3)), ((0, 2), (3, 1)), ((0,), (1,), (2, 3)), ((0, 1), (2,)), ((2,), (0,), (1,))],
    ids=str,
)
def test_hierarchical_programs(pools: Pools, domains: Domains, slot: int | None) -> None:
    pools(sum(map(len, domains))).run(with_domains, domains, slot)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_are_equal_on_all_ranks_and_from_run_to_run(
    pools: Pools, world_size: int, algorithm: str
) -> None:
    for dtype in (torch.float32, torch.float16):
        first, *others = pools(world_size).run(bits, algorithm, dtype, 1001)
        again = pools(world_size).run(bits, algorithm, dtype, 1001)
        for found in (*others, *again):
            assert torch.equal(found, first)


def rounds_once(rank: int, algorithm: str, world_size: int) -> None:
    """2048 + 1 + … + 1 in float16: each 1 alone is lost to rounding, together they are not."""
    x = torch.full((40,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    y = fc.all_reduce(x, algorithm=algorithm)
    assert (y == 2048 + 2 * ((world_size - 1) // 2)).all(), y[0].item()
    shard = fc.reduce_scatter(x, dim=0)
    assert (shard == y[0]).all()
    x = torch.full((40,), 60000.0, dtype=torch.float16)
    assert (fc.all_reduce(x, op="avg", algorithm=algorithm) == 60000).all(), "the sum overflowed"


@pytest.mark.parametrize("algorithm", ["one_shot", "pairwise", "two_shot", "parameter_server"])
def test_half_types_are_added_in_float32(pools: Pools, algorithm: str) -> None:
    pools(3).run(rounds_once, algorithm, 3)
    pools(2).run(rounds_once, algorithm, 2)


# Groups and channels


def in_groups(rank: int) -> None:
    """Two groups at once, of ranks that are no neighbours; then one that leaves a rank out."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    check_shapes(rank, "host", None, mine)
    some = dist.new_group([1, 2, 3])
    if rank:
        check_shapes(rank, "host", None, some)
        with pytest.raises(ValueError, match="0 to 2"):
            fc.broadcast(torch.ones(2), 3, group=some)
    dist.barrier()


def test_groups(pools: Pools) -> None:
    pools(4).run(in_groups, timeout_s=120)


def on_two_channels(rank: int) -> None:
    """Calls alternate between channels; sizes grow and shrink."""
    checkers = [Checker(fc.Communicator.of(channel=name)) for name in ("one", "two")]
    for turn, size in enumerate((3, 9000, 2, 40000, 0, 9001)):
        for checker in checkers if turn % 2 else checkers[::-1]:
            checker.all_reduce((size,))
            checker.all_gather((size, 2))
            checker.reduce_scatter((size, 2))
    for checker in checkers:
        checker.finish()
        checker.comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_channels_and_changing_sizes(pools: Pools, world_size: int) -> None:
    pools(world_size).run(on_two_channels)


# Memory


def bounded_memory(rank: int) -> None:
    """A large tensor goes through a small workspace, and reserve makes it once."""
    from fusedcomm.planning.collectives import SLOT_BYTES
    from fusedcomm.protocol import SLOTS

    with fc.Communicator.of(channel="bounded") as comm:
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            comm.reserve(op, (1 << 22,), dtype=torch.float32)
        held = comm.workspace_bytes()
        assert held["collective"]["data"] == SLOTS * SLOT_BYTES
        checker = Checker(comm)
        checker.every_op(((3 << 20) + 5,))
        after = comm.workspace_bytes()["collective"]
        assert after["data"] == held["collective"]["data"], (after, held)


def test_memory_is_bounded(pools: Pools) -> None:
    pools(2).run(bounded_memory)


def reserved(rank: int) -> None:
    """No call of the reserved shape makes the workspace anew, whatever the algorithm and cut."""
    for shape in ((5, 7), (3,), (1000, 37), (0, 4)):
        with fc.Communicator.of(channel=f"reserved {shape}") as comm:
            for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
                comm.reserve(op, shape)
            memory = (comm.inside or comm).memory
            before = memory.workspaces["collective"]
            checker = Checker(comm)
            for algorithm in ALGORITHMS if comm.inside is None else ("auto",):
                checker.all_reduce(shape, algorithm=algorithm)
            for dim in range(len(shape)):
                checker.all_gather(shape, dim)
                checker.reduce_scatter(shape, dim)
            checker.broadcast(shape, 0)
            assert memory.workspaces["collective"] is before, shape


@pytest.mark.parametrize("world_size", [2, 4])
def test_reserved_memory_is_enough(pools: Pools, world_size: int) -> None:
    pools(world_size).run(reserved)


def test_reserved_memory_is_enough_in_domains(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS="0,2;1,3").run(reserved)


def in_symmetric_memory(rank: int) -> None:
    """Inputs that peers read in place; refilled at once, which must not disturb a late reader."""
    comm = fc.Communicator.of()
    world_size = comm.world_size
    memory = comm.symmetric_empty(4 * world_size, 5)
    spare = comm.symmetric_empty(4 * world_size, 5)
    for turn in range(4):
        for where in (memory.local, memory.local[2:-1], spare.local):
            xs = [draw((turn, r), where.shape, torch.float32) for r in range(world_size)]
            total = sum(xs[1:], xs[0])
            for algorithm in ALGORITHMS:
                where.copy_(xs[rank])
                y = fc.all_reduce(where, algorithm=algorithm)
                where.fill_(float("nan"))
                assert torch.equal(y, total), (turn, algorithm)
            for dim in (0, 1):
                where.copy_(xs[rank])
                y = fc.all_gather(where, dim=dim)
                where.fill_(float("nan"))
                assert torch.equal(y, torch.cat(xs, dim))
                where.copy_(xs[rank])
                y = fc.reduce_scatter(where, dim=dim)
                where.fill_(float("nan"))
                pieces = total.chunk(world_size, dim)
                assert torch.equal(y, pieces[rank]) if rank < len(pieces) else not y.numel()
            if where.shape[0] % world_size == 0:
                where.copy_(xs[rank])
                y = fc.all_to_all(where)
                where.fill_(float("nan"))
                assert torch.equal(y, torch.cat([x.chunk(world_size)[rank] for x in xs]))
            where.copy_(xs[rank])
            assert fc.all_reduce(where, out=where) is where
            assert torch.equal(where, total)


def algorithms_taken(rank: int) -> dict[str, str]:
    """For a large tensor of this rank's own, a symmetric one, and one reduced in place."""
    comm = fc.Communicator.of()
    memory = comm.symmetric_empty(1 << 20)
    own, out = torch.ones(1 << 20), torch.empty(1 << 20)
    calls = {
        "own": (own, out),
        "symmetric": (memory.local, out),
        "onto itself": (memory.local,) * 2,
    }
    taken = {}
    for name, (x, y) in calls.items():
        x.fill_(1)
        with fc.trace() as recorded:
            fc.all_reduce(x, out=y)
        assert (y == comm.world_size).all()
        taken[name] = recorded.plans[0].chunks
    return taken


def test_two_ranks_take_one_step(pools: Pools) -> None:
    assert set(pools(2).run(algorithms_taken)[0].values()) == {"one_shot"}
    assert set(pools(3).run(algorithms_taken)[0].values()) == {"two_shot"}


def with_banks(rank: int, slot_bytes: int | None) -> None:
    """Every rank goes round its banks, or not, for itself, and tells its readers."""
    for number in range(2):
        with going_round(rank % 2 == number), fc.Communicator.of(channel="banks") as comm:
            check_shapes(rank, "host", slot_bytes, comm)
            held = comm.memory.workspaces["collective"]
            assert held.banks > 1 and held.rotation.on == (rank % 2 == number)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("slot_bytes", [None, 64])
def test_banks(pools: Pools, world_size: int, slot_bytes: int | None) -> None:
    pools(world_size).run(with_banks, slot_bytes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_symmetric_inputs(pools: Pools, world_size: int) -> None:
    pools(world_size).run(in_symmetric_memory)


def with_views(rank: int, slot_bytes: int | None) -> None:
    """Views whose values are not what lies in memory."""
    n = dist.get_world_size()
    xs = [torch.randn(2 * n, 3, dtype=torch.complex64) for _ in range(n)]  # alike on all ranks
    x, right = xs[rank].conj(), [one.conj().resolve_conj() for one in xs]
    with small_slots(slot_bytes):
        for _ in range(2):  # made again
            assert torch.equal(fc.all_gather(x), torch.cat(right))
            assert torch.equal(fc.all_to_all(x), torch.cat([one.chunk(n)[rank] for one in right]))
            assert torch.equal(fc.broadcast(x, n - 1), right[-1])
            out = torch.empty(2 * n * n, 3, dtype=torch.complex64).conj()
            assert torch.equal(fc.all_gather(x, out=out), torch.cat(right))
            negative = torch._neg_view(torch.ones(5))
            assert fc.all_reduce(negative).tolist() == [-n] * 5
            assert fc.reduce_scatter(torch._neg_view(torch.ones(n))).tolist() == [-n]


@pytest.mark.parametrize("slot", [None, 64], ids=["one piece", "pieces"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_views_that_are_not_what_lies_in_memory(
    pools: Pools, world_size: int, slot: int | None
) -> None:
    pools(world_size).run(with_views, slot)
