"""``launch``: results and events by value, failures named, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedcomm.ranks import Emit, RankError, launch
from tests.ranks.ctrl_c import HEARS_CTRL_C


def summed(rank: int, emit: Emit, size: int) -> tuple[torch.Tensor, int]:
    for step in range(3):
        emit((step, torch.full((2,), rank)))
    total = torch.full((size,), rank + 1)
    dist.all_reduce(total)
    return total, torch.get_num_threads()


def raising(rank: int, emit: Emit) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def dying(rank: int, emit: Emit) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleeping(rank: int, emit: Emit) -> None:
    emit(os.getpid())
    time.sleep(1000)


def test_results_and_events_come_back_by_value() -> None:
    events: dict[int, list[Any]] = {0: [], 1: []}
    results = launch(summed, 2, 4, on_event=lambda rank, event: events[rank].append(event))
    for total, threads in results:
        assert torch.equal(total, torch.full((4,), 3))
        assert threads == 1
    for rank, seen in events.items():
        assert [step for step, _ in seen] == [0, 1, 2]
        assert all(torch.equal(value, torch.full((2,), rank)) for _, value in seen)


@pytest.mark.parametrize(
    ("fn", "said"),
    [(raising, "raised ValueError: broken on purpose"), (dying, "was killed by SIGKILL")],
)
def test_a_failing_rank_is_named_first(fn: Callable[..., Any], said: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(fn, 2)
    assert caught.value.first.rank == 1
    assert f"rank 1, first: {said}" in str(caught.value)


def test_the_limit_ends_the_ranks() -> None:
    before = children()
    with pytest.raises(RankError, match="sleeping failed on 2 of 2 ranks"):
        launch(sleeping, 2, timeout_s=2)
    assert children() == before


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(ending: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group, as in a terminal; SIGKILL to the parent alone."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{HEARS_CTRL_C}"
        "from fusedcomm.ranks import launch\n"
        "from tests.ranks.test_launch import sleeping\n"
        "if __name__ == '__main__':\n"
        "    launch(sleeping, 2, on_event=lambda _, pid: print(pid, flush=True))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    if ending is signal.SIGINT:
        os.killpg(parent.pid, ending)
    else:
        parent.kill()
    _, errors = parent.communicate(timeout=20)
    assert parent.returncode in (-ending, 128 + ending)
    assert gone(pids)
    if ending is signal.SIGINT:
        assert errors.count("Traceback") == 1, errors  # the parent's own: the ranks are silent


def children() -> set[int]:
    """The processes that this one has started, zombies included."""
    stats = [stat.read_text() for stat in Path("/proc").glob("[0-9]*/stat") if stat.exists()]
    # pid (name) state parent ...; a name may hold anything.
    split = [(stat.split()[0], stat.rpartition(")")[2].split()[1]) for stat in stats]
    return {int(pid) for pid, parent in split if int(parent) == os.getpid()}


def gone(pids: list[int]) -> bool:
    """Whether all end within two seconds (zombies have: their new parent need not reap them)."""
    assert pids
    limit = time.monotonic() + 2
    while any(alive(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
