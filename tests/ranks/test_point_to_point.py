"""Messages between pairs of ranks: any size, in order, exchanged, and what goes wrong."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.pairs import BUFFER_BYTES, PART_BYTES, PARTS
from tests.conftest import Pools
from tests.ranks.collective_calls import draw
from tests.ranks.fault_calls import (
    Record,
    Seen,
    assert_lost,
    assert_told,
    die,
    see,
    survivors,
)

LARGE = BUFFER_BYTES // 4 * 3  # float32 elements: three times the buffer

SIZES = (0, 1, 7, PART_BYTES, PART_BYTES // 4 - 1, BUFFER_BYTES // 4, LARGE + 3)


def exchange(rank: int, engine: str, first_epoch: int = 0) -> None:
    """Every ordered pair, one after the other, every size and many dtypes, in order."""
    with fc.Communicator.of(channel=f"exchange {engine}") as comm:
        comm.memory.first_epoch = first_epoch
        for sender in range(comm.world_size):
            for receiver in range(comm.world_size):
                if sender == receiver or rank not in (sender, receiver):
                    continue
                for number, size in enumerate(SIZES):
                    one_way(comm, sender, receiver, number, (size,), torch.float32, engine)
                for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64):
                    one_way(comm, sender, receiver, 0, (3, 5), dtype, engine)
                one_way(comm, sender, receiver, 1, (), torch.float64, engine)
        comm.barrier()


def one_way(comm, sender, receiver, number, shape, dtype, engine) -> None:
    values = draw((sender, receiver, number, shape), shape, torch.float32).to(dtype)
    if comm.rank == sender:
        x = values.clone()
        fc.send(x, receiver, group=comm, engine=engine)
        x.fill_(1)  # It may be used again at once.
    else:
        x = torch.zeros(shape, dtype=dtype)
        assert fc.recv(x, sender, group=comm, engine=engine) is x
        assert torch.equal(x, values), (sender, receiver, number, shape, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_every_pair(pools: Pools, world_size: int, engine: str) -> None:
    pools(world_size).run(exchange, engine)


def test_counters_wrap_around(pools: Pools) -> None:
    pools(2).run(exchange, "host", 2**31 - 3)


def strided_tensors(rank: int) -> None:
    base = torch.arange(40.0).view(8, 5)
    if rank == 0:
        fc.send(base.t(), 1)
        fc.send(base[::2, 1], 1)
    else:
        x = torch.zeros(8, 10)[:, ::2].t()
        assert torch.equal(fc.recv(x, 0), base.t()) and torch.equal(x, base.t())
        assert torch.equal(fc.recv(torch.zeros(4, 5)[:, 0], 0), base[::2, 1])


def test_strided_tensors(pools: Pools) -> None:
    pools(2).run(strided_tensors)


def views_with_something_left_to_do(rank: int, engine: str) -> None:
    """Conjugate and negative views hold other bytes than they show."""
    waves = torch.complex(torch.arange(6.0), torch.ones(6))
    with fc.Communicator.of(channel=f"conjugates {engine}") as comm:
        named = {"group": comm, "engine": engine}
        if rank == 0:
            fc.send(waves.conj(), 1, **named)
            fc.send(waves.conj().imag, 1, **named)
            fc.send(waves, 1, **named)
        else:
            assert torch.equal(fc.recv(torch.zeros_like(waves), 0, **named), waves.conj())
            assert torch.equal(fc.recv(torch.zeros(6), 0, **named), -waves.imag)
            assert torch.equal(fc.recv(torch.zeros_like(waves).conj(), 0, **named), waves)


@pytest.mark.parametrize("engine", ["host", "plain"])
def test_views_with_something_left_to_do(pools: Pools, engine: str) -> None:
    pools(2).run(views_with_something_left_to_do, engine)


def without_waiting(rank: int, engine: str) -> None:
    """Handles, in an order other than begun; larger than the buffer in both directions."""
    peer = 1 - rank
    with fc.Communicator.of(channel=f"handles {engine}") as comm:
        named = {"group": comm, "engine": engine}
        mine = [torch.full((LARGE + i,), 10.0 * rank + i) for i in range(2)]
        theirs = [torch.zeros(LARGE + i) for i in range(2)]
        sends = [fc.isend(x, peer, **named) for x in mine]
        receives = [fc.irecv(x, peer, **named) for x in theirs]
        if engine == "host":
            # Transfers go on in any other wait.
            assert fc.all_reduce(torch.ones(3), group=comm)[0] == 2
        for handle in (*receives[::-1], *sends):
            assert handle.wait() is not None
            assert handle.done
        for i, x in enumerate(theirs):
            assert (x == 10.0 * peer + i).all()
        comm.barrier()


@pytest.mark.parametrize("engine", ["host", "plain"])
def test_handles(pools: Pools, engine: str) -> None:
    pools(2).run(without_waiting, engine)


def a_ring_of_exchanges(rank: int, engine: str) -> None:
    """Everyone sends large messages to both neighbours and receives from both, several times."""
    with fc.Communicator.of(channel=f"ring {engine}") as comm:
        n = comm.world_size
        after, before = (rank + 1) % n, (rank - 1) % n
        for turn in range(3):
            x = torch.full((LARGE,), float(100 * turn + rank))
            y = torch.full((5, 2), float(100 * turn + rank) + 0.5)
            got = fc.batch_send_recv(
                [
                    ("send", x, after),
                    ("send", y, after),
                    ("recv", torch.empty(LARGE), before),
                    ("send", y, before),
                    ("recv", torch.empty(5, 2), before),
                    ("recv", torch.empty(5, 2), after),
                ],
                group=comm,
                engine=engine,
            )
            expected = [before, before + 0.5, after + 0.5]
            for tensor, value in zip(got, expected, strict=True):
                assert (tensor == 100 * turn + value).all()
        comm.barrier()


@pytest.mark.parametrize("world_size", [3, 4])
def test_batches(pools: Pools, world_size: int) -> None:
    pools(world_size).run(a_ring_of_exchanges, "host")


def test_batches_on_torch(pools: Pools) -> None:
    pools(3).run(a_ring_of_exchanges, "plain")


def many_small(rank: int) -> None:
    """As many messages as the buffer has parts can be sent before the receiver comes."""
    with fc.Communicator.of(channel="small") as comm:
        if rank == 0:
            for i in range(PARTS):
                fc.send(torch.tensor([float(i)]), 1, group=comm)
            comm.barrier()
        else:
            comm.barrier()
            for i in range(PARTS):
                assert fc.recv(torch.zeros(1), 0, group=comm) == i
        comm.barrier()


def test_small_messages_do_not_wait(pools: Pools) -> None:
    pools(2).run(many_small)


def mixed_with_calls(rank: int) -> None:
    """A first message lies unread while all ranks allocate; collectives and messages mix."""
    with fc.Communicator.of(channel="mixed") as comm:
        if rank == 0:
            fc.send(torch.ones(3), 1, group=comm)
        elif rank == 2:
            handle = fc.irecv(torch.zeros(4), 1, group=comm)
        tensor = comm.symmetric_empty(5)
        assert fc.all_reduce(torch.ones(70000), group=comm)[-1] == comm.world_size
        if rank == 1:
            assert torch.equal(fc.recv(torch.zeros(3), 0, group=comm), torch.ones(3))
            fc.send(torch.ones(4), 2, group=comm)
        elif rank == 2:
            assert torch.equal(handle.wait(), torch.ones(4))
        comm.barrier()
        del tensor


def test_messages_among_calls(pools: Pools) -> None:
    pools(3).run(mixed_with_calls)


def in_a_group(rank: int) -> None:
    group = dist.new_group([3, 1])
    if rank in (1, 3):
        x = torch.tensor([5.0])
        # Group ranks: 0 is the first of the sorted members.
        mine = dist.get_rank(group)
        if mine == 0:
            fc.send(x, 1, group=group)
        else:
            assert fc.recv(torch.zeros(1), 0, group=group) == 5
    dist.barrier()


def test_ranks_are_the_groups(pools: Pools) -> None:
    pools(4).run(in_a_group)


# Faults


def wrong_arguments(rank: int) -> None:
    x = torch.ones(3)
    for call, words in (
        (lambda: fc.send(x, rank), "this rank itself"),
        (lambda: fc.send(x, 7), "dst must be a rank of the group, 0 to 1"),
        (lambda: fc.recv(x, -1), "src must be a rank of the group, 0 to 1"),
        (lambda: fc.send([1.0], 1 - rank), "x must be a tensor; got list"),
        (lambda: fc.send(x.requires_grad_(), 1 - rank), "no gradient"),
        (lambda: fc.recv(torch.ones(1).expand(3), 1 - rank), "expanded"),
        (lambda: fc.batch_send_recv([("send", x)]), r"messages\[0\] must be"),
        (lambda: fc.batch_send_recv([("put", x, 1)]), r"messages\[0\] must be"),
        (lambda: fc.isend(x.detach(), 1 - rank, engine="nccl"), "engine must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    comm = fc.Communicator.of()
    comm.barrier()  # It is still usable.


def test_wrong_arguments(pools: Pools) -> None:
    pools(2).run(wrong_arguments)


def faulty(rank: int, kind: str) -> Seen:
    comm = fc.Communicator.of(channel=f"faulty {kind}", timeout_s=60)
    small, large = torch.ones(4), torch.ones(LARGE)
    peer = (rank + 1) % comm.world_size
    before = (rank - 1) % comm.world_size
    works = {
        "shapes": lambda: (
            fc.send(small, 1, group=comm) or fc.recv(small, 1, group=comm)
            if rank == 0
            else fc.recv(torch.ones(5), 0, group=comm)
        ),
        "dtypes": lambda: (
            fc.send(small, 1, group=comm) or fc.recv(small, 1, group=comm)
            if rank == 0
            else fc.recv(torch.ones(4).bfloat16(), 0, group=comm)
        ),
        "both send": lambda: (
            fc.send(large, peer, group=comm),
            fc.recv(large, before, group=comm),
        ),
        "both receive": lambda: (
            fc.recv(small, before, group=comm),
            fc.send(small, peer, group=comm),
        ),
        "a call": lambda: (
            fc.recv(small, 1, group=comm) if rank == 0 else fc.all_reduce(small, group=comm)
        ),
    }
    comm.barrier()
    seen = see(comm, works[kind])
    comm.close()
    return seen


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shapes", ("sends [torch.float32 [4]] to rank 1", "receives [torch.float32 [5]]")),
        ("dtypes", ("torch.float32", "torch.bfloat16")),
        ("both send", ("rank 0 in send for rank 1", "rank 1 in send for rank 0", "2 MiB")),
        ("both receive", ("rank 0 in recv for rank 1", "rank 1 in recv for rank 0")),
        ("a call", ("rank 0 in recv for rank 1", "rank 1 in a call of all ranks for rank 0")),
    ],
)
def test_two_ranks_that_disagree(
    pools: Pools, kind: str, words: tuple[str, ...], record_property: Record
) -> None:
    start = time.monotonic()
    for seen in pools(2).run(faulty, kind):
        assert_told(seen, "MismatchError", *words)
    record_property("took_s", round(time.monotonic() - start, 2))


@pytest.mark.parametrize("kind", ["both send", "both receive"])
def test_a_circle_of_three(pools: Pools, kind: str) -> None:
    what = kind.replace("both ", "").replace("receive", "recv")
    step = 1 if what == "send" else -1
    words = [f"rank {r} in {what} for rank {(r + step) % 3}" for r in range(3)]
    for seen in pools(3).run(faulty, kind):
        assert_told(seen, "MismatchError", *words)


def late_but_not_stuck(rank: int) -> None:
    """A long wait in a chain that is no circle goes on."""
    with fc.Communicator.of(channel="late") as comm:
        if rank == 0:
            assert fc.recv(torch.zeros(1), 1, group=comm) == 1
        elif rank == 1:
            assert fc.recv(torch.zeros(1), 2, group=comm) == 2
            fc.send(torch.ones(1), 0, group=comm)
        else:
            time.sleep(0.7)
            fc.send(torch.full((1,), 2.0), 1, group=comm)
        comm.barrier()


def test_a_chain_is_no_circle(pools: Pools) -> None:
    pools(3).run(late_but_not_stuck)


def loses_a_peer(rank: int, sends: bool, engine: str) -> Seen:
    comm = fc.Communicator.of(channel="lossy", timeout_s=60)
    comm.barrier()
    if rank == 1:
        die()
    x = torch.ones(LARGE)
    act = partial(fc.send, x, 1) if sends else partial(fc.recv, x, 1)
    return see(comm, lambda: act(group=comm, engine=engine))


@pytest.mark.parametrize(("sends", "engine"), [(True, "host"), (False, "host"), (False, "plain")])
def test_a_peer_that_died(pools: Pools, sends: bool, engine: str, record_property: Record) -> None:
    outcomes = pools(2).outcomes(loses_a_peer, sends, engine, timeout_s=30)
    op = "point-to-point" if engine == "plain" else "send" if sends else "recv"
    assert_lost(survivors(outcomes, 1, record_property), 1, op)


def leaves_after_sending(rank: int) -> None:
    """What was sent arrives, though the sender has closed its communicator."""
    comm = fc.Communicator.of(channel="leaving")
    if rank == 0:
        fc.send(torch.arange(1000.0), 1, group=comm)
        comm.close()
    else:
        time.sleep(0.2)
        assert torch.equal(fc.recv(torch.zeros(1000), 0, group=comm), torch.arange(1000.0))
        comm.close()


def test_a_sender_that_left(pools: Pools) -> None:
    pools(2).run(leaves_after_sending)
