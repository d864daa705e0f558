"""Collectives of torch.distributed within a call: waited for with this library's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fusedcomm.errors import FusedcommError
from fusedcomm.waiting import Awaited, Pending, Watch


class TorchCalls:
    """What the ranks of a communicator do through torch.distributed."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self._watch, self._device = watch, device

    def run(self, op: str, start: Callable[[], Pending | None]) -> None:
        """Start a collective and wait for it."""
        self.wait(op, self.start(op, start))

    def start(self, op: str, start: Callable[[], Pending | None]) -> Pending | None:
        """Start a collective, for ``wait``."""
        with self._own_errors(op):
            return start()

    def wait(self, op: str, work: Pending | None) -> None:
        """Wait for what was started."""
        if work is None:
            return
        with self._own_errors(op) as awaited:
            if self._watch.links.peers and self._device.type == "cpu":
                self._watch.await_work(work, awaited)
            else:
                work.wait()

    def explained(self, op: str, error: RuntimeError) -> FusedcommError:
        """Why a message through torch.distributed failed, as one of our own errors."""
        return self._watch.explained(error, Awaited(op, self._watch.number, -1, "the message"))

    @contextmanager
    def _own_errors(self, op: str) -> Iterator[Awaited]:
        awaited = Awaited(op, self._watch.number, -1, "the collective")
        try:
            yield awaited
        except RuntimeError as error:
            if isinstance(error, FusedcommError):
                raise
            raise self._watch.explained(error, awaited) from error
