"""The demo as users start it, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_demo(ranks: int, tmp_path: Path) -> None:
    """50 tokens on 3 ranks are shards of 17, 17, 16; 3 key-value heads on 2 ranks are 2 and 1."""
    command = f"-m fusedcomm demo --random --layers 2 --ranks {ranks} --tokens 4 --prefill 50"
    done = subprocess.run(
        [sys.executable, *command.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 tokens equal" in done.stdout
    assert "‖difference‖ / ‖logits‖" in done.stdout
    for projection in ("q, k, v", "gate, up", "down"):
        assert projection in done.stdout
    picture, trace = tmp_path / "prefill.png", tmp_path / "prefill.json"
    assert str(picture) in done.stdout and str(trace) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = {(event["pid"], event["cat"]) for event in events if event["ph"] == "X"}
    assert {(rank, kind) for rank in range(ranks) for kind in ("gemm", "wait")} <= kinds
