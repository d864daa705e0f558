"""A rank is lost: all others are told in bounded time which one, whatever it was doing.

The design allows 2 s from the death to the error. The limit here is for a machine with too much
else to do; the times are recorded (``--junitxml``).
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm import waiting
from fusedcomm.communicator.torch_calls import TorchCalls
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from fusedcomm.testing import disturb
from fusedcomm.testing.disturb import EVENTS
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    OPS,
    Record,
    Seen,
    assert_lost,
    before,
    call,
    die,
    right,
    see,
    survivors,
)


def die_at(rank: int, form: str, event: str, nth: int, victim: int) -> Seen:
    """Two good calls; then some more, in which the victim dies at the event's nth occurrence."""
    comm = fc.Communicator.of()
    for _ in range(2):
        assert right(form, comm, call(form, comm))

    def calls() -> None:
        with disturb(victim, event, die, nth=nth):
            for _ in range(5):  # a survivor may finish those that need nothing more of the victim
                assert right(form, comm, call(form, comm))

    return see(comm, calls)


WITHIN = [
    (form, event, world_size, victim, nth)
    for form in OPS
    for event in EVENTS
    for world_size, victim, nth in ((3, 1, 1), (2, 0, 0), (3, 2, 2))
    if not (event == "write" and form.endswith("in place"))  # nothing is written there
    and (nth != 0 or not form.endswith(("in place", "chunked")))  # the steps of the others
    and (nth != 2 or form.endswith("two-shot"))  # the form with the most steps
]


@pytest.mark.parametrize(("form", "event", "world_size", "victim", "nth"), WITHIN)
def test_death_within_a_call(
    pools: Pools,
    record_property: Record,
    form: str,
    event: str,
    world_size: int,
    victim: int,
    nth: int,
) -> None:
    outcomes = pools(world_size).outcomes(die_at, form, event, nth, victim, timeout_s=30)
    # In place, what a survivor comes to wait for may be the allocation before the next call.
    op = "rank" if form.endswith("in place") else OPS[form]
    assert_lost(survivors(outcomes, victim, record_property), victim, op)


def die_before(rank: int, form: str, engine: str, good_calls: int, victim: int) -> Seen:
    comm = fc.Communicator.of()
    for _ in range(good_calls):
        call(form, comm, engine=engine)
    if rank == victim:
        die()

    def calls() -> None:
        for _ in range(5):
            call(form, comm, engine=engine)

    return see(comm, calls)


@pytest.mark.parametrize("engine", ["host", "plain"])
@pytest.mark.parametrize("good_calls", [0, 3])
@pytest.mark.parametrize(
    "form", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce, two-shot"]
)
def test_death_between_calls(
    pools: Pools,
    record_property: Record,
    form: str,
    good_calls: int,
    engine: str,
) -> None:
    outcomes = pools(3).outcomes(die_before, form, engine, good_calls, 1, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, OPS[form])


def die_in_gloo(rank: int, form: str, point: str, victim: int) -> Seen:
    """The victim has announced its call, and dies before or while torch's collective runs."""
    comm = fc.Communicator.of()
    call(form, comm, engine="plain")
    comm.barrier()  # who has left this needs nothing more of the victim
    if rank == victim:
        if point == "before torch's part":
            before(TorchCalls, "run", die)
        else:
            before(waiting.Watch, "await_work", die)
    return see(comm, lambda: [call(form, comm, engine="plain") for _ in range(3)])


@pytest.mark.parametrize("point", ["before torch's part", "within torch's part"])
@pytest.mark.parametrize(
    "form", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce, two-shot"]
)
def test_death_within_a_plain_call(
    pools: Pools, record_property: Record, form: str, point: str
) -> None:
    outcomes = pools(3).outcomes(die_in_gloo, form, point, 1, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, OPS[form])


def die_in_backward(rank: int, event: str, victim: int) -> Seen:
    """A step of a sequence-parallel block: gather, scatter, and both in the backward pass."""
    comm = fc.Communicator.of()
    x = torch.ones(4, 8, requires_grad=True)
    up, down = torch.ones(6, 8, requires_grad=True), torch.ones(8, 6, requires_grad=True)

    def step() -> None:
        y = fc.linear_reduce_scatter(fc.all_gather_linear(x, up, group=comm), down, group=comm)
        with disturb(victim, event, die, nth=1):
            y.sum().backward()

    return see(comm, lambda: [step() for _ in range(3)])


