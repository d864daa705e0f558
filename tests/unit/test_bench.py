"""The benchmark harness: statistics, verdicts, checks, and the command line. No processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fusedcomm import benchmarks
from fusedcomm.benchmarks.harness import SHAPES, Case, Estimate, Options, Verdict, compare
from fusedcomm.benchmarks.harness import machine as machines
from fusedcomm.benchmarks.harness.case import relative_bound, relative_error
from fusedcomm.benchmarks.harness.measure import Budget, RankCase, merge
from fusedcomm.cli import main as cli
from fusedcomm.cli import show


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    generator = torch.Generator().manual_seed(1)
    b = (1 + 0.05 * torch.rand(50, generator=generator)).tolist()
    a = (2 + 0.05 * torch.rand(50, generator=generator)).tolist()
    ratio = compare((a, b))
    exact = sorted(a)[24] + sorted(a)[25], sorted(b)[24] + sorted(b)[25]
    assert ratio.value == pytest.approx(exact[0] / exact[1])
    assert ratio.low <= ratio.value <= ratio.high
    assert 0 < ratio.high - ratio.low < 0.05
    assert compare((a, b)) == ratio


def test_slow_rounds_that_hit_both_paths_do_not_widen_the_interval() -> None:
    rounds = [1.0 + (i % 7) for i in range(40)]
    ratio = compare(([2 * r for r in rounds], rounds))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_a_geometric_mean_is_over_the_pairs() -> None:
    mean = compare(([4.0] * 5, [1.0] * 5), ([1.0] * 9, [1.0] * 9))
    assert mean.value == pytest.approx(2.0)
    with pytest.raises(ValueError, match="in pairs"):
        compare(([1.0], [1.0, 2.0]))


@pytest.mark.parametrize(
    ("value", "low", "high", "at_least", "words"),
    [
        (0.95, 0.92, 0.97, True, "target at least 0.9: met"),
        (0.91, 0.88, 0.95, True, "target at least 0.9: met, but within the noise"),
        (0.85, 0.82, 0.87, True, "target at least 0.9: NOT met"),
        (0.89, 0.86, 0.92, True, "target at least 0.9: NOT met, but within the noise"),
        (0.9, 0.9, 0.9, False, "0.9, target at most 0.9: met"),
        (1.0, 1.0, 1.0, False, "1, target at most 0.9: NOT met"),
    ],
)
def test_a_verdict_says_whether_its_target_is_met(
    value: float, low: float, high: float, at_least: bool, words: str
) -> None:
    line = str(Verdict("efficiency", Estimate(value, low, high), 0.9, at_least))
    assert line.startswith("efficiency: ") and line.endswith(words)


def test_a_verdict_without_target_is_neither() -> None:
    assert Verdict("speed", Estimate(1, 1, 2)).met is None
    assert str(Verdict("speed", Estimate(1, 1, 2))) == "speed: 1.000 [1.000, 2.000] (no target)"


def test_the_error_is_the_worst_of_the_tensors_and_infinite_for_nan() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    off = torch.tensor([3.0, 4.5])
    assert relative_error(exact.float(), exact) == 0
    assert relative_error((exact.float(), off), (exact, exact)) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), exact) == math.inf
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3).double()) == 0
    with pytest.raises(ValueError, match="shapes"):
        relative_error(torch.zeros(3), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_holds_for_a_right_product_and_not_for_one_without_a_term(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).to(dtype)
    w = torch.randn(32, 256, generator=generator).to(dtype)
    exact = x.double() @ w.double().t()
    bound = relative_bound(dtype, terms=256)
    assert relative_error(x @ w.t(), exact) <= bound
    assert relative_error(x[:, :255] @ w[:, :255].t(), exact) > bound


def test_rounds_fill_the_budget_within_its_limits() -> None:
    budget = Budget(warm_up=1, seconds=1.0, least=5, most=50)
    assert [budget.rounds(s) for s in (10.0, 0.1, 1e-6, 0.0)] == [5, 10, 50, 50]


def test_a_sample_runs_from_the_last_start_to_the_last_end() -> None:
    ms = 1_000_000

    def rank(times: list[tuple[int, int]], error: float) -> RankCase:
        return RankCase({"a": times}, {"a": error}, {"a": 0.5}, ["plan"], [])

    case = Case("case", lambda ranks: pytest.fail("not prepared here"), baseline="a")
    one = rank([(0, 5 * ms), (10 * ms, 14 * ms)], error=0.1)
    two = rank([(1 * ms, 3 * ms), (10 * ms, 18 * ms)], error=0.7)
    (result,) = merge([case], [[one], [two]])
    path = result.paths["a"]
    assert path.samples_ms == [4.0, 8.0]
    assert path.rank_ms == [[5.0, 4.0], [2.0, 8.0]]
    assert result.start_skew_us == 1000
    assert path.error == 0.7 and not path.correct and not result.correct


def test_tensor_parallel_has_the_cases_of_its_targets() -> None:
    from fusedcomm.benchmarks import tensor_parallel

    cases = tensor_parallel.cases(Options())
    assert len({case.name for case in cases}) == len(cases)
    prefill = [case.labels for case in cases if case.labels["kind"] == "prefill"]
    assert {(c["op"], c["in_features"], c["out_features"], c["tokens"]) for c in prefill} == {
        ("all_gather_linear", 4096, 1792, 2048),
        ("all_gather_linear", 4096, 512, 2048),
        ("linear_reduce_scatter", 1792, 4096, 2048),
        ("linear_reduce_scatter", 512, 4096, 2048),
    }
    decode = {case.labels["tokens"] for case in cases if case.labels["kind"] == "decode"}
    assert decode == {1, 8, 64}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_divide_by_their_tensor_parallel_degree(name: str) -> None:
    shape = SHAPES[name]
    assert name.endswith(f"-tp{shape.tp}")
    assert shape.feed_forward % shape.tp == 0 and shape.heads % shape.tp == 0
    assert shape.heads % shape.kv_heads == 0


def test_every_benchmark_has_what_the_command_needs() -> None:
    import importlib

    assert "tensor_parallel" in benchmarks.known()
    for op in benchmarks.known():
        module = importlib.import_module(f"fusedcomm.benchmarks.{op}")
        assert (module.__doc__ or "").strip()
        assert callable(module.cases) and callable(module.summarise)


def test_the_machine_is_described_in_json_and_in_one_line() -> None:
    description = machines.describe()
    assert description["versions"]["torch"] == torch.__version__
    assert description["machine"]["usable_cores"] >= 1
    assert json.loads(json.dumps(description)) == description
    assert "\n" not in machines.summary(description)


def test_help_lists_the_ops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "tensor_parallel" in text and "--quick" in text and "llama3-8b-tp8" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "tensor_parallel"),
        (["tensor_parallel", "--only", "no such case"], "prefill all_gather_linear"),
        (["tensor_parallel", "--json", "no/such/folder/x.json"], "no folder"),
    ],
)
def test_wrong_arguments_say_what_is_legal(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--ranks", "x"], ["--dtype", "int8"], ["--shape", "gpt"]]
)
def test_illegal_options_are_refused_by_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "tensor_parallel", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("rich", [True, False])
def test_a_table_shows_every_cell_as_it_is(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(show, "HAVE_RICH", rich)
    show.table("title", ["path", "ratio"], [["one", "1.0 [0.9, 1.1]"], [], ["[bold]two", "2"]])
    text = capsys.readouterr().out
    for cell in ("title", "path", "ratio", "one", "1.0 [0.9, 1.1]", "[bold]two", "2"):
        assert cell in text
    with pytest.raises(ValueError, match="2 columns"):
        show.table("title", ["a", "b"], [["1"]])


def test_progress_without_a_terminal_is_a_line_per_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show.progress(4, "bench") as display:
        display.update(0, "first")
        display.update(0.5, "first")
        display.update(1, "second")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["bench:   0%  first", "bench:  25%  second"]
    assert captured.out == ""


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fusedcomm.benchmarks.harness.plot import draw

    times = {"a": [(0, 10), (0, 11)], "b": [(0, 20), (0, 23)]}
    part = RankCase(times, {"a": None, "b": 0.0}, {"a": 0.0, "b": 0.1}, [], [])
    case = Case("case", lambda ranks: pytest.fail("not prepared here"), baseline="a")
    draw(merge([case], [[part]]), "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
