"""Collectives with wrong arguments, ranks that disagree, die, or come late."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.planning import collectives as planning
from fusedcomm.protocol import Call
from fusedcomm.testing import RankError, straggler
from fusedcomm.testing.disturb import EVENTS, disturb
from tests.conftest import Pools
from tests.ranks.collective_calls import Checker, small_slots
from tests.ranks.fault_calls import Record, Seen, assert_lost, assert_told, die, see, survivors
from tests.ranks.test_skew import nothing, same_slot

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def call(name: str, comm: fc.Communicator, size: int = 12, **options: Any) -> torch.Tensor:
    x = torch.ones(size, 2, dtype=options.pop("dtype", torch.float32))
    if "reduction" in options:
        options["op"] = options.pop("reduction")
    if name == "broadcast":
        options.setdefault("src", 0)
    return getattr(fc, name)(x, group=comm, **options)


# Wrong arguments


def wrong_arguments(rank: int) -> None:
    comm = fc.Communicator.of()
    x = torch.ones(4, 3)
    with torch.inference_mode():
        inferred = torch.ones(4, 3)
        fc.all_reduce(inferred, out=inferred)
    elsewhere = [dist.new_group([1]), dist.new_group([0])][rank]
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: fc.all_reduce(x, group=elsewhere), "this rank is no member of the group"),
        (lambda: fc.all_reduce(inferred, out=inferred), "out was made under.*inference_mode"),
        (lambda: fc.broadcast(x, 0, out=inferred), "out was made under.*inference_mode"),
        (lambda: fc.recv(inferred, 1 - rank), "x was made under.*inference_mode"),
        (lambda: fc.all_reduce([1.0]), "x must be a tensor; got list"),
        (lambda: fc.all_reduce(None), "x must be a tensor; got NoneType"),
        (lambda: fc.all_gather(None), "x must be a tensor; got NoneType"),
        (lambda: fc.all_reduce(x.to_sparse()), "dense tensor"),
        (lambda: fc.all_gather(x, dim=0.0), "dim must be an int; got 0.0"),
        (lambda: fc.reduce_scatter(x, dim="rows"), "dim must be an int; got 'rows'"),
        (lambda: fc.all_gather(x, gathered_size="8"), "gathered_size must be an int; got '8'"),
        (lambda: fc.all_gather(x, gathered_size=8.5), "gathered_size must be an int; got 8.5"),
        (lambda: fc.all_reduce(x, out=x[:1].clone().expand(4, 3)), "out is expanded.*clone()"),
        (
            lambda: fc.all_to_all(x, send_counts=[1.5, 2.5], recv_counts=[2, 2]),
            r"send_counts must be whole numbers of rows; got \[1.5, 2.5\]",
        ),
        (
            lambda: fc.all_to_all(x, send_counts=[2, 2], recv_counts=2),
            "recv_counts must be whole numbers of rows; got 2",
        ),
        (lambda: fc.all_reduce(x, op="prod"), "op must be one of sum, avg, max, min; got 'prod'"),
        (lambda: fc.all_reduce(x.int(), op="avg"), "op='avg' needs a floating dtype"),
        (lambda: fc.all_reduce(x.bool()), "x is torch.bool .*'max' is or"),
        (lambda: fc.reduce_scatter(x.cfloat()), "op='sum' reduces float32.*complex64"),
        (lambda: fc.all_reduce(x, algorithm="magic"), "algorithm must be one of auto, pairwise"),
        (lambda: fc.all_reduce(x, algorithm="ring", engine="plain"), "torch.distributed chooses"),
        (lambda: fc.all_reduce(x, engine="mpi"), "engine must be one of"),
        (lambda: fc.all_reduce(x, engine="triton"), "set TRITON_INTERPRET=1"),
        (lambda: fc.all_reduce(x, out=torch.ones(3, 4)), r"out must be \[4, 3\]"),
        (lambda: fc.all_reduce(x, out=torch.ones(4, 3).double()), "out must be.*float32"),
        (lambda: fc.all_reduce(x.t(), out=x.t()), "shares memory with x without being"),
        (lambda: fc.all_reduce(x[:2], out=x[1:3]), "shares memory"),
        (lambda: fc.all_gather(torch.tensor(1.0)), "scalar: unsqueeze"),
        (lambda: fc.all_gather(x, dim=2), "dim=2 is no dimension of x"),
        (lambda: fc.all_gather(x, gathered_size=-1), "must not be negative"),
        (lambda: fc.all_gather(x, gathered_size=5), f"rank {rank} of 2 has {3 - rank}"),
        (lambda: fc.all_gather(x, out=torch.ones(4, 3)), r"out must be \[8, 3\]"),
        (lambda: fc.reduce_scatter(x, dim=-3), "dim=-3 is no dimension"),
        (lambda: fc.reduce_scatter(x, out=x[:2]), "out shares memory with x"),
        (lambda: fc.all_to_all(torch.ones(3)), "x has 3 rows, which 2 ranks cannot share"),
        (lambda: fc.all_to_all(torch.tensor(1.0)), "got a scalar"),
        (lambda: fc.all_to_all(x, send_counts=[2, 2]), "only send_counts is given"),
        (
            lambda: fc.all_to_all(x, send_counts=[2, 1], recv_counts=[1, 1]),
            "add up to 3, but x has 4 rows",
        ),
        (
            lambda: fc.all_to_all(x, send_counts=[4], recv_counts=[2, 2]),
            "send_counts must be 2 numbers",
        ),
        (
            lambda: fc.all_to_all(x, send_counts=[2, 2], recv_counts=[1, 1]),
            "both are what this rank keeps",
        ),
        (lambda: fc.broadcast(x, 2), "src must be a rank of the group, 0 to 1; got 2"),
        (lambda: fc.broadcast(x, True), "got True"),
        (lambda: comm.reserve("all_reduce", (-1,)), "not negative"),
    ]
    for wrong, words in calls:
        with pytest.raises(ValueError, match=words):
            wrong()
    comm.barrier()  # Nothing was sent, and it is still usable.


def test_wrong_arguments(pools: Pools) -> None:
    pools(2).run(wrong_arguments)


# Ranks that disagree


def disagree(rank: int, name: str, engine: str, warm: bool) -> Seen:
    comm = fc.Communicator.of(channel=f"disagree {name} {engine} {warm}", timeout_s=60)
    if warm:
        for op in OPS:
            call(op, comm, engine=engine)
    op, options = _DISAGREEMENTS[name][0 if rank == 1 else 1]
    seen = see(comm, lambda: [call(op, comm, engine=engine, **options), comm.barrier()])
    comm.close()
    return seen


#: what rank 1 does, what the others do, and what the message has of the two
_Call = tuple[str, dict[str, Any]]
_DISAGREEMENTS: dict[str, tuple[_Call, _Call, tuple[str, ...]]] = {
    "operation": (("reduce_scatter", {}), ("all_reduce", {}), ("reduce_scatter", "all_reduce")),
    "shape": (("all_reduce", {"size": 13}), ("all_reduce", {}), (r"\[13, 2\]", r"\[12, 2\]")),
    "many more": (("all_reduce", {"size": 900000}), ("all_reduce", {}), ("900000", "12")),
    "dtype": (("all_gather", {"dtype": torch.float64}), ("all_gather", {}), ("t64", "t32")),
    "reduction": (
        ("all_reduce", {"reduction": "max"}),
        ("all_reduce", {"reduction": "min"}),
        ("max", "min"),
    ),
    "source": (("broadcast", {"src": 1}), ("broadcast", {"src": 0}), ("src 1", "src 0")),
    "dimension": (
        ("reduce_scatter", {"dim": 1}),
        ("reduce_scatter", {"dim": 0}),
        ("dim 1", "dim 0"),
    ),
    "counts": (
        ("all_to_all", {"send_counts": [5, 7], "recv_counts": [6, 7]}),
        ("all_to_all", {"send_counts": [4, 8], "recv_counts": [4, 5]}),
        (r"rank 1 expects recv_counts\[0\] = 6.*send_counts\[1\] = 8",),
    ),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later"])
@pytest.mark.parametrize("engine", ["host", "plain"])
@pytest.mark.parametrize("name", _DISAGREEMENTS)
def test_ranks_that_disagree(pools: Pools, name: str, engine: str, warm: bool) -> None:
    for seen in pools(2).run(disagree, name, engine, warm):
        assert_told(seen, "MismatchError")
        words = _DISAGREEMENTS[name][2]
        assert all(re.search(word, seen.message) for word in words), (words, seen)


def other_algorithm(rank: int) -> Seen:
    comm = fc.Communicator.of(channel="algorithms", timeout_s=60)
    algorithm = "ring" if rank else "two_shot"
    seen = see(comm, lambda: [call("all_reduce", comm, algorithm=algorithm), comm.barrier()])
    comm.close()
    return seen


def test_another_algorithm(pools: Pools) -> None:
    for seen in pools(3).run(other_algorithm):
        assert_told(seen, "MismatchError", "host ring", "host two_shot")


def other_cores(rank: int, size: int) -> Seen:
    """Rank 1 sees fewer cores than ranks (``PYTHON_CPU_COUNT``), so it cuts otherwise."""
    comm = fc.Communicator.of(channel="cores", timeout_s=60)
    planning.space.cache_clear()
    with mock.patch.object(planning, "_CORES", 1 if rank else 8):
        seen = see(comm, lambda: [call("all_reduce", comm, size), comm.barrier()])
    planning.space.cache_clear()
    comm.close()
    return seen


@pytest.mark.parametrize(
    ("size", "words"),
    [(12, ("an allocation",)), (1 << 18, ("pieces of 1048576", "pieces of 8388608"))],
    ids=["small", "large"],
)
def test_another_number_of_cores(pools: Pools, size: int, words: tuple[str, ...]) -> None:
    for seen in pools(2).run(other_cores, size):
        assert_told(seen, "MismatchError", *words)


# Deaths


def dies(rank: int, op: str, event: str, algorithm: str) -> Seen:
    comm = fc.Communicator.of(channel="deaths", timeout_s=60)
    options = {"algorithm": algorithm} if op == "all_reduce" else {}

    def work() -> None:
        with small_slots(32), disturb(1, event, die, nth=7):
            for _ in range(20):
                call(op, comm, **options)

    return see(comm, work)


@pytest.mark.parametrize(
    ("op", "event", "algorithm"),
    [
        ("all_reduce", "signal", "two_shot"),
        ("all_reduce", "wait", "ring"),
        ("all_reduce", "write", "one_shot"),
        ("all_gather", "read", ""),
        ("reduce_scatter", "consumed", ""),
        ("all_to_all", "begin", ""),
        ("broadcast", "consumed", ""),
    ],
)
def test_a_rank_that_dies(
    pools: Pools, record_property: Record, op: str, event: str, algorithm: str
) -> None:
    outcomes = pools(3).outcomes(dies, op, event, algorithm, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, op)


# Skew

#: Longer than SLOTS calls take.
LATE_S = 0.004


def late(rank: int, events: list[str], repeat: bool, slot: int, channel: str) -> None:
    """All collectives in a row, sizes changing, with one rank late at one event."""
    comm = fc.Communicator.of(channel=channel, timeout_s=20)
    for number, event in enumerate(events):
        for victim in range(comm.world_size):
            checker = Checker(comm)
            with (
                small_slots(slot),
                same_slot() if repeat else nullcontext(),
                straggler(victim, event, LATE_S),
            ):
                for size in (7, 3):
                    algorithm = ("two_shot", "ring", "halving_doubling", "one_shot")[number % 4]
                    for _ in range(2):
                        checker.all_reduce((size,), algorithm=algorithm)
                    checker.all_gather((size, 2), 1)
                    checker.reduce_scatter((size, 2))
                    checker.all_to_all((2,), size)
                    checker.broadcast((size,), size % comm.world_size)
            checker.finish()
    comm.close()


@pytest.mark.parametrize("repeat", [False, True], ids=["slots in turn", "one slot"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_changes_nothing(pools: Pools, world_size: int, repeat: bool) -> None:
    events = list(EVENTS) if world_size == 3 else list(EVENTS)[::2]
    pools(world_size).run(late, events, repeat, 1 << 20, f"late {repeat}", timeout_s=120)


def late_without(rank: int, step: str, event: str) -> None:
    with mock.patch.object(Call, step, nothing):
        late(rank, [event], True, 1 << 20, f"late without {step}")


@pytest.mark.parametrize(("step", "event"), [("wait", "write"), ("await_readers", "read")])
def test_a_forgotten_wait_is_found(pools: Pools, step: str, event: str) -> None:
    with pytest.raises(RankError, match="are wrong|changed afterwards"):
        pools(3).run(late_without, step, event)
