"""``python -m fusedcomm COMMAND``: finds the command's module and runs it.

Only the module of the command that is asked for is imported, so that ``--help`` and the other
commands do not pay for it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: command -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "demo": (
        "fusedcomm.cli.demo",
        "run a real language model tensor-parallel on the CPU and check it against the "
        "unsharded one",
    ),
    "bench": (
        "fusedcomm.cli.bench",
        "measure an op against the plain collective and the bare matrix product",
    ),
    "doctor": (
        "fusedcomm.cli.doctor",
        "say what this machine has, what will run how, and what to do about what is missing",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own by default); returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m fusedcomm",
        description="Layers whose communication is hidden behind their own matrix products.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, summary) in COMMANDS.items():
        sentence = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=sentence)
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
