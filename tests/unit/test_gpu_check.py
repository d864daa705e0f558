"""``make gpu-check`` where there is no GPU, and its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    times = {"cuBLAS": 100.0, "plain": 110.0, "waiting": 115.0, "signalling": 125.0}
    measured = row(Product("p", 1000, 1000, 1000), times)
    assert measured["tflops"]["cuBLAS"] == 20.0
    lines = _table({"measured": [measured], "calls": {"begin": 1.0, "end": 2.0}})
    assert lines[2].split()[-4:] == ["0.87", "0.80", "5.0", "15.0"]
    assert _table({"measured": []}) == ["nothing was measured"]
