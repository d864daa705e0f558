"""How a communicator ends: by an error, by ``close``, or in a process that was forked."""

from __future__ import annotations

import os
from collections.abc import Callable

from fusedcomm import board
from fusedcomm.errors import ClosedError
from fusedcomm.waiting import Watch

CLOSED_TEXT = "this communicator was closed; Communicator.of(group) makes a new one"


class Life:
    """Whether a communicator may be used.

    Attributes:
        closed: whether it was given back.
        on_failure: what else is to be told of an error, which it is called with.
    """

    def __init__(self, watch: Watch) -> None:
        self.closed = False
        self.on_failure: Callable[[BaseException], None] | None = None
        self._watch = watch
        self._block = watch.own
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this process is the rank, and not one that was forked from it."""
        return self._pid == os.getpid()

    def require_usable(self) -> None:
        """Raise ``ClosedError`` if the communicator was closed or has failed."""
        if self.closed:
            raise ClosedError(CLOSED_TEXT)
        if self._pid != os.getpid():
            raise ClosedError(
                "this communicator belongs to the process that this one was forked from; a forked "
                "process is no rank"
            )
        if self._block.state != board.RUNNING:
            raise ClosedError(
                "this communicator is unusable after an error; close() it on every rank and make "
                f"a new one with Communicator.of(group). The error was: {self._watch.reason}"
            )

    def fail(self, error: BaseException) -> None:
        """Make the communicator unusable, and have the waits of all other ranks end."""
        self._watch.fail(error)
        if self.on_failure is not None:
            self.on_failure(error)
