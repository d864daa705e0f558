"""Rank pools: what a call returns, and what is said when a rank raises, dies or hangs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.ranks.outcomes import RemoteError
from fusedcomm.testing import RankError, RankPool, run_ranks, straggler


@pytest.fixture(scope="module")
def own_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A pool for tests that look at its broken state, which ``pools`` would repair."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "imported_once.py").write_text("import os\nby = os.getpid()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with RankPool(3, preload=["imported_once"]) as pool:
            yield pool


@pytest.fixture
def pool(own_pool: RankPool) -> RankPool:
    if own_pool.broken is not None:
        own_pool.restart()
    return own_pool


# What a call is given and returns


def describe(rank: int) -> tuple[int, int, str, int]:
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), torch.get_num_threads()


def scaled(rank: int, x: torch.Tensor, factors: list[int]) -> dict[str, Any]:
    return {"rank": rank, "x": (x * factors[rank])[:1]}


def random_numbers(rank: int) -> list[float]:
    return torch.rand(3).tolist()


def identity(rank: int) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def subgroup_sums(rank: int) -> list[float]:
    outer = dist.new_group([0, 2])
    sums = []
    for group in (dist.group.WORLD, outer):
        x = torch.tensor([10.0**rank])
        if dist.get_rank(group) >= 0:
            dist.all_reduce(x, group=group)
        sums.append(x.item())
    dist.barrier()
    return sums


def environment_at_start(rank: int) -> bytes:
    return Path("/proc/self/environ").read_bytes()


def test_ranks_are_in_a_gloo_group_with_one_thread_each(pool: RankPool) -> None:
    assert pool.run(describe) == [(rank, 3, "gloo", 1) for rank in range(3)]


def test_arguments_and_results_pass_by_value(pool: RankPool) -> None:
    x = torch.arange(1.0, 5.0)
    results = pool.run(scaled, x, [2, 3, 4])
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["x"].tolist() for result in results] == [[2.0], [3.0], [4.0]]


def test_groups_can_be_made(pool: RankPool) -> None:
    assert pool.run(subgroup_sums) == [[111.0, 101.0], [111.0, 10.0], [111.0, 101.0]]


def test_random_numbers_are_the_same_at_every_call_and_rank(pool: RankPool) -> None:
    first = pool.run(random_numbers)
    assert first == pool.run(random_numbers)
    assert first[0] == first[1] == first[2]


def test_ranks_are_reused_and_replaced_on_restart(pool: RankPool) -> None:
    first = pool.run(identity)
    assert pool.run(identity) == first
    pool.restart()
    second = pool.run(identity)
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}
    assert {launcher for _, launcher in first} == {launcher for _, launcher in second}


def importer(rank: int) -> bool:
    return importlib.import_module("imported_once").by == os.getppid()


def test_ranks_share_what_was_imported_for_them(pool: RankPool) -> None:
    assert pool.run(importer) == [True] * 3
    pool.restart()
    assert pool.run(importer) == [True] * 3


def test_what_starts_a_thread_cannot_be_imported_for_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()\n"
    (tmp_path / "threaded.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="the process that starts the ranks ended with exit"):
        RankPool(1, preload=["threaded"])
    assert "importing threaded starts threads" in capfd.readouterr().err


def test_run_ranks_sets_the_environment_before_anything_is_imported() -> None:
    (environment,) = run_ranks(environment_at_start, 1, env={"FUSEDCOMM_TEST": "a b"})
    assert b"FUSEDCOMM_TEST=a b" in environment.split(b"\0")


def test_ranks_are_forked_from_a_process_with_one_thread(pool: RankPool) -> None:
    (_, launcher), *_ = pool.run(identity)
    assert len(os.listdir(f"/proc/{launcher}/task")) == 1


def test_functions_without_a_name_are_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="importable by name"):
        pool.run(lambda rank: rank)
    with pytest.raises(ValueError, match="arguments picklable"):
        pool.run(describe, threading.Lock())
    assert pool.broken is None


@pytest.mark.parametrize("world_size", [0, -1, 101])
def test_world_sizes_out_of_range_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size must be 1 to 100, got {world_size}"):
        RankPool(world_size)


# A rank raises


def raise_in_order(rank: int) -> int:
    if rank == 0:
        return 0
    time.sleep(0.3 * (2 - rank))  # rank 2 first
    return deepest(rank)


def deepest(rank: int) -> int:
    raise KeyError(f"of rank {rank}")


def wait_for_a_rank_that_raises(rank: int) -> None:
    comm = fc.Communicator.of()
    if rank == 1:
        raise ValueError("in user code")
    comm.barrier()


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("lock it")
        self.lock = threading.Lock()


def raise_unpicklable(rank: int) -> None:
    raise UnpicklableError


def return_unpicklable(rank: int) -> object:
    return threading.Lock()


def test_an_error_shows_every_traceback_the_first_one_first(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(raise_in_order)
    text = str(caught.value)
    assert "test_run_ranks.raise_in_order failed on 2 of 3 ranks" in text
    assert text.count("in deepest") == 2
    assert 0 < text.index("--- rank 2, first: raised KeyError") < text.index("--- rank 1, 0.")
    assert caught.value.first.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert [outcome.fate for outcome in caught.value.outcomes] == ["returned", "raised", "raised"]


def test_a_rank_that_raises_releases_those_that_wait_for_it(pool: RankPool) -> None:
    outcomes = pool.outcomes(wait_for_a_rank_that_raises, timeout_s=30)
    assert isinstance(outcomes[1].error, ValueError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, fc.errors.AbortedError)
        assert "rank 1 raised ValueError: in user code" in str(outcome.error)


def test_what_cannot_be_pickled_is_named(pool: RankPool) -> None:
    with pytest.raises(RankError, match="raised RemoteError: UnpicklableError: lock it") as caught:
        pool.run(raise_unpicklable)
    assert isinstance(caught.value.first.error, RemoteError)
    pool.restart()
    with pytest.raises(RankError, match="cannot pickle '_thread.lock'"):
        pool.run(return_unpicklable)


# A rank dies


def end(rank: int, how: Callable[[int], None], argument: int) -> int:
    if rank == 1:
        how(argument)
    return rank


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("how", "argument", "summary"),
    [
        (kill_self, signal.SIGKILL, "was killed by SIGKILL"),
        (kill_self, signal.SIGSEGV, "was killed by SIGSEGV"),
        (os._exit, 0, "ended its process with exit code 0"),
        (sys.exit, 3, "ended its process with exit code 3"),
    ],
)
def test_a_death_is_named(
    pool: RankPool, how: Callable[[int], None], argument: int, summary: str
) -> None:
    outcomes = pool.outcomes(end, how, argument)
    assert [outcome.fate for outcome in outcomes] == ["returned", "died", "returned"]
    assert outcomes[1].summary == summary
    assert [outcomes[0].value, outcomes[2].value] == [0, 2]
    pool.restart()
    with pytest.raises(RankError, match=f"--- rank 1, first: {summary}"):
        pool.run(end, how, argument)


def die_after_answering(rank: int) -> None:
    if rank == 2:
        threading.Timer(0.2, kill_self, [signal.SIGKILL]).start()


def test_a_death_between_calls_fails_the_next_call(pool: RankPool) -> None:
    pool.run(die_after_answering)
    time.sleep(0.5)
    with pytest.raises(RankError, match="--- rank 2, first: was killed by SIGKILL"):
        pool.run(identity)


def die_and_leave_a_child(rank: int) -> None:
    if rank == 0 and os.fork() > 0:
        kill_self(signal.SIGKILL)
    if rank == 0:
        time.sleep(6)  # the child, which holds the rank's channel open
        os._exit(0)


def test_a_death_is_noticed_though_a_child_lives_on(pool: RankPool) -> None:
    with pytest.raises(RankError, match="--- rank 0, first: was killed by SIGKILL"):
        pool.run(die_and_leave_a_child, timeout_s=5)


# A rank does not finish


def fall_asleep(rank: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def stop_self(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def raise_while_others_sleep(rank: int) -> None:
    if rank != 0:
        time.sleep(600)
    raise ValueError("alone")


def test_a_hang_ends_at_the_limit_and_shows_the_stacks(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fall_asleep, timeout_s=4)
    assert [outcome.fate for outcome in caught.value.outcomes] == [
        "returned",
        "unfinished",
        "returned",
    ]
    text = str(caught.value)
    assert "--- rank 1, first: had not finished" in text
    assert "in fall_asleep" in text


def test_a_stopped_rank_is_reported_and_removed(pool: RankPool) -> None:
    pids = [pid for pid, _ in pool.run(identity)]
    with pytest.raises(RankError, match="rank 1, first: had not finished\nit did not even write"):
        pool.run(stop_self, timeout_s=0.5)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_failure_shortens_the_wait_for_the_others(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedcomm.ranks.pool._SETTLE_S", 0.2)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(raise_while_others_sleep, timeout_s=60)
    assert time.monotonic() - started < 30
    assert caught.value.first.rank == 0
    assert [outcome.fate for outcome in caught.value.outcomes[1:]] == ["unfinished"] * 2


# A rank is late


def gather_with_a_straggler(rank: int) -> tuple[float, torch.Tensor]:
    started = time.monotonic()
    with straggler(1, "signal", 0.3):
        y = fc.all_gather_linear(torch.full((2, 3), rank + 1.0), torch.ones(1, 3))
    return time.monotonic() - started, y


def test_a_straggler_holds_up_those_that_need_its_data(pool: RankPool) -> None:
    for took, y in pool.run(gather_with_a_straggler):
        assert took >= 0.3
        assert y.flatten().tolist() == [3.0, 3.0, 6.0, 6.0, 9.0, 9.0]


# After a failure


def test_a_broken_pool_refuses_work_until_it_is_restarted(pool: RankPool) -> None:
    pids = [pid for pid, _ in pool.run(identity)]
    pool.outcomes(deepest)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RuntimeError, match=r"broken, restart\(\) it first: in .*, rank \d raised"):
        pool.run(identity)
    pool.restart()
    assert len(pool.run(identity)) == 3


def test_a_closed_pool_leaves_nothing_and_refuses_work() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    pool = RankPool(2)
    pids = {pid for pair in pool.run(identity) for pid in pair}
    pool.close()
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    for work in (lambda: pool.run(identity), pool.restart):
        with pytest.raises(RuntimeError, match="closed"):
            work()


def test_the_shared_fixture_renews_what_a_test_broke(pools: Callable[..., RankPool]) -> None:
    pool = pools(2)
    assert pools(2) is pool
    assert pools(2, FUSEDCOMM_TEST="1") is not pool
    pool.outcomes(deepest)
    assert pools(2) is pool
    pool.run(identity)
    pool.close()
    pools(2).run(identity)
