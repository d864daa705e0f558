"""``make gpu-check`` where there is no GPU, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedcomm.benchmarks._gpu_check import __main__ as command
from fusedcomm.benchmarks._gpu_check.__main__ import LIMIT_S, MEASURE_S, PARTS, SPREAD_S, _table
from fusedcomm.benchmarks._gpu_check.measure import Product, products, row

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusedcomm.benchmarks._gpu_check", "--out", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "x").exists()


TIMES = {"cuBLAS": 100.0, "plain": 110.0, "waiting": 115.0, "signalling": 125.0}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[Any, ...]]]:
    """Stand-ins for all that needs a GPU; given a check that fails, what is run is noted."""
    import fusedcomm.ranks
    from tests.gpu import running

    ran: list[tuple[Any, ...]] = []

    def arrange(failing: str) -> list[tuple[Any, ...]]:
        def run(checks: Any, world_size: int, *, devices: int, timeout_s: float, on_result: Any):
            ran.append((world_size, devices))
            for name in checks:
                on_result(running.Result(name, 1.0, "it is wrong" if name == failing else ""))

        def measure(fn: Any, world_size: int, *, on_event: Any, **limits: Any) -> None:
            ran.append(("measure",))
            on_event(0, ("row", row(Product("p", 1000, 1000, 1000), TIMES)))
            on_event(0, ("calls", {"begin": 1.0, "end": 2.0}))

        monkeypatch.setattr(running, "run", run)
        monkeypatch.setattr(fusedcomm.ranks, "launch", measure)
        return ran

    monkeypatch.setattr(command, "_lacking", lambda: None)
    monkeypatch.setattr(command, "_gpus", lambda: [{"name": "H100"}])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return arrange


@pytest.mark.parametrize("failing", ["", "skew"])
def test_a_run(
    on_a_gpu: Callable[[str], Any],
    failing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = on_a_gpu(failing)
    file = tmp_path / "new" / "found.json"
    assert command.main(["--out", str(file)]) == (1 if failing else 0)
    assert ran == [(2, 1), (1, 1), (4, 1), (4, 4), ("measure",)]
    found = json.loads(file.read_text())
    assert len(found["problems"]) == (4 if failing else 0)
    assert found["measured"][0]["product"] == "p" and found["versions"]["torch"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("H100") and "checks passed" in said[-1]
    assert any("cuBLAS" in line for line in said[-6:])
    assert ("2 ranks on one GPU: skew" + " " * 23 + "FAILED" in "\n".join(said)) == bool(failing)


def test_a_quick_run(on_a_gpu: Callable[[str], Any], tmp_path: Path) -> None:
    ran = on_a_gpu("")
    assert command.main(["--quick", "--out", str(tmp_path / "found.json")]) == 0
    assert ran == [(2, 1)]


def test_the_parts_fit_into_the_limit() -> None:
    assert sum(limit for _, limit in PARTS) + SPREAD_S + MEASURE_S <= LIMIT_S


def test_products_are_those_of_the_models() -> None:
    found = {product.name: (product.m, product.n, product.k) for product in products(4096)}
    assert found["llama3-8b q, k, v"] == (4096, 768, 4096)
    assert found["llama3-70b down"] == (4096, 8192, 3584)
    assert found["llama3-70b gate, up"] == (4096, 7168, 8192)
    assert found["8192³"] == (8192, 8192, 8192)
    assert all(m % 8 == 0 for m, _, _ in found.values())


def test_table() -> None:
    measured = row(Product("p", 1000, 1000, 1000), TIMES)
    assert measured["tflops"]["cuBLAS"] == 20.0
    lines = _table({"measured": [measured], "calls": {"begin": 1.0, "end": 2.0}})
    assert lines[2].split()[-4:] == ["0.87", "0.80", "5.0", "15.0"]
    assert _table({"measured": []}) == ["nothing was measured"]
