"""``python -m fusedcomm doctor``: what is here, what will run how, and what to do about the rest.

The exit code is 1 when something that ought to work does not (ranks that cannot run, GPUs that
claim peer access and do not have it), and 0 otherwise: a machine without a GPU is in good health.
"""

from __future__ import annotations

import argparse
import json

from fusedcomm.cli.doctor.findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``doctor`` to ``parser``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--no-ranks", action="store_true", help="do not start two ranks to see whether they work"
    )


def run(args: argparse.Namespace) -> int:
    """Examine and report; returns the exit code."""
    from fusedcomm.cli.doctor import engines, gpus, machine, ranks

    findings = [*machine.examine(), *gpus.examine()]
    if not args.no_ranks:
        findings += ranks.examine()
    findings += engines.examine()
    if args.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        _print(findings)
    return 1 if any(finding.broken for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    section = ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(f"\n{section}" if finding is not findings[0] else section)
        mark = "!" if finding.broken else " "
        print(f"{mark} {finding.name.ljust(width)}  {finding.text}")
    advice = [finding for finding in findings if finding.advice]
    print("\nwhat to do" if advice else "\nnothing to do")
    for finding in advice:
        mark = "!" if finding.broken else "-"
        print(f"{mark} {finding.name}: {finding.advice}")
