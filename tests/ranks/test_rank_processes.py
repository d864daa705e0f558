"""No process outlives the one that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedcomm.testing import RankPool
from tests.ranks.ctrl_c import HEARS_CTRL_C

ROOT = Path(__file__).parents[2]

MAIN = """
import os, sys, time
from fusedcomm.testing import RankPool

def pids(rank):
    return os.getpid(), os.getppid()

def sleep(rank):
    os.write(1, b"asleep\\n")
    time.sleep(600)

GUARD
    with RankPool(2) as pool:
        (a, launcher), (b, _) = pool.run(pids)
        print(launcher, a, b, flush=True)
        pool.run(sleep, timeout_s=600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program whose two ranks sleep: as the user's, in a session of its own."""
    path = tmp_path / "program.py"
    path.write_text(HEARS_CTRL_C + MAIN.replace("GUARD", "if __name__ == '__main__':"))
    with start(path) as process:
        yield process
        if process.poll() is None:
            process.kill()


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until_asleep(program: subprocess.Popen[str]) -> list[int]:
    """The pids of the launcher and of the ranks, once these are in their call."""
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 3, program.communicate()[1]
    assert [program.stdout.readline() for _ in range(2)] == ["asleep\n"] * 2
    return pids


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < limit, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs. Orphans wait for whatever is process 1 here to collect them."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_go_with_a_program_that_is_killed(
    program: subprocess.Popen[str], number: signal.Signals
) -> None:
    pids = wait_until_asleep(program)
    program.send_signal(number)
    program.wait(10)
    wait_until_gone(pids)


def test_ctrl_c_ends_the_program_and_its_ranks(program: subprocess.Popen[str]) -> None:
    pids = wait_until_asleep(program)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = program.communicate(timeout=20)
    assert not any(alive(pid) for pid in pids)  # at once: the program waited for them
    assert errors.count("Traceback") == 1  # its own, none of a rank's
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_lost_launcher_takes_the_ranks_and_is_reported(program: subprocess.Popen[str]) -> None:
    pids = wait_until_asleep(program)
    os.kill(pids[0], signal.SIGKILL)
    _, errors = program.communicate(timeout=20)
    assert "the process that starts the ranks ended with exit code -9" in errors
    wait_until_gone(pids)


def test_what_forks_the_ranks_asks_for_no_gpu() -> None:
    """A child of a process that has asked for one cannot use it."""
    program = (
        "import torch\n"
        "def touched(*_): raise AssertionError('a GPU was asked for')\n"
        "torch._C._cuda_getDeviceCount = torch._C._cuda_getCurrentRawStream = touched\n"
        "torch.cuda._lazy_init, torch.cuda._is_compiled = touched, lambda: True\n"
        "import fusedcomm.ranks.launcher_main\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_unguarded_program_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(MAIN.replace("GUARD", "if True:"))
    with start(path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "guard it, if __name__ == '__main__'" in errors


def test_a_launcher_that_cannot_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the process that starts the ranks ended with exit"):
        RankPool(1, env={"PYTHONHOME": "/nonexistent"})
    assert "nonexistent" in capfd.readouterr().err
