"""The training example: ranks change nothing, resumed runs go on where they were, the command."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pools
from tests.ranks.checking import relative_error

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, Any] = dict(batch=4, sequence=48, learning_rate=5e-3, warmup=5)


def example(name: str) -> Any:
    """A module of the examples, as a script there imports it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def run(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    lm = example("train_lm")
    shape = example("byte_decoder").Shape(hidden=48, ffn=80, layers=2, heads=6)
    seen: list[Any] = []
    found = lm.train(rank, seen.append, lm.Settings(**{**SMALL, "shape": shape, **options}))
    if rank == 0 and seen:
        assert seen[-1].loss == found["losses"][-1] and seen[-1].step == len(found["losses"])
    return found


def trained(pools: Pools, **options: Any) -> dict[str, Any]:
    """What rank 0 of a run returns."""
    options = {"checkpoint_every": 0, **options}
    ranks = options.get("tp", 1) * options.get("dp", 1)
    return pools(ranks).run(run, options, timeout_s=240)[0]


def check_same(found: dict[str, Any], right: dict[str, Any], loss: float, weights: float) -> None:
    assert len(found["losses"]) == len(right["losses"])
    for step, (mine, theirs) in enumerate(zip(found["losses"], right["losses"], strict=True)):
        assert abs(mine - theirs) <= loss * theirs, f"step {step}: {mine}, unsharded {theirs}"
    for name, value in right["state"].items():
        error = relative_error(found["state"][name], value)
        assert error <= weights, f"{name}: {error:.2g}"


def test_ranks_change_nothing(pools: Pools) -> None:
    """Losses at every step, and all weights at the end, of TP 1, 2 and 3."""
    right = trained(pools, steps=40)
    assert right["losses"][-1] < 0.6 * right["losses"][0], "the loss does not fall"
    for tp in (2, 3):
        check_same(trained(pools, steps=40, tp=tp), right, 1e-4, 1e-3)


def test_bfloat16(pools: Pools) -> None:
    """Under autocast each matrix product rounds to 8 bits: a few of 256 are allowed."""
    exact = trained(pools, steps=20)
    right = trained(pools, steps=20, bf16=True)
    assert right["losses"] != exact["losses"], "autocast does nothing"
    check_same(right, exact, 0.02, 0.2)
    check_same(trained(pools, steps=20, bf16=True, tp=2), right, 0.02, 0.2)


def test_resume(pools: Pools, tmp_path: Path) -> None:
    """From a checkpoint in the middle: the same bits on as many ranks, rounding on others."""
    options: dict[str, Any] = {"steps": 12, "checkpoint_every": 6, "out": tmp_path}
    right = trained(pools, tp=2, **options)
    shutil.rmtree(tmp_path / "step-000012")
    options["checkpoint_every"] = 0
    again = trained(pools, tp=2, resume=True, **options)
    check_same(again, right, 0.0, 0.0)
    for ranks in ({"tp": 3}, {"tp": 1}, {"tp": 2, "dp": 2}):
        found = trained(pools, resume=True, **options, **ranks)
        assert found["losses"][:6] == right["losses"][:6]
        check_same(found, right, 1e-4, 1e-3)


def test_command(tmp_path: Path) -> None:
    """Starts its ranks, writes losses, curve and checkpoints, and goes on from them."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    small = "--hidden 24 --ffn 32 --layers 1 --heads 2 --batch 2 --sequence 16 --checkpoint-every 2"
    for more in ("--tp 2 --steps 2", "--tp 1 --steps 4 --resume"):
        command = f"{small} {more} --text {text} --out {tmp_path / 'out'}"
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "train_lm.py"), *command.split()],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "loss curve" in done.stdout
    out = tmp_path / "out"
    assert sorted(p.name for p in out.glob("step-*")) == ["step-000002", "step-000004"]
    losses = [json.loads((out / f"losses-tp{tp}-dp1.json").read_text()) for tp in (2, 1)]
    assert len(losses[1]) == 4 and losses[1][:2] == losses[0]
    assert (out / "loss-tp2-dp1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--dp 3", "--batch 8 cannot be divided by --dp 3"),
        ("--heads 5", "must be a multiple"),
        ("--sequence 9999999", "has no more than"),
    ],
)
def test_wrong_arguments(
    arguments: str, complaint: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        example("train_lm").parse()
    assert complaint in capsys.readouterr().err
