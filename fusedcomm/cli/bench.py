"""``python -m fusedcomm bench OP``: starts the ranks, measures, checks, and reports.

``bench --calibrate`` measures the machine's links instead; see ``fusedcomm.cli.calibrate``.

What is measured lies in benchmarks/OP.py, how in benchmarks/harness. The exit code is 1 when a
path's result is wrong, whatever its speed, and 0 otherwise: a missed target is reported, no error.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fusedcomm import benchmarks
from fusedcomm.benchmarks.harness import SHAPES, CaseResult, Options, Verdict, compare
from fusedcomm.benchmarks.harness import machine as machines
from fusedcomm.benchmarks.harness.measure import merge, run_rank
from fusedcomm.benchmarks.harness.stats import median, quartiles
from fusedcomm.cli import show
from fusedcomm.planning import ENGINES
from fusedcomm.ranks import RankError, launch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``bench`` to ``parser``."""
    default = Options()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {op:20s}{_first_line(op)}" for op in benchmarks.known()]
    parser.epilog = "\n".join(["ops:", *lines])
    parser.add_argument(
        "op", metavar="OP", nargs="?", help="the operation to measure, see the list below"
    )
    parser.add_argument(
        "--calibrate", action="store_true",
        help="measure this machine's links instead, and keep them in a file: algorithms are chosen "
        "by it",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_at_least_one, default=default.ranks, metavar="N",
        help="processes, each with one thread pinned to a core (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=ENGINES, default=default.engine,
        help="of the library's ops (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help=f"of the inputs (default: the operation's own, mostly {_dtype_name(default.dtype)})",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default=default.shape, metavar="NAME",
        help=f"model and sharding: {', '.join(SHAPES)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="TEXT", help="measure only the cases with TEXT in their name"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: under a minute, less certain"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything, raw samples too"
    )
    parser.add_argument(
        "--compile-report", action="store_true",
        help="instead of measuring, compile the kernels for GPUs and print what their code is like",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the medians (PNG, SVG, PDF)"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    if args.compile_report:
        from fusedcomm.benchmarks._compiled.__main__ import print_report

        if args.op is not None:
            print(f"--compile-report measures no {args.op}: leave one out", file=sys.stderr)
            return 2
        return print_report(args.only, None, args.json)
    if args.calibrate:
        from fusedcomm.cli import calibrate

        if args.op is not None:
            print(f"--calibrate measures links, not {args.op}: leave one out", file=sys.stderr)
            return 2
        return calibrate.run(args.ranks, args.quick)
    if args.op is None:
        print("name an OP to measure, --calibrate or --compile-report; see --help", file=sys.stderr)
        return 2
    if args.op not in benchmarks.known():
        print(
            f"there is no benchmark {args.op!r}; there are: {', '.join(benchmarks.known())}",
            file=sys.stderr,
        )
        return 2
    for file in (args.json, args.plot):
        if file is not None and not file.parent.is_dir():
            print(f"cannot write {file}: there is no folder {file.parent}", file=sys.stderr)
            return 2
    options = Options(
        ranks=args.ranks,
        engine=args.engine,
        dtype=DTYPES[args.dtype] if args.dtype else _default_dtype(args.op),
        shape=args.shape,
        quick=args.quick,
    )
    return run_benchmark(
        f"{benchmarks.__name__}.{args.op}", options, only=args.only, json_file=args.json,
        plot_file=args.plot,
    )  # fmt: skip


def run_benchmark(
    module_name: str,
    options: Options,
    *,
    only: str | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> int:
    """Measure the benchmark module of that name and report; returns the exit code."""
    module = importlib.import_module(module_name)
    op = module_name.rpartition(".")[2]
    cases = [case for case in module.cases(options) if only is None or only in case.name]
    if not cases:
        names = "\n  ".join(case.name for case in module.cases(options))
        print(f"no case has {only!r} in its name; the cases are\n  {names}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    if options.ranks > cores:
        print(
            f"{options.ranks} ranks share {cores} cores: they take turns, and the times say little "
            "about overlap",
            file=sys.stderr,
        )
    description = machines.describe()  # before the ranks make their own load
    load = description["machine"]["load_average"]
    if load > 0.5:
        print(
            f"others have kept {load:.1f} cores busy in the last minute: the times are disturbed",
            file=sys.stderr,
        )
    chosen = [case.name for case in cases]
    with show.progress(len(cases), f"bench {op}") as display:

        def on_event(_: int, event: Any) -> None:
            number, name, done, rounds = event
            display.update(number + done / rounds, f"case {number + 1} of {len(cases)}: {name}")

        try:
            measured = launch(
                run_rank, options.ranks, module_name, options, chosen, on_event=on_event, pin=True
            )
        except RankError as failure:
            print(failure, file=sys.stderr)
            return 1
    results = merge(cases, measured)
    verdicts = module.summarise(results, options)
    if json_file is not None:
        content = _as_json(op, options, description, results, verdicts)
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    if plot_file is not None:
        from fusedcomm.benchmarks.harness.plot import draw as draw_bars

        draw = getattr(module, "draw", draw_bars)
        draw(results, f"{op}, {_setting(options)}\n{machines.summary(description)}", plot_file)
    return _report(op, options, description, results, verdicts)


def _report(
    op: str,
    options: Options,
    description: dict[str, Any],
    results: list[CaseResult],
    verdicts: list[Verdict],
) -> int:
    print(machines.summary(description))
    show.table(
        f"{op}, {_setting(options)}",
        ["case and path", "median, ms", "quartiles", "rounds", "baseline / path", "error"],
        _rows(results),
    )
    print("baseline: the path marked *; in brackets the 95 % interval; error: against float64")
    planned: dict[str, list[str]] = {}
    for result in results:
        for plan in result.plans:
            planned.setdefault(plan, []).append(result.name)
    for plan, names in planned.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"plan of {names[0]}{others}: {plan}")
    skew = max(result.start_skew_us for result in results)
    print(f"largest difference of the ranks' starts: {skew:.0f} µs (no part of the times)")
    for verdict in verdicts:
        print(verdict)
    wrong = [
        f"WRONG RESULT: {result.name}, {name}: error {path.error:.2e}, at most {path.bound:.2e}"
        for result in results
        for name, path in result.paths.items()
        if not path.correct
    ]
    print("\n".join(wrong) if wrong else "all results agree with float64 within the dtype's bound")
    return 1 if wrong else 0


def _rows(results: list[CaseResult]) -> list[list[str]]:
    rows: list[list[str]] = []
    for result in results:
        rows += [[], [result.name, *[""] * 5]] if rows else [[result.name, *[""] * 5]]
        baseline = result.paths[result.baseline].samples_ms
        for name, path in result.paths.items():
            low, high = quartiles(path.samples_ms)
            mark = "*" if name == result.baseline else " "
            rows.append(
                [
                    f"{mark} {name}",
                    f"{median(path.samples_ms):.3f}",
                    f"{low:.3f} – {high:.3f}",
                    str(len(path.samples_ms)),
                    "" if mark == "*" else str(compare((baseline, path.samples_ms))),
                    "" if path.error is None else f"{path.error:.1e}",
                ]
            )
    return rows


def _as_json(
    op: str,
    options: Options,
    description: dict[str, Any],
    results: list[CaseResult],
    verdicts: list[Verdict],
) -> dict[str, Any]:
    cases = []
    for result in results:
        case = dataclasses.asdict(result) | {"correct": result.correct}
        for name, path in result.paths.items():
            case["paths"][name] |= {
                "median_ms": median(path.samples_ms),
                "quartiles_ms": quartiles(path.samples_ms),
                "correct": path.correct,
                # JSON has no infinity; "correct" tells it from a path without a reference.
                "error": path.error if path.error is None or math.isfinite(path.error) else None,
            }
        cases.append(case)
    return {
        "op": op,
        "options": dataclasses.asdict(options) | {"dtype": _dtype_name(options.dtype)},
        **description,
        "cases": cases,
        "verdicts": [dataclasses.asdict(verdict) | {"met": verdict.met} for verdict in verdicts],
    }


def _setting(options: Options) -> str:
    quick = ", quick" if options.quick else ""
    ranks = f"{options.ranks} rank" + "s" * (options.ranks > 1)
    return f"{ranks}, {_dtype_name(options.dtype)}, {options.shape}, engine {options.engine}{quick}"


def _default_dtype(op: str) -> torch.dtype:
    module = importlib.import_module(f"{benchmarks.__name__}.{op}")
    return getattr(module, "DEFAULT_DTYPE", Options().dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _first_line(op: str) -> str:
    """The first line of a benchmark's docstring, without importing what it measures."""
    for folder in benchmarks.__path__:
        source = Path(folder, f"{op}.py")
        if source.is_file():
            return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
    return ""
