"""Every case compiled once a session. Nothing here needs torch: see ``make test-compile-all``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from benchmarks._compiled import report

#: But for what the engine does up to a launch, which is Python on torch.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_launches*.py"]


class Rows:
    """What is found in every case, by its name and the chip's.

    Processes compile ahead; whoever asks for a row waits for that one and those before it only.
    """

    def __init__(self) -> None:
        self._coming: Iterator[report.Row] = iter(report.rows(report.selected()))
        self._found: dict[tuple[str, str], report.Row] = {}

    def __getitem__(self, key: tuple[str, str]) -> report.Row:
        while key not in self._found:
            row = next(self._coming)
            self._found[row.case, row.chip] = row
        return self._found[key]

    def all(self) -> list[report.Row]:
        return [self[case.name, chip] for case, chip in report.selected()]

    def begin(self) -> None:
        self[next((case.name, chip) for case, chip in report.selected())]


@pytest.fixture(scope="session")
def rows() -> Rows:
    return Rows()


@pytest.fixture(scope="session", autouse=True)
def ahead(request: pytest.FixtureRequest) -> None:
    """Other tests compile in their own process; the rows' processes are at work meanwhile."""
    if any("rows" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("rows").begin()