@pytest.mark.parametrize("event", ["begin", "signal", "consumed"])
def test_death_within_a_backward_pass(pools: Pools, record_property: Record, event: str) -> None:
    outcomes = pools(3).outcomes(die_in_backward, event, 2, timeout_s=30)
    assert_lost(survivors(outcomes, 2, record_property), 2, "linear_reduce_scatter")


def die_at_barrier(rank: int, where: str, victim: int) -> Seen:
    comm = fc.Communicator.of()
    comm.barrier()
    if rank == victim:
        if where == "before":
            die()
        # It has told some or all that it is there, and does not wait for them.
        before(waiting.Watch, "wait", die)

    def barriers() -> None:
        for _ in range(2):
            comm.barrier()

    return see(comm, barriers)


@pytest.mark.parametrize("where", ["before", "within"])
def test_death_at_a_barrier(pools: Pools, record_property: Record, where: str) -> None:
    outcomes = pools(3).outcomes(die_at_barrier, where, 0, timeout_s=30)
    assert_lost(survivors(outcomes, 0, record_property), 0, "barrier")


ALLOCATION = {
    "as it allocates": (Segment, "create", 0),
    "before it sends": (Links, "send", 0),
    "between two sends": (Links, "send", 1),
    "before it receives": (Links, "receive", 0),
    "between two receives": (Links, "receive", 1),
}


def die_in_allocation(rank: int, what: str, point: str, victim: int) -> Seen:
    comm = fc.Communicator.of()
    call("all_gather_linear", comm)
    if rank == victim:
        owner, name, nth = ALLOCATION[point]
        before(owner, name, die, nth)

    def work() -> None:
        if what == "symmetric_empty":
            comm.symmetric_empty(1000)
            comm.barrier()
        else:
            call("all_gather_linear", comm, scale=10000)

    return see(comm, work)


@pytest.mark.parametrize("point", ALLOCATION)
@pytest.mark.parametrize("what", ["symmetric_empty", "growth"])
def test_death_in_an_allocation(
    pools: Pools, record_property: Record, what: str, point: str
) -> None:
    outcomes = pools(3).outcomes(die_in_allocation, what, point, 1, timeout_s=30)
    op = "symmetric" if what == "symmetric_empty" else "all_gather_linear"
    seen = survivors(outcomes, 1, record_property)
    if what == "symmetric_empty" and point == "between two receives":
        # It had sent all; who needs nothing more of it finishes, and fails at the barrier.
        assert {one.error for one in seen} == {"PeerLostError"}
    else:
        assert_lost(seen, 1, op)


def lose_two(rank: int) -> Seen:
    """Two die, one after the other; whoever is waited for, all survivors hear of one of them."""
    comm = fc.Communicator.of()
    call("all_gather_linear", comm)
    if rank in (1, 2):
        threading.Timer(0.02 * rank, die).start()
    return see(comm, lambda: [call("all_gather_linear", comm) for _ in range(1 << 30)])


def test_two_deaths(pools: Pools) -> None:
    outcomes = pools(4).outcomes(lose_two, timeout_s=30)
    for rank in (0, 3):
        seen = outcomes[rank].value
        assert seen.error == "PeerLostError", seen
        assert "rank 1 died" in seen.message or "rank 2 died" in seen.message


def lose_one_of_another_group(rank: int) -> Seen | None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comm = fc.Communicator.of(pairs[rank // 2])
    comm.barrier()
    if rank == 3:
        die()
    seen = see(comm, lambda: [call("linear_reduce_scatter", comm) for _ in range(200)])
    if rank < 2:
        time.sleep(0.2)
        assert right("all_gather_linear", comm, call("all_gather_linear", comm))
    return seen


def test_death_in_another_group_is_no_fault(pools: Pools) -> None:
    outcomes = pools(4).outcomes(lose_one_of_another_group, timeout_s=30)
    assert outcomes[0].value.error == outcomes[1].value.error == ""
    # Ranks are numbered within the group.
    assert_lost([outcomes[2].value], 1, "linear_reduce_scatter")
