"""What commands show in a terminal: tables and a progress display, with rich where it is installed.

Without rich (it is an extra, not a requirement) the same content comes as plain text; where the
output is not a terminal, progress is one line per step, so that logs stay readable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

try:
    import rich  # noqa: F401

    HAVE_RICH = True
except ImportError:
    HAVE_RICH = False


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is aligned left, numbers (all others) right.

    An empty row draws a line between groups of rows.
    """
    for row in rows:
        if row and len(row) != len(columns):
            raise ValueError(f"table {title!r} has {len(columns)} columns, got a row {list(row)}")
    if HAVE_RICH:
        _rich_table(title, columns, rows)
    else:
        print("\n".join(_plain_table(title, columns, rows)))


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        drawn.add_column(column, justify="right" if position else "left", no_wrap=position > 0)
    for row in rows:
        if row:
            drawn.add_row(*(Text(cell) for cell in row))
        else:
            drawn.add_section()
    # Into a file or a pipe the table must not be folded to the 80 columns rich assumes there.
    width = None if sys.stdout.isatty() else 132
    Console(width=width).print(drawn)


def _plain_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    full = [row for row in rows if row]
    widths = [max(len(row[c]) for row in [columns, *full]) for c in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    yield title
    yield line(columns)
    yield rule
    for row in rows:
        yield line(row) if row else rule


class Progress(Protocol):
    """What :func:`progress` gives to the block."""

    def update(self, done: float, text: str) -> None:
        """``done`` of the total is finished; ``text`` says what is being worked on."""


@contextmanager
def progress(total: float, title: str) -> Iterator[Progress]:
    """Show how far the block is: a bar in a terminal, else a line whenever ``text`` changes.

    It is written to stderr: stdout holds results alone.
    """
    if not (HAVE_RICH and sys.stderr.isatty()):
        yield _Lines(total, title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bars:
        yield _Bar(bars, bars.add_task("", total=total, title=title))


class _Bar:
    def __init__(self, bars: Any, task: Any):
        self.bars, self.task = bars, task

    def update(self, done: float, text: str) -> None:
        self.bars.update(self.task, completed=done, description=text)


class _Lines:
    def __init__(self, total: float, title: str):
        self.total, self.title, self.text = total, title, ""

    def update(self, done: float, text: str) -> None:
        if text != self.text:
            self.text = text
            print(f"{self.title}: {done / self.total:4.0%}  {text}", file=sys.stderr, flush=True)
