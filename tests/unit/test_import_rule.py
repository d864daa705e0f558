"""Imports go one way: nn, parallel, cli -> ops -> planning, engines -> protocol ... -> torch."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The parts of fusedcomm, lowest first. A part imports from its own layer and from those below.
LAYERS = [
    {"errors", "trace", "trace_chrome", "trace_plot"},
    {
        "between",
        "board",
        "circles",
        "crossing",
        "groups",
        "kernels",
        "pairs",
        "place",
        "programs",
        "protocol",
        "rendezvous",
        "schedule",
        "symmetric",
        "topology",
        "waiting",
    },
    {"communicator", "engines", "gpu", "planning"},
    {"ops"},
    {"integrations", "nn", "parallel"},
    {""},  # the package itself, which gathers the public names
    {"ranks"},
    {"__main__", "benchmarks", "cli"},
    {"testing"},
]
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

#: What must be there besides Python; see pyproject.toml.
REQUIRED = {"numpy", "torch", "triton"}
#: The parts that are only used with one of the extras.
OPTIONAL = {"__main__", "benchmarks", "cli", "integrations", "trace_plot"}


@dataclass(frozen=True)
class Import:
    module: str  # fully qualified; for `from a import b` it is a.b
    line: int
    at_once: bool  # as the importing module is imported, and not only for type checkers


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in ``source``, those in functions and for type checkers included."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, at_once: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, at_once)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            if node.module:
                base = [*base, node.module]
            for name in node.names:
                yield Import(".".join([*base, name.name]), node.lineno, at_once)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            at_once = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            at_once = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_once)

    return visit(ast.parse(source), True)


def part_of(module: str) -> str | None:
    """The part of fusedcomm that a name belongs to; None if it is not fusedcomm's."""
    if module.split(".")[0] != "fusedcomm":
        return None
    part = module.split(".")[1] if "." in module else ""
    return part if part in LAYER else ""  # `from fusedcomm import all_gather_linear`


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module's imports do against the rule, one sentence each."""
    own = part_of(module)
    assert own is not None
    found = []
    for imported in imports_of(source, module, is_package):
        part = part_of(imported.module)
        where = f"{module}:{imported.line} imports {imported.module}"
        top = imported.module.split(".")[0]
        if own == "schedule" and top != "__future__":
            found.append(f"{where}: schedule imports nothing at all")
        elif own == "kernels" and part not in (None, "kernels"):
            found.append(f"{where}: kernels imports nothing else of fusedcomm")
        elif part == "testing" and own != "testing":
            found.append(f"{where}: testing is imported by none")
        elif part is not None and LAYER[part] > LAYER[own]:
            found.append(f"{where}, which lies above it")
        elif (
            part is None
            and imported.at_once
            and own not in OPTIONAL
            and top not in REQUIRED | sys.stdlib_module_names
        ):
            found.append(f"{where}, which an installation need not have")
    return found


def modules() -> dict[str, Path]:
    """Every module of the package by name, and its file."""
    found = {}
    # The folders that are linked into the package are read where they really lie.
    for folder, prefix in (
        ("fusedcomm", []),
        ("kernels", ["kernels"]),
        ("benchmarks", ["benchmarks"]),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = ["fusedcomm", *prefix, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle, the first one repeated at the end; empty if there is none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]
        for following in sorted(graph[path[-1]] - done):
            if found := walk([*path, following]):
                return found
        done.add(path[-1])
        return []

    return next((found for node in graph if (found := walk([node]))), [])


def test_every_part_has_a_layer() -> None:
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts <= LAYER.keys(), "say in LAYERS where these belong"


def test_imports_go_one_way() -> None:
    everything = modules()
    assert len(everything) > 10
    found = [
        violation
        for name, path in everything.items()
        for violation in violations(path.read_text(), name, path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_modules_import_each_other_in_no_circle() -> None:
    everything = modules()
    graph: dict[str, set[str]] = {}
    for name, path in everything.items():
        graph[name] = set()
        for imported in imports_of(path.read_text(), name, path.name == "__init__.py"):
            # A submodule if there is one of that name, else a name in the module.
            for target in (imported.module, imported.module.rpartition(".")[0]):
                if target in everything and imported.at_once:
                    graph[name].add(target)
                    break
        graph[name].discard(name)
    assert cycle(graph) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("fusedcomm.protocol", "import fusedcomm.ops", "lies above"),
        ("fusedcomm.protocol", "from fusedcomm import ops", "lies above"),
        ("fusedcomm.protocol", "from . import ops", "lies above"),
        ("fusedcomm.engines.host.scatter", "from ...ops.tensor_parallel import x", "lies above"),
        (
            "fusedcomm.ops.checks",
            "def f():\n    from fusedcomm.nn import linear",
            ":2 .*lies above",
        ),
        ("fusedcomm.ops.checks", "if TYPE_CHECKING:\n    import fusedcomm.nn", "lies above"),
        ("fusedcomm.ops.checks", "import fusedcomm as fc", "lies above"),
        ("fusedcomm.ops.checks", "from fusedcomm import all_gather_linear", "lies above"),
        ("fusedcomm.nn.linear", "from fusedcomm.cli import show", "lies above"),
        ("fusedcomm.cli.main", "from fusedcomm.testing import run_ranks", "imported by none"),
        ("fusedcomm.schedule", "import math", "nothing at all"),
        ("fusedcomm.kernels.gemm", "from fusedcomm import errors", "nothing else of fusedcomm"),
        ("fusedcomm.trace", "import matplotlib.pyplot", "need not have"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    (found,) = violations(source, module)
    assert re.search(complaint, found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fusedcomm.ops.checks", "from fusedcomm.planning import Plan\nimport torch, math"),
        ("fusedcomm.engines.host", "from fusedcomm.communicator import Communicator"),
        ("fusedcomm.schedule", "from __future__ import annotations"),
        ("fusedcomm.trace", "def plot():\n    import matplotlib.pyplot"),
        ("fusedcomm.cli.show", "import rich\nimport fusedcomm as fc"),
        ("fusedcomm.kernels.gemm", "import triton\nfrom fusedcomm.kernels import flags"),
        ("fusedcomm.ranks.pool", "import fusedcomm\nfrom fusedcomm.ops import tensor_parallel"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert cycle(graph) == ["b", "d", "b"]
    assert cycle(graph | {"d": {"c"}}) == []
