"""What runs the checks on GPUs, on CPU ranks: a check that fails or dies spoils no other result."""

from __future__ import annotations

import os
import time

import torch

import fusedcomm as fc
from tests.gpu.running import Result, run


def sums(rank: int, world_size: int) -> None:
    comm = fc.Communicator.of(timeout_s=20.0)
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    assert fc.all_gather_linear(x, weight, group=comm).sum() == 4 * world_size * 6 * 8


def raises_on_one_rank(rank: int, world_size: int) -> None:
    """The other one waits for it."""
    if rank == 1:
        raise AssertionError("one is two")
    sums(rank, world_size)


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    sums(rank, world_size)


def sleeps(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_a_failure_is_told_and_the_next_check_runs() -> None:
    told: list[Result] = []
    checks = {"first": sums, "fails": raises_on_one_rank, "next": sums}
    found = run(checks, 2, devices=0, timeout_s=100, on_result=told.append)
    assert found == told and [result.name for result in found] == list(checks)
    assert [bool(result.problem) for result in found] == [False, True, False]
    assert "rank 1" in found[1].problem and "one is two" in found[1].problem


def test_a_death_ends_the_run_and_keeps_what_was_found() -> None:
    found = run({"first": sums, "dies": dies, "next": sums}, 2, devices=0, timeout_s=100)
    assert not found[0].problem
    assert "exit code 3" in found[1].problem
    assert found[2].problem == "was not reached"


def test_time_is_limited() -> None:
    start = time.monotonic()
    found = run({"sleeps": sleeps}, 1, devices=0, timeout_s=5)
    assert "had not finished" in found[0].problem and time.monotonic() - start < 40
