"""Print, for every kernel and chip, what its compiled code looks like."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import report
from .compiling import CHIPS


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code is 1 when a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._compiled", description=__doc__)
    parser.add_argument("--kernel", metavar="TEXT", help="only the cases with TEXT in their name")
    parser.add_argument("--chip", choices=CHIPS, action="append", help="only this chip")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    args = parser.parse_args(argv)
    return print_report(args.kernel, args.chip, args.json)


def print_report(kernel: str | None, chips: list[str] | None, file: Path | None) -> int:
    """Compile, print the table and what breaks a rule, write ``file``; returns the exit code."""
    wanted = report.selected(kernel, chips)
    if not wanted:
        print(f"no case has {kernel!r} in its name", file=sys.stderr)
        return 2
    found = []
    compiled = report.with_plain(wanted)
    for row in report.rows(wanted):
        found.append(row)
        print(f"{len(found)} of {len(compiled)}: {row.case} on {row.chip}", file=sys.stderr)
    print(f"triton {found[0].triton}")
    print(report.plain_text(found))
    for sentence in report.explanations(found):
        print(sentence)
    if file is not None:
        file.write_text(json.dumps([one.as_json() for one in found], indent=1) + "\n")
    return 1 if any(one.broken for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
