"""A communicator is being made, and a rank dies, fails, comes late, or is done with it at once."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm import between, place, rendezvous
from fusedcomm.communicator import cache
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    LIMIT_S,
    OPS,
    REASON,
    Record,
    Seen,
    assert_works,
    before,
    call,
    die,
    open_files,
    right,
    stumble,
    survivors,
)

CREATION = {
    "after its card": (rendezvous._Meeting, "_read_card", 0),
    "before a connection": (rendezvous, "open_connection", 0),
    "before another connection": (rendezvous, "open_connection", 1),
    "before it sends its block": (Links, "send", 0),
    "between two sends": (Links, "send", 1),
    "before it receives a block": (Links, "receive", 0),
    "before it maps a block": (Segment, "attach", 1),
}


UNSEEN = {
    "before all": (place.Place, "exchange", 0),
    "before its card": (rendezvous._Meeting, "run", 0),
}


def die_in_creation(rank: int, point: str, victim: int, timeout_s: float) -> Seen:
    descriptors = open_files()
    if rank == victim:
        owner, name, nth = {**CREATION, **UNSEEN}[point]
        before(owner, name, die, nth)
    try:
        comm = fc.Communicator.of(timeout_s=timeout_s)
        comm.barrier()
    except fc.FusedcommError as error:
        seen = Seen(type(error).__name__, str(error), time.monotonic_ns(), "")
    for open_one in fc.Communicator.live():
        open_one.close()
    assert open_files() == descriptors, (descriptors, open_files())
    return seen


MAKING = [
    (victim, point)
    for victim in (0, 1, 2)
    for point in CREATION
    # The ranks above connect to those below.
    if victim >= {"before a connection": 1, "before another connection": 2}.get(point, 0)
]


@pytest.mark.parametrize(("victim", "point"), MAKING)
def test_death_in_the_making_of_a_communicator(
    pools: Pools, record_property: Record, victim: int, point: str
) -> None:
    outcomes = pools(3).outcomes(die_in_creation, point, victim, 12.0, timeout_s=20)
    for one in survivors(outcomes, victim, record_property):
        assert one.error == "PeerLostError", one
        assert f"rank {victim}" in one.message, one


@pytest.mark.parametrize("point", UNSEEN)
def test_death_before_a_rank_is_known_is_a_timeout(
    pools: Pools, record_property: Record, point: str
) -> None:
    """Of a rank that never came, not even that it died can be known: the time limit holds."""
    outcomes = pools(3).outcomes(die_in_creation, point, 1, 1.0, timeout_s=30)
    for one in survivors(outcomes, 1, record_property):
        assert one.error == "PeerTimeoutError", one
        assert "rank 1" in one.message and "communicator" in one.message, one


FAILING = {
    "as it connects": (rendezvous, "open_connection", 0),
    "as it allocates its block": (Segment, "create", 0),
    "as it sends its block": (Links, "send", 1),
    "as it maps the first block": (Segment, "attach", 0),
    "as it maps the last block": (Segment, "attach", 1),
}


def fail_in_making(rank: int, point: str, error: type[BaseException]) -> str:
    """Who finds the fault later than in the making, finds it in the first call."""
    message = ""
    if rank == 1:
        owner, name, nth = FAILING[point]
        original = owner.__dict__[name]
        before(owner, name, partial(stumble, error), nth)
        with pytest.raises(error):
            fc.Communicator.of()
        setattr(owner, name, original)
    else:
        with pytest.raises(fc.AbortedError) as caught:
            fc.Communicator.of(timeout_s=20).barrier()
        message = str(caught.value)
        for comm in fc.Communicator.live():
            comm.close()
    dist.barrier()  # rank 1 does not try again before the others were told
    with fc.Communicator.of(timeout_s=20) as comm:
        assert_works(comm)
    return message


@pytest.mark.parametrize("error", [fc.SharedMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("point", FAILING)
def test_a_communicator_that_one_rank_cannot_make(
    pools: Pools, point: str, error: type[BaseException]
) -> None:
    results = pools(3).run(fail_in_making, point, error, timeout_s=60)
    for rank in (0, 2):
        assert all(word in results[rank] for word in ("rank 1", error.__name__, REASON))


def come_late(rank: int) -> list[str]:
    """The others give up before rank 1 comes; when all try again, they meet."""
    tries = []
    if rank == 1:
        time.sleep(1.0)
    limit_s = time.monotonic() + 20
    while time.monotonic() < limit_s:
        try:
            comm = fc.Communicator.of(timeout_s=0.3 if not tries and rank != 1 else 3.0)
            comm.barrier()
        except fc.FusedcommError as error:
            tries.append(type(error).__name__)
            for open_one in fc.Communicator.live():
                open_one.close()
            continue
        assert_works(comm)
        comm.close()
        return tries
    raise AssertionError(f"never met: {tries}")


def test_ranks_that_gave_up_meet_again(pools: Pools) -> None:
    results = pools(3).run(come_late, timeout_s=60)
    assert results[0][0] == results[2][0] == "PeerTimeoutError"


def close_at_once(rank: int, cycles: int) -> None:
    """A rank is done with one communicator, and at the next, while others still make the first."""
    generator = random.Random(rank)
    for _ in range(cycles):
        time.sleep(generator.choice([0.0, 0.0, 1e-3, 5e-3]))
        fc.Communicator.of(timeout_s=20).close()
    with fc.Communicator.of(timeout_s=20) as comm:
        for form in OPS:
            assert right(form, comm, call(form, comm))


def test_communicators_that_are_closed_at_once(pools: Pools) -> None:
    pools(3).run(close_at_once, 40, timeout_s=60)


def lose_the_store(rank: int) -> Seen:
    """The store that the group was made with lives in rank 0, as it does without torchrun."""
    port = [0]
    if rank == 0:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [master.port]
    dist.broadcast_object_list(port)
    limit = timedelta(seconds=20)
    store = master if rank == 0 else dist.TCPStore("127.0.0.1", port[0], timeout=limit)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=limit)
    comm = fc.Communicator.of()
    comm.barrier()
    if rank == 0:
        time.sleep(0.2)
        die()
    start = time.monotonic()
    while time.monotonic() < start + LIMIT_S:
        try:
            fc.Communicator.of(channel="another").barrier()
        except fc.PeerLostError as error:
            return Seen("PeerLostError", str(error), time.monotonic_ns(), "")
    raise AssertionError("rank 0 was not missed")


def test_the_rank_that_holds_the_store_dies(pools: Pools, record_property: Record) -> None:
    outcomes = pools(3).outcomes(lose_the_store, timeout_s=40)
    for rank in (1, 2):
        assert outcomes[rank].fate == "returned", outcomes[rank].details
        took = (outcomes[rank].value.at_ns - outcomes[0].at_ns) / 1e9
        record_property("noticed_s", round(took, 3))
        assert took < LIMIT_S


def kept(container: Mapping[Any, Any] | set[Any]) -> int:
    """How many entries a registry has, those of the registries in it included."""
    inner = container.values() if isinstance(container, Mapping) else ()
    return len(container) + sum(kept(each) for each in inner if isinstance(each, Mapping | set))


def all_kept() -> int:
    """As ``kept``, of all that this process remembers of communicators."""
    return sum(
        kept(value)
        for module in (rendezvous, cache, between)
        for value in vars(module).values()
        if isinstance(value, Mapping | set)
    )


def make_again_and_again(rank: int) -> None:
    sizes = []
    for _ in range(4):
        fc.Communicator.of().close()
        failing = mock.patch.object(Segment, "attach", side_effect=OSError(REASON))
        with failing if rank == 0 else nullcontext(), pytest.raises(fc.FusedcommError):
            fc.Communicator.of(timeout_s=20).barrier()  # the others are told, here or there
        for made in fc.Communicator.live():
            made.close()
        dist.barrier()
        sizes.append(all_kept())
    assert sizes[1:] == sizes[1:2] * 3, sizes


def test_nothing_is_kept_of_each_communicator(pools: Pools) -> None:
    pools(2).run(make_again_and_again)


def make_groups(rank: int, domains: list[list[int]] | None) -> None:
    gc.collect()
    descriptors, before_all = open_files(), all_kept()
    for number in range(3):
        group = dist.new_group(range(4))
        with fc.Communicator.of(group, topology=domains, channel=f"of group {number}") as comm:
            comm.barrier()
        dist.barrier()
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group, comm
        gc.collect()
        assert gone() is None
        assert all_kept() == before_all
    assert open_files() == descriptors


@pytest.mark.parametrize("domains", [None, [[0, 1], [2, 3]]])
def test_nothing_is_kept_of_a_group_that_was_destroyed(
    pools: Pools, domains: list[list[int]] | None
) -> None:
    pools(4).run(make_groups, domains)
