"""Ctrl-C leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fusedcomm as fc
from tests.ranks.ctrl_c import HEARS_CTRL_C

ROOT = Path(__file__).parents[2]


def wait_alone(rank: int) -> None:
    """Rank 0 waits at a barrier for the others, who wait for nothing."""
    comm = fc.Communicator.of()
    comm.barrier()
    os.write(1, b"ready\n")  # in one piece: all ranks write to one pipe
    if rank == 0:
        comm.barrier()
    time.sleep(600)


PROGRAMS = {
    "run_ranks": (
        "from fusedcomm.testing import run_ranks\n"
        "from tests.ranks.test_ctrl_c import wait_alone\n"
        "run_ranks(wait_alone, 3, timeout_s=600)"
    ),
    "bench": (
        "import sys\nfrom fusedcomm.cli.main import main\n"
        "sys.exit(main(['bench', 'tensor_parallel', '--quick', '--ranks', '2']))"
    ),
}


def family(session: int) -> dict[int, str]:
    """The processes of a session that still run: pid and command line."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                line = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat[0] != "Z" and int(stat[3]) == session:
                found[int(entry)] = line
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_leaves_no_process(name: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C + PROGRAMS[name]],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        if name == "run_ranks":
            for _ in range(3):
                assert program.stdout.readline() == "ready\n"
        else:
            limit = time.monotonic() + 60
            while len(family(program.pid)) < 3:
                assert program.poll() is None and time.monotonic() < limit
                time.sleep(0.05)
            time.sleep(0.5)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the foreground group
        program.communicate(timeout=30)
        assert program.returncode != 0
        limit = time.monotonic() + 5
        while family(program.pid):  # helpers of multiprocessing end when they see it gone
            assert time.monotonic() < limit, family(program.pid)
            time.sleep(0.05)
    finally:
        for pid in family(program.pid):
            os.kill(pid, signal.SIGKILL)
