"""examples/train_moe.py: the same training whatever the number of ranks, resumed or not."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/train_moe.py"
SMALL = "--steps 8 --batch 5 --length 24 --hidden 32 --experts 5 --save-every 4".split()


def train(out: Path, *options: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, EXAMPLE, *SMALL, "--out", str(out), *options]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_losses_do_not_depend_on_ranks_nor_on_resuming(tmp_path: Path) -> None:
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    train(alone, "--ep", "1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = train(cut, "--steps", "4", launcher=torchrun)
    assert shown.count("4/4  loss") == 1 and (cut / "training.png").exists()
    assert len(torch.load(cut / "checkpoint.pt")["losses"]) == 4
    shown = train(cut, "--ep", "3", "--resume")
    assert "8/8  loss" in shown and "5/8  loss" in shown and "4/8" not in shown
    right, found = (torch.load(out / "checkpoint.pt") for out in (alone, cut))
    losses = torch.tensor(right["losses"])
    torch.testing.assert_close(torch.tensor(found["losses"]), losses, rtol=1e-5, atol=0)
    assert losses[-1] < 0.9 * losses[0]
    for part in ("model", "exp_avg", "exp_avg_sq"):
        assert found[part].keys() == right[part].keys()
        for name, value in right[part].items():
            error = (found[part][name] - value).norm() / value.norm()
            assert error < 1e-3, f"{part} {name}: {error}"
    loads = torch.stack(right["loads"])
    assert loads.shape == (8, 2, 5)
    torch.testing.assert_close(loads.sum(-1), torch.ones(8, 2))
    assert (cut / "training.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--resume"], "there is no checkpoint.pt"),
        (["--text", "nothing.txt"], "not a file"),
    ],
)
def test_what_cannot_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / EXAMPLE))["arguments"]()
    assert complaint in capsys.readouterr().err
