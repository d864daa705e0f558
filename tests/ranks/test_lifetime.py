"""What a communicator takes it gives back: descriptors, mappings, sockets, memory."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    OPS,
    assert_works,
    before,
    call,
    die,
    held,
    mappings,
    refusal,
    right,
    see,
)


def private_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0])


def sockets_of_this_process() -> set[str]:
    """Names of its abstract sockets, in the kernel's table of all."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {row[7] for row in table if len(row) > 7 and f"socket:[{row[6]}]" in own}
    return {name for name in named if "fusedcomm" in name}


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def close_all(rank: int) -> None:
    before = held()
    comm = fc.Communicator.of()
    for form in OPS:
        y = call(form, comm)
        assert right(form, comm, y)
    tensor = comm.symmetric_empty(1000)
    assert len(mappings()) >= 3 * comm.world_size
    comm.close()
    # A symmetric tensor keeps its memory, the closed communicator its own control block, and a
    # result nothing.
    assert tensor.local.fill_(1.0).sum() == 1000
    files, sizes = held()
    assert files == before[0] and sizes[:3] == [4096] * 3 and len(sizes) <= 4
    del tensor
    assert len(held()[1]) <= 1
    del comm
    assert held() == before
    assert y.sum() > 0


def test_close_gives_everything_back(pools: Pools) -> None:
    pools(3).run(close_all)


def grow(rank: int) -> None:
    with fc.Communicator.of() as comm:
        for scale in (1, 50, 500, 5000):
            call("all_gather_linear", comm, scale=scale)
            call("linear_reduce_scatter", comm, scale=scale)
        comm.barrier()
        sizes = comm.workspace_bytes()
        expected = [sum(sizes[kind].values()) for kind in ("gather", "scatter")]
        blocks = [size for size in mappings() if size < min(expected)]
        assert len(blocks) == comm.world_size  # the control blocks
        assert mappings() == sorted(blocks + [_pages(size) for size in expected] * comm.world_size)


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096


def test_growth_releases_the_old_memory(pools: Pools) -> None:
    pools(3).run(grow)


def many_cycles(rank: int, cycles: int, calls: int) -> dict[str, Any]:
    """Communicators in a row, then calls in a row; what the second half of each has left."""
    found: dict[str, Any] = {}
    for what in ("cycles", "calls"):
        count = cycles if what == "cycles" else calls
        comm = fc.Communicator.of()
        for number in range(count):
            if number == count // 2:
                start, memory = held(), private_bytes()
            if what == "cycles":
                comm.close()
                comm = fc.Communicator.of()
            call("all_gather_linear", comm)
            if number % 10 == 0:
                call("all_gather_linear, in place", comm)
                call("linear_reduce_scatter", comm)
        comm.barrier()
        found[what] = (held() == start, private_bytes() - memory)
        comm.close()
    return found


def test_many_communicators_and_calls_leave_nothing(pools: Pools) -> None:
    for found in pools(3).run(many_cycles, 200, 500, timeout_s=120):
        for what, (same, more) in found.items():
            assert same, what
            assert more < 1 << 20, (what, more)  # 10 KB for each communicator


def fail_and_close(rank: int, how: str) -> tuple[Any, ...]:
    before = held()
    error, names = _fail(rank, how)
    after = held()
    return error, names, after == before, (before, after)


def _fail(rank: int, how: str) -> tuple[str, set[str]]:
    with fc.Communicator.of(timeout_s=20) as comm:
        names = sockets_of_this_process()
        call("linear_reduce_scatter", comm)

        def work() -> None:
            if how == "disagree":
                call("all_gather_linear", comm, scale=5000 if rank == 1 else 1)
            elif how == "grow without it":
                call("all_gather_linear", comm, scale=5000)
            else:
                for _ in range(3):
                    call("linear_reduce_scatter", comm)

        if rank == 1 and how == "killed":
            time.sleep(0.2)  # for all others to have told their sockets' names
            die()
        if rank == 1 and how == "grow without it":
            return "", names
        return see(comm, work).error, names


@pytest.mark.parametrize("how", ["killed", "disagree", "grow without it"])
def test_a_failure_leaves_nothing_behind(pools: Pools, how: str) -> None:
    outcomes = pools(3).outcomes(fail_and_close, how, timeout_s=40)
    names = set()
    for outcome in outcomes:
        if how == "killed" and outcome.rank == 1:
            assert outcome.fate == "died"
            continue
        error, own_names, same, both = outcome.value
        assert same, both
        assert error or how == "grow without it" and outcome.rank == 1
        names |= own_names
    assert names  # the connections of a communicator can be seen there, while it is open
    table = Path("/proc/net/unix").read_text()
    assert not [name for name in names if name in table]
    assert not [entry for entry in os.listdir("/dev/shm") if "fusedcomm" in entry]


