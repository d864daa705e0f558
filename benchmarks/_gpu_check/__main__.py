"""``make gpu-check``: is the library right on this machine's GPU, and what do its flags cost?

    python -m fusedcomm.benchmarks._gpu_check [--quick] [--out FILE]     # from the source tree

Runs ``tests/gpu`` on 2, 1 and 4 ranks that share one GPU (and on a GPU each, where there are
several), then measures. Prints every result as it comes and the table last; writes JSON. It takes
at most 8 minutes: every part has a limit, and one that is over it fails and is left behind.

Exit code: 0 if all is well, 1 if something is wrong, 2 if nothing can be checked here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 480.0
#: Ranks that share a GPU, and seconds for their checks, in this order.
#: (The first ones find no kernel compiled yet.)
PARTS = ((2, 190.0), (1, 60.0), (4, 90.0))
SPREAD_S, MEASURE_S = 50.0, 90.0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, no measurements")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check.json"), metavar="FILE")
    args = parser.parse_args(words)
    why = _lacking()
    if why is not None:
        print(f"gpu-check: nothing to check: {why}", file=sys.stderr)
        return 2
    return _run(args)


def _lacking() -> str | None:
    """What is missing, in one sentence."""
    for name, least in (("torch", (2, 11)), ("triton", (3, 6))):
        try:
            found = __import__(name).__version__
        except ImportError as error:
            return f"{name} cannot be imported ({error})"
        if tuple(int(part) for part in found.split(".")[:2]) < least:
            return f"{name} {found} is older than {least[0]}.{least[1]}"
    try:
        from tests.gpu.running import lacking
    except ImportError as error:
        return f"it must be run from the source tree's top folder ({error})"
    return lacking()


def _run(args: argparse.Namespace) -> int:
    import torch

    from fusedcomm.benchmarks.harness.machine import describe

    end = time.monotonic() + LIMIT_S
    report: dict[str, Any] = {**describe(), "gpus": _gpus(), "checks": [], "measured": []}
    print(f"{report['gpus'][0]['name']}, torch {torch.__version__}", flush=True)
    problems: list[str] = []
    devices = torch.cuda.device_count()
    parts = PARTS[:1] if args.quick else PARTS
    for world_size, limit in parts:
        problems += _check(report, world_size, 1, min(limit, end - time.monotonic()))
    if devices > 1 and not args.quick:
        many = min(devices, 8)
        problems += _check(report, many, many, min(SPREAD_S, end - time.monotonic()))
    if not args.quick:
        problems += _measure(report, min(MEASURE_S, end - time.monotonic()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**report, "problems": problems}, indent=1) + "\n")
    print("\n".join(_table(report)))
    right = sum(not check["problem"] for check in report["checks"])
    print(f"{right} of {len(report['checks'])} checks passed; written to {args.out}")
    return 1 if problems else 0


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "cuda": torch.version.cuda,
            }
        )
    return found


def _check(report: dict[str, Any], world_size: int, devices: int, limit_s: float) -> list[str]:
    """Run the checks on so many ranks; what is wrong."""
    from tests.gpu.checks import CHECKS
    from tests.gpu.running import Result, run

    where = "one GPU" if devices == 1 else f"{devices} GPUs"
    what = f"{world_size} rank{'s' * (world_size > 1)} on {where}"
    problems = []

    def note(result: Result) -> None:
        state = "FAILED" if result.problem else "ok"
        print(f"  {what}: {result.name:<26} {state} {result.seconds:6.1f} s", flush=True)
        if result.problem:
            problems.append(f"{what}: {result.name}: {result.problem}")
            print("    " + result.problem.rstrip().replace("\n", "\n    "), flush=True)
        report["checks"].append(
            {
                "ranks": world_size,
                "gpus": devices,
                "name": result.name,
                "seconds": round(result.seconds, 2),
                "problem": result.problem,
            }
        )

    run(CHECKS, world_size, devices=devices, timeout_s=max(limit_s, 1.0), on_result=note)
    return problems


def _measure(report: dict[str, Any], limit_s: float) -> list[str]:
    from fusedcomm.benchmarks._gpu_check.measure import measure
    from fusedcomm.ranks import RankError, launch

    problems: list[str] = []

    def note(rank: int, event: Any) -> None:
        kind, value = event
        if kind == "problem":
            problems.append(value)
            print(f"  {value}", flush=True)
        elif kind == "row":
            report["measured"].append(value)
            print(f"  measured {value['product']}", flush=True)
        else:
            report["calls"] = value

    try:
        launch(measure, 1, on_event=note, threads=4, timeout_s=max(limit_s, 1.0))
    except RankError as error:
        problems.append(f"measuring: {error}")
        print(f"  measuring: {error}", flush=True)
    return problems


def _table(report: dict[str, Any]) -> list[str]:
    """The measurements as text."""
    if not report["measured"]:
        return ["nothing was measured"]
    titles = ["product (bf16)", "m, n, k", "cuBLAS", "plain", "waiting", "signalling"]
    titles += ["waiting/cuBLAS", "signalling/cuBLAS", "wait us", "signal us"]
    lines = [titles]
    for found in report["measured"]:
        speeds = found["tflops"]
        lines.append(
            [
                found["product"],
                "x".join(map(str, found["m, n, k"])),
                *(f"{speeds[path]:.0f}" for path in ("cuBLAS", "plain", "waiting", "signalling")),
                f"{found['of cuBLAS']['waiting']:.2f}",
                f"{found['of cuBLAS']['signalling']:.2f}",
                f"{found['waiting costs, us']:.1f}",
                f"{found['signalling costs, us']:.1f}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    table = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    table.insert(0, "TFLOP/s; costs in us against the plain kernel, over 8 ranks' chunks")
    if "calls" in report:
        calls = report["calls"]
        table.append(f"a call's begin {calls['begin']} us, end {calls['end']} us, 8 ranks")
    return table


if __name__ == "__main__":
    sys.exit(main())
