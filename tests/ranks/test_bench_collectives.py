"""The benchmark of collectives: every path is tried once, MPI's where it is installed."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

import pytest
import torch
import torch.distributed as dist

from fusedcomm.benchmarks import collectives
from fusedcomm.benchmarks._collectives import mpi
from fusedcomm.benchmarks.harness import Case, CaseResult, Options, Path, Prepared, Ranks, Verdict
from fusedcomm.cli.bench import run_benchmark

QUICK = Options(ranks=2, quick=True, dtype=torch.float32)


def test_small_cases_run_and_agree(tmp_path: FilePath, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    json_file, plot_file = tmp_path / "x.json", tmp_path / "x.png"
    code = run_benchmark(
        collectives.__name__, QUICK, only="1 KB", json_file=json_file, plot_file=plot_file
    )
    out = capsys.readouterr().out
    assert code == 0, out
    content = json.loads(json_file.read_text())
    expected = ["fusedcomm", "fusedcomm, symmetric", "gloo", "copies"]
    if mpi.is_installed():
        expected.append("MPI")
    assert [(case["labels"]["op"], case["labels"]["calls"]) for case in content["cases"]] == [
        (op, calls) for op in collectives.OPS for calls in (1, collectives.REPEATS)
    ]
    for case in content["cases"]:
        assert list(case["paths"]) == expected and case["correct"]
    assert "all_reduce: gloo / fusedcomm at any size" in out
    assert f"all_reduce 1 KB × {collectives.REPEATS}, a call, fusedcomm" in out
    assert plot_file.stat().st_size > 10_000


def test_every_case_has_targets() -> None:
    names = [case.name for case in collectives.cases(Options())]
    assert "all_reduce 1 KB" in names and "all_to_all 64 MB" in names
    assert len(names) == len(set(names)) == 40
    assert {case.baseline for case in collectives.cases(QUICK)} == {"gloo"}


# What the harness does for it


def elsewhere(ranks: Ranks) -> Prepared:
    """A path with a setup, and one that another process runs and times."""
    state = torch.zeros(3)
    calls: list[int] = []

    def run() -> torch.Tensor:
        state.add_(1)  # right only after the setup
        return state

    def timed(at_ns: int) -> tuple[int, int]:
        calls.append(at_ns)
        assert dist.get_rank() == ranks.rank
        return at_ns, at_ns + 5_000_000

    return Prepared(
        {
            "set up": Path(run, torch.ones(3).double(), 0.0, setup=state.zero_),
            "elsewhere": Path(lambda: state, timed=timed),
        }
    )


def cases(options: Options) -> list[Case]:
    return [Case("elsewhere", elsewhere, "set up", seconds=0.05)]


def summarise(results: list[CaseResult], options: Options) -> list[Verdict]:
    return []


def test_setup_and_foreign_times(tmp_path: FilePath) -> None:
    file = tmp_path / "x.json"
    assert run_benchmark(__name__, QUICK, json_file=file) == 0
    (case,) = json.loads(file.read_text())["cases"]
    assert case["correct"]
    assert set(case["paths"]["elsewhere"]["samples_ms"]) == {5.0}
