"""The benchmark harness with real ranks, on a benchmark that needs none of the library's ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path as FilePath

import pytest
import torch
import torch.distributed as dist

from fusedcomm.benchmarks.harness import (
    Case,
    CaseResult,
    MemoryUse,
    Options,
    Path,
    Prepared,
    Ranks,
    Verdict,
    compare,
)
from fusedcomm.cli.bench import run_benchmark
from fusedcomm.trace import record_plan, span


def right(ranks: Ranks) -> Prepared:
    """The sum over ranks of rank + 1, by a collective and by adding what is known."""
    mine = torch.full((1000,), float(ranks.rank + 1))
    total = sum(range(1, ranks.world_size + 1))
    expected = torch.full((1000,), float(total), dtype=torch.float64)

    def collective() -> torch.Tensor:
        record_plan("sum", "plain", 1, "it is a test")
        with span("copy", "all-reduce"):
            result = mine.clone()
            dist.all_reduce(result)
        return result

    return Prepared(
        {
            "known": Path(lambda: mine * 0 + total, expected, 0.0),
            "collective": Path(collective, expected, 0.0),
            "other work": Path(lambda: mine * 7),
        },
        memory=lambda: [MemoryUse("input", 4000, 4000 + ranks.rank)],
    )


def wrong_later(ranks: Ranks) -> Prepared:
    """Right at the first call and wrong on one rank from the third on, as a reused buffer is."""
    ones = torch.ones(10)
    calls = 0

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return ones * (1 + (calls > 2 and ranks.rank == 1))

    return Prepared({"path": Path(run, ones.double(), 1e-3)})


def raises(ranks: Ranks) -> Prepared:
    if ranks.rank == 1:
        raise RuntimeError("no such luck")
    return right(ranks)


def cases(options: Options) -> list[Case]:
    def case(prepare: Callable[[Ranks], Prepared], baseline: str) -> Case:
        return Case(prepare.__name__, prepare, baseline, {"engine": options.engine})

    return [case(right, "known"), case(wrong_later, "path"), case(raises, "known")]


def summarise(results: list[CaseResult], options: Options) -> list[Verdict]:
    paths = results[0].paths
    first, last = list(paths.values())[0], list(paths.values())[-1]
    return [Verdict("speed", compare((first.samples_ms, last.samples_ms)), target=0.0)]


QUICK = Options(ranks=2, engine="host", quick=True)


def test_a_benchmark_runs_checks_reports_and_writes_everything(
    tmp_path: FilePath, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    assert run_benchmark(__name__, QUICK, only="right", json_file=file) == 0
    out, err = capsys.readouterr()
    last = out.splitlines()[-2:]
    assert last[0].startswith("speed: ") and last[0].endswith("target at least 0: met")
    assert "agree with float64" in last[1]
    assert "plan of right: sum on plain, chunks: 1 (it is a test)" in out
    assert "case 1 of 1: right" in err

    content = json.loads(file.read_text())
    assert content["options"] == {
        "ranks": 2,
        "engine": "host",
        "dtype": "bfloat16",
        "shape": "llama3-8b-tp8",
        "quick": True,
    }
    assert content["versions"]["torch"] == torch.__version__ and content["date"]
    (case,) = content["cases"]
    assert case["correct"] and case["labels"] == {"engine": "host"}
    assert list(case["paths"]) == ["known", "collective", "other work"]
    counts = {len(path["samples_ms"]) for path in case["paths"].values()}
    assert len(counts) == 1 and counts.pop() >= 4
    for path in case["paths"].values():
        assert all(sample > 0 for sample in path["samples_ms"])
        assert [len(one) for one in path["rank_ms"]] == [len(path["samples_ms"])] * 2
    assert case["paths"]["collective"]["error"] == 0.0
    assert case["paths"]["other work"]["error"] is None
    assert case["memory"] == [{"what": "input", "bytes": 4000, "allowed": 4000}]
    assert content["verdicts"][0]["met"] is True


def test_a_result_that_goes_wrong_later_on_one_rank_fails_the_run(
    tmp_path: FilePath, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    assert run_benchmark(__name__, QUICK, only="wrong_later", json_file=file) == 1
    out = capsys.readouterr().out
    assert "WRONG RESULT: wrong_later, path: error 1.00e+00, at most 1.00e-03" in out
    assert json.loads(file.read_text())["cases"][0]["correct"] is False


def test_a_rank_that_raises_fails_the_run_with_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_benchmark(__name__, QUICK, only="raises") == 1
    err = capsys.readouterr().err
    assert "rank 1, first: raised" in err and "no such luck" in err
