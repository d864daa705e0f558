"""The mixture of experts beside itself: several in flight, groups, threads, late ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.engines.host import units
from fusedcomm.protocol import Call
from fusedcomm.testing import RankError, straggler
from fusedcomm.testing.disturb import EVENTS
from tests.conftest import Pools
from tests.ranks.moe_cases import Case, Problem, call
from tests.ranks.test_channels import in_threads
from tests.ranks.test_moe import check, check_values
from tests.ranks.test_skew import LATE_S, nothing, same_slot

#: Consecutive calls of changing sizes and routings.
CASES = [
    Case("moe_ffn", (9, 5), routing="sentinels"),
    Case("pair", (3, 40), experts=5, k=3, options={"align": 4}),
    Case("moe_ffn", (40, 0), hidden=8, routing="one rank", bias=True),
    Case("pair", (0, 7), hidden=24),
]


def in_flight(rank: int, engine: str = "auto") -> None:
    """Forward passes of several micro-batches, then their backward passes, in any order."""
    world_size = dist.get_world_size()
    comms = [fc.Communicator.of(channel=name) for name in ("one", "two")]
    for seed, backwards in enumerate(((0, 1, 2), (2, 1, 0), (1, 2, 0))):
        cases = [
            Case("pair", (8, 3), k=2, seed=seed),
            Case("pair", (2, 30), k=3, seed=seed + 1),
            Case("pair", (5, 5), k=1, seed=seed),
        ]
        problems = [Problem.of(case, world_size) for case in cases]
        started: list[Any] = []
        for i, problem in enumerate(problems):  # two on one channel, one on another
            x = problem.xs[rank].float().requires_grad_()
            weights = problem.weights[rank].float().requires_grad_()
            d = fc.dispatch(x, problem.ids[rank], weights, 8, group=comms[i % 2], engine=engine)
            started.append((x, weights, d, problem))
        ys = [fc.combine(d.x * 3.0, d) for _, _, d, _ in reversed(started)][::-1]
        for i in backwards:
            ys[i].backward(started[i][3].dys[rank].float())
        for (x, weights, _, problem), y in zip(started, ys, strict=True):
            factor = 3.0 * weights.detach().sum(1, keepdim=True)
            dy = problem.dys[rank].float()
            torch.testing.assert_close(y, x.detach() * factor)
            torch.testing.assert_close(x.grad, dy * factor)
            row = (3.0 * x.detach() * dy).sum(1, keepdim=True)
            torch.testing.assert_close(weights.grad, row.expand_as(weights))
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_in_flight(pools: Pools, world_size: int) -> None:
    pools(world_size).run(in_flight)


def two_groups(rank: int) -> None:
    """Two halves of the world at once, in an order of ranks of their own, and then all."""
    halves = [dist.new_group([3, 0], use_local_synchronization=False), dist.new_group([1, 2])]
    mine = halves[0] if rank in (0, 3) else halves[1]
    check(rank, CASES, mine)
    check(rank, CASES)
    check(rank, CASES[::-1], mine)


def test_two_groups_at_once(pools: Pools) -> None:
    pools(4).run(two_groups)


def threads(rank: int) -> None:
    def work(name: str) -> None:
        comm = fc.Communicator.of(channel=name, timeout_s=20)
        # Without gradients, and so without torch's deterministic mode, which is the process's.
        for case in CASES:
            problem = Problem.of(case, comm.world_size)
            check_values(case, problem, call(case, problem, rank, comm.world_size, comm), rank,
                         comm.world_size)  # fmt: skip
        comm.close()

    in_threads(lambda: work("thread 0"), lambda: work("thread 1"))


def test_threads_with_a_channel_each(pools: Pools) -> None:
    pools(2).run(threads)


def late(rank: int, events: list[str], repeat: bool, channel: str = "late") -> None:
    """All calls in a row, for every event and every rank that is late there."""
    comm = fc.Communicator.of(channel=channel, timeout_s=20)
    world_size = comm.world_size
    problems = [Problem.of(case, world_size) for case in CASES]
    for event in events:
        for who in range(world_size):
            slots = same_slot() if repeat else nullcontext()
            with slots, straggler(who, event, LATE_S):
                found = [
                    call(case, problem, rank, world_size, comm)
                    for case, problem in zip(CASES, problems, strict=True)
                ]
            for case, problem, local in zip(CASES, problems, found, strict=True):
                try:
                    check_values(case, problem, local, rank, world_size)
                except AssertionError as error:
                    raise AssertionError(f"rank {who} late at each {event!r}: {error}") from None
    comm.close()


@pytest.mark.parametrize("repeat", [False, True], ids=["slots in turn", "one slot"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_changes_nothing(pools: Pools, world_size: int, repeat: bool) -> None:
    pools(world_size).run(late, list(EVENTS), repeat)


def replayed(rank: int, channel: str, event: str = "wait") -> None:
    """One plan again and again: without counts, nothing but consumed holds a fast rank back."""
    comm = fc.Communicator.of(channel=channel, timeout_s=20)
    world_size = comm.world_size
    ids = torch.arange(24).view(12, 2) % 6
    d = fc.dispatch(torch.zeros(12, 8), ids, None, 6, group=comm)
    for who in range(world_size):
        with same_slot(), straggler(who, event, LATE_S):
            for number in range(1, 5):
                value = float(100 * who + number)
                y = fc.dispatch(torch.full((12, 8), value), plan=d).x
                assert bool((y == value).all()), f"dispatch, rank {who} late at each {event!r}"
            for number in range(1, 5):
                value = float(100 * who + number)
                y = fc.combine(torch.full((len(d.x), 8), value), d)
                assert bool((y == 2 * value).all()), f"combine, rank {who} late at each {event!r}"
    comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_changes_no_replay(pools: Pools, world_size: int) -> None:
    for event in ("wait", "read", "signal"):
        pools(world_size).run(replayed, f"replayed, {event}", event)


def replayed_without(rank: int, step: str) -> None:
    with mock.patch.object(Call, step, nothing):
        replayed(rank, f"replayed without {step}")


def late_without(rank: int, step: str) -> None:
    with mock.patch.object(Call, step, nothing):
        late(rank, ["signal"], True, f"late without {step}")


def test_a_forgotten_wait_for_the_reader_is_found(pools: Pools) -> None:
    with pytest.raises(RankError, match="late at each 'wait'"):
        pools(3).run(replayed_without, "await_reader")


def test_a_forgotten_wait_for_data_is_found(pools: Pools) -> None:
    """Be it that the table is not the others', or rows are not there yet."""
    with pytest.raises(RankError, match="late at each 'signal'|ranks disagree"):
        pools(3).run(late_without, "wait")