def use_after_close(rank: int) -> dict[str, str]:
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    comm = fc.Communicator.of()
    loss = fc.all_gather_linear(x, weight, group=comm).sum()
    comm.barrier()
    comm.close()
    comm.close()
    comm.abort("too late, and harmless")
    assert comm not in fc.Communicator.live()
    uses: dict[str, Callable[[], object]] = {
        "barrier": comm.barrier,
        "symmetric_empty": lambda: comm.symmetric_empty(3),
        "reserve": lambda: comm.reserve("all_gather_linear", (8, 8)),
        "backward": loss.backward,
        **{form: lambda form=form: call(form, comm) for form in OPS},
        "plain": lambda: call("all_gather_linear", comm, engine="plain"),
        "replicated_linear": lambda: fc.replicated_linear(x, weight, group=comm),
    }
    found = {}
    for name, use in uses.items():
        try:
            use()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with fc.Communicator.of() as again:
        assert again is not comm
        for form in OPS:
            assert right(form, again, call(form, again))
    return found


def test_use_after_close(pools: Pools) -> None:
    for found in pools(2).run(use_after_close, timeout_s=40):
        for name, what in found.items():
            assert re.match(r"ClosedError: this communicator was closed.*of\(group", what), name


def reopen_while_closing(rank: int) -> None:
    """One thread is still closing it when another has seen that it is closed."""
    comm = fc.Communicator.of()
    before(comm._watch.links, "close", partial(time.sleep, 0.3))
    thread = threading.Thread(target=comm.close)
    thread.start()
    while not refusal(comm):
        time.sleep(0)
    with fc.Communicator.of() as again:
        assert again is not comm
        assert_works(again)
        thread.join()
        assert fc.Communicator.of() is again


def test_a_closing_communicator_is_not_handed_out(pools: Pools) -> None:
    pools(1).run(reopen_while_closing)


def backward_elsewhere(rank: int) -> None:
    """A backward pass may run in a thread that the communicator does not belong to."""
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    with fc.Communicator.of() as comm:
        for _ in range(5):
            loss = fc.all_gather_linear(x, weight, group=comm).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert x.grad is not None and weight.grad is not None
        assert (x.grad == 5 * 6 * comm.world_size).all()
        assert (weight.grad == 5 * 4 * comm.world_size).all()


def test_backward_in_another_thread(pools: Pools) -> None:
    pools(2).run(backward_elsewhere)


def fork_within(rank: int) -> list[int]:
    """What a forked child can do to its parent's communicator: nothing."""
    codes = []
    with fc.Communicator.of(timeout_s=20) as comm:
        for form in OPS:
            call(form, comm)
        for use in (comm.barrier, comm.close, lambda: comm.abort("by a child"), fc.Communicator.of):
            child = os.fork()
            if child == 0:
                try:
                    use()
                    os._exit(0)
                except fc.ClosedError:
                    os._exit(3)
                except BaseException:
                    os._exit(4)
            _, status = os.waitpid(child, 0)
            codes.append(os.waitstatus_to_exitcode(status))
            for form in OPS:
                assert right(form, comm, call(form, comm))
    return codes


def test_a_forked_child_cannot_act_as_its_parent(pools: Pools) -> None:
    for barrier, close, _, _ in pools(2).run(fork_within, timeout_s=60):
        assert barrier == 3  # ClosedError
        assert close == 0


def replace_the_default_group(rank: int, path: str) -> None:
    first = fc.Communicator.of()
    call("all_gather_linear", first)
    first.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    second = fc.Communicator.of()
    assert second is not first
    for form in OPS:
        assert right(form, second, call(form, second))
    second.barrier()
    dist.destroy_process_group()
    second.close()  # also when its group is gone
    assert not fc.Communicator.live()
    del first, second
    assert held()[1] == []


def test_another_group_of_the_same_name(pools: Pools, tmp_path: Path) -> None:
    pool = pools(2)
    try:
        pool.run(replace_the_default_group, str(tmp_path / "store"), timeout_s=40)
    finally:
        pool.restart()
