"""Channels: communicators of one group that share nothing, for calls and threads that mix."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.cases import OPS, Case
from tests.ranks.checking import check

CASES = [Case(op, (rows,)) for rows in (3, 40, 2, 0, 33) for op in OPS]


def check_channels(rank: int) -> None:
    """Calls on two channels, and the backward passes of each, in any mixture."""
    world_size = dist.get_world_size()
    comms = [fc.Communicator.of(channel=name) for name in ("one", "two")]
    assert comms[0] is not comms[1] and fc.Communicator.of(channel="one") is comms[0]
    assert repr(comms[0]) == (f"Communicator(rank={rank}, world_size={world_size}, channel='one')")
    for seed in range(4):
        w = [torch.randn(4, 6, requires_grad=True) for _ in comms]
        x = [torch.randn(5, 6, requires_grad=True) for _ in comms]
        ys = []
        for i in (0, 1):
            y = fc.all_gather_linear(x[i], w[i], group=comms[i])
            ys.append(fc.linear_reduce_scatter(y, torch.ones(3, 4), group=comms[i]))
        for i in (1, 0) if seed % 2 else (0, 1):
            ys[i].sum().backward()
        for i in (0, 1):
            alone = x[i].detach().requires_grad_()
            y = fc.all_gather_linear(alone, w[i].detach(), group=comms[1 - i])
            fc.linear_reduce_scatter(y, torch.ones(3, 4), group=comms[1 - i]).sum().backward()
            right = x[i].grad
            assert right is not None and alone.grad is not None
            assert torch.equal(right, alone.grad)
    for comm in comms:
        comm.close()


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; raise the first exception."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            for comm in fc.Communicator.live():
                comm.abort(f"a thread failed: {error}")

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def check_threads(rank: int) -> None:
    """Two threads with a channel each; each makes its own, in another order on every rank."""
    turns = [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        if (rank + number) % 2:
            turns[1 - number].wait(0.05)  # the other one first, if it comes
        turns[number].set()
        comm = fc.Communicator.of(channel=f"thread {number}", timeout_s=20)
        check(rank, CASES, comm)
        comm.close()

    in_threads(lambda: work(0), lambda: work(1))


def check_second_thread(rank: int) -> None:
    """A second thread is refused, and the communicator goes on."""
    comm = fc.Communicator.of(channel="owned")
    check(rank, CASES[:4], comm)
    x, w = torch.ones(2, 3), torch.ones(4, 3)

    def foreign() -> None:
        with pytest.raises(ValueError, match="belongs to another thread.*channel="):
            fc.all_gather_linear(x, w, group=comm)

    in_threads(foreign)
    check(rank, CASES[:4], comm)
    comm.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_channels_are_independent(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_channels)


def test_threads_with_a_channel_each(pools: Pools) -> None:
    pools(2).run(check_threads)


def test_a_second_thread_is_refused(pools: Pools) -> None:
    pools(2).run(check_second_thread)
