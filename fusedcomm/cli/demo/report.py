"""The demo's output: progress while it works, and text piece by piece. Uses rich if there is one.

Tables come from ``fusedcomm.cli.show``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from fusedcomm.cli.show import HAVE_RICH


class Report:
    """Writes the demo's output, one stage after the other.

    On a terminal, with rich, a stage shows a bar while it runs and leaves a line with its time;
    elsewhere the line comes in two halves.
    """

    def __init__(self) -> None:
        self._console: Any = None
        if HAVE_RICH:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
        self._bars: Any = None
        self._task: Any = None
        self._stage: str | None = None
        self._start = 0.0

    def stage(self, what: str) -> None:
        """Ends the running stage and begins ``what``."""
        self.end_stage()
        self._stage, self._start = what, time.perf_counter()
        if self._console is None or not self._console.is_terminal:
            self.text(f"{what} … ")
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bars.add_task(what, total=None)
        self._bars.start()

    def step(self, done: int, total: int) -> None:
        """The running stage has done ``done`` of ``total`` steps."""
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=total)

    def end_stage(self, *, failed: bool = False) -> None:
        """Ends the running stage, if there is one, and says how long it took."""
        if self._stage is None:
            return
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self.text(f"{self._stage} … ")
        seconds = time.perf_counter() - self._start
        self.line(f"{'failed after ' * failed}{seconds:.1f} s", style="red" if failed else "green")
        self._stage = None

    def text(self, text: str, *, style: str | None = None, end: str = "") -> None:
        """Writes ``text`` as it is, at once."""
        if self._console is not None:
            self._console.print(text, style=style, end=end, markup=False)
            self._console.file.flush()
        else:
            print(text, end=end, flush=True)

    def line(self, text: str = "", *, style: str | None = None) -> None:
        """Writes one line."""
        self.text(text, style=style, end="\n")

    def error(self, text: str) -> None:
        """Ends the running stage as failed and writes ``text`` to the standard error."""
        self.end_stage(failed=True)
        print(text, file=sys.stderr, flush=True)