def reproducible(rank: int) -> list[str]:
    """The bits of results, with one rank late at each of its signals, and without."""
    world_size, found = dist.get_world_size(), []
    case = Case("moe_ffn", (900, 300), k=3, experts=5, hidden=64, dtype=torch.bfloat16)
    problem = Problem.of(case, world_size)
    for who in (None, *range(world_size)):
        with nullcontext() if who is None else straggler(who, "signal", 0.002):
            results = call(case, problem, rank, world_size).results()
        bits = [str(hash(t.contiguous().view(torch.uint8).numpy().tobytes()))
                for t in results.values()]  # fmt: skip
        found.append(" ".join(bits))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_do_not_depend_on_who_is_early(pools: Pools, world_size: int) -> None:
    for found in pools(world_size).run(reproducible):
        assert len(set(found)) == 1


def spans_before(rank: int) -> list[str]:
    """Work of rank 0, in order, when rank 1 is late with its rows for expert 0."""
    comm = fc.Communicator.of()
    x = torch.ones(6, 8)
    w13, w2 = torch.ones(int(rank == 0), 8, 8), torch.ones(int(rank == 0), 8, 4)
    ids, owners = torch.zeros(6, 1, dtype=torch.int64), [0]
    arguments = (x, ids, None, w13, w2)
    fc.moe_ffn(*arguments, num_experts=1, placement=owners)
    comm.barrier()
    number = 2  # of rank 1's writes: its counts come first, and are not late
    with (
        mock.patch.object(units, "UNIT_ROWS", 1),
        fc.trace() as recorded,
        straggler(1, "write", 0.3, nth=number) if rank else nullcontext(),
    ):
        fc.moe_ffn(*arguments, num_experts=1, placement=owners)
    return [f"{event.kind} {event.name}" for event in recorded.events]


def test_experts_begin_with_who_is_early(pools: Pools) -> None:
    """Rank 2's rows, behind rank 1's, are multiplied while rank 1 is late."""
    found = pools(3).run(spans_before)[0]
    order = [name for name in found if "expert 0" in name]
    assert order == [f"gemm expert 0, rows {rows}" for rows in ("0:6", "12:18", "6:12")], found


def arrows(rank: int) -> tuple[int, int]:
    """Waits in the timeline of all ranks, and how many of them have their signal in it."""
    case = Case("moe_ffn", (30, 12), experts=5)
    problem = Problem.of(case, dist.get_world_size())
    with fc.trace() as recorded:
        call(case, problem, rank, dist.get_world_size())
    events = recorded.gather().events
    signals = {event.info["signal"] for event in events if "signal" in event.info}
    waits = [event.info["awaits"] for event in events if "awaits" in event.info]
    return len(waits), sum(wait in signals for wait in waits)


def test_the_timeline_ties_waits_to_signals(pools: Pools) -> None:
    for waits, tied in pools(3).run(arrows):
        assert waits == tied and waits > 20
