"""The demo's options, and its run: first the unsharded model, then the ranks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path

import torch

from fusedcomm.cli.demo.findings import Listener, conclude
from fusedcomm.cli.demo.reference import (
    SMOLLM2,
    MissingModelError,
    PretrainedModel,
    RandomModel,
    Reference,
)
from fusedcomm.cli.demo.report import Report
from fusedcomm.cli.demo.sharding import legal_ranks
from fusedcomm.cli.demo.worker import Job, work
from fusedcomm.planning import ENGINES
from fusedcomm.ranks import RankError, launch

PROMPT = "What is a tensor? Answer in two sentences."

#: Sizes that are not given. With the Triton engine, which interprets the device code on CPU ranks,
#: a layer takes about a second.
DEFAULTS = {"layers": SMOLLM2.layers, "tokens": 64, "prefill": 1000}
INTERPRETED_DEFAULTS = {"layers": 2, "tokens": 8, "prefill": 24}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``python -m fusedcomm demo``."""
    add = parser.add_argument
    add("--random", action="store_true", help="random weights of the same shape: needs no model")
    add("--ranks", type=int, default=3, metavar="N", help="number of processes (3)")
    add("--tokens", type=int, metavar="N", help="tokens to generate (64; with triton 8)")
    add("--prompt", default=PROMPT, metavar="TEXT", help=f'what to answer ("{PROMPT}")')
    add("--prefill", type=int, metavar="N", help="tokens of the real text (1000; with triton 24)")
    add("--layers", type=int, metavar="N", help="use the first N layers (all; with triton 2)")
    add(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="of the overlapped ops (auto); triton interprets the device code, which is slow",
    )
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="for files (out/demo)")


def run(args: argparse.Namespace) -> int:
    """Runs the demo.

    Returns 0; 1 when a token differs, the bound is broken or a rank fails; 2 when it cannot start,
    for bad options or something missing; 130 when it is interrupted.
    """
    report = Report()
    try:
        check_options(args)
        return _run(args, report)
    except (ValueError, MissingModelError) as error:
        report.error(str(error))
        return 2
    except RankError as error:
        report.error(str(error))
        return 1
    except KeyboardInterrupt:
        report.error("interrupted")
        return 130


def check_options(args: argparse.Namespace) -> None:
    """Fills in sizes that were not given, and makes ``--out``.

    Raises ``ValueError`` for what the machine or the model does not allow.
    """
    for name, size in (INTERPRETED_DEFAULTS if interprets(args) else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    if not sys.platform.startswith("linux"):
        raise ValueError("The demo needs Linux; elsewhere, run it in a container or in WSL.")
    legal = legal_ranks(SMOLLM2)
    if args.ranks not in legal:
        counts = ", ".join(map(str, legal[:-1])) + f" or {legal[-1]}"
        raise ValueError(
            f"--ranks {args.ranks} does not fit the model: its {SMOLLM2.kv_heads} key-value heads "
            f"are divided over the ranks, and each needs one. Use {counts}."
        )
    if not 1 <= args.layers <= SMOLLM2.layers:
        raise ValueError(f"--layers {args.layers}: the model has 1 to {SMOLLM2.layers}.")
    for name in ("tokens", "prefill"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1.")
    if not args.prompt:
        raise ValueError("--prompt is empty.")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error.strerror}.") from error


def interprets(args: argparse.Namespace) -> bool:
    """Whether the ranks run device code in Triton's interpreter."""
    return bool(args.engine == "triton")


def _run(args: argparse.Namespace, report: Report) -> int:
    report.stage("drawing random weights" if args.random else "loading SmolLM2-135M-Instruct")
    model: Reference = RandomModel(args.layers) if args.random else PretrainedModel(args.layers)
    text = _text(model, args.prefill)
    prompt = model.prompt(args.prompt)
    report.stage("running it unsharded, to compare with")
    with tempfile.TemporaryDirectory(prefix="fusedcomm-demo-") as folder:
        expected, logits = model.greedy(prompt, args.tokens), model.logits(text)
        file = Path(folder) / "model.pt"
        torch.save({"weights": model.weights(), "logits": logits}, file)
        job = Job(
            config=model.config,
            file=file,
            prompt=prompt,
            tokens=args.tokens,
            end=model.end,
            text=text,
            engine=args.engine,
            trace_file=args.out / "prefill.json",
            picture=args.out / "prefill.png" if _installed("matplotlib") else None,
            timed=not interprets(args),
        )
        if interprets(args):
            os.environ["TRITON_INTERPRET"] = "1"  # read where ranks import Triton
        report.stage(f"starting {args.ranks} rank{'s' * (args.ranks > 1)}")
        listener = Listener(report, model, job, args.prompt, expected)
        outcomes = launch(work, args.ranks, job, on_event=listener)
    report.end_stage()
    return conclude(report, job, outcomes, expected)


def _text(model: Reference, tokens: int) -> list[int]:
    """The first ``tokens`` token ids of the text that comes with the demo."""
    file = resources.files("fusedcomm.cli.demo") / "alice.txt"
    _, *paragraphs = file.read_text(encoding="utf-8").split("\n\n")  # the first says where from
    ids = model.encode("\n\n".join(" ".join(p.split()) for p in paragraphs))
    if tokens > len(ids):
        raise ValueError(f"--prefill {tokens}: the demo's text has {len(ids)} tokens.")
    return ids[:tokens]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
