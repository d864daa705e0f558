"""Train the same model on 1, 2, 3 … tensor-parallel ranks and show how little that changes.

    python examples/compare_ranks.py                      # 200 steps, TP 1, 2, 3, float32
    python examples/compare_ranks.py --bf16 --out out/bf16

Prints, against the first: the largest relative difference of the losses over all steps, and the
largest ‖Δw‖ / ‖w‖ over all tensors at the end. Writes a table of these and all losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_lm import Settings, train

from fusedcomm.ranks import launch


def differences(found: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """How two results of ``train`` differ: the worst step's loss, and the worst tensor."""
    steps = zip(found["losses"], right["losses"], strict=True)
    tensors = {
        name: float((found["state"][name] - value).norm() / value.norm())
        for name, value in right["state"].items()
    }
    worst = max(tensors, key=lambda name: tensors[name])
    return {
        "loss": max(abs(mine - theirs) / theirs for mine, theirs in steps),
        "weights": tensors[worst],
        "worst tensor": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/compare_ranks"))
    given = parser.parse_args()
    settings = Settings(steps=given.steps, bf16=given.bf16, checkpoint_every=0)
    results: dict[int, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    print(
        "| TP | first loss | last loss | fall | Δloss / loss, worst step | ‖Δw‖ / ‖w‖, worst | of |"
    )
    print("|---|---|---|---|---|---|---|")
    for ranks in given.tp:
        start = time.perf_counter()
        result = launch(train, ranks, replace(settings, tp=ranks))[0]
        results[ranks] = result
        losses = result["losses"]
        row = {
            "tp": ranks,
            "first": losses[0],
            "last": losses[-1],
            "seconds": time.perf_counter() - start,
            **differences(result, results[given.tp[0]]),
        }
        rows.append(row)
        print(
            f"| {ranks} | {row['first']:.4f} | {row['last']:.4f} "
            f"| {1 - losses[-1] / losses[0]:.0%} | {row['loss']:.1e} "
            f"| {row['weights']:.1e} | {row['worst tensor']} |",
            flush=True,
        )
    given.out.mkdir(parents=True, exist_ok=True)
    everything = {"rows": rows, "losses": {n: r["losses"] for n, r in results.items()}}
    (given.out / "compare_ranks.json").write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
