"""Work beside the kernels of a call: a stream of its own on a GPU, the same thread on CPU ranks.

On a GPU the copies of a call run on a second stream of high priority. ``fork`` puts what comes on
it behind everything queued on the call's own stream so far; ``join`` puts what comes on the call's
stream behind the copies. On CPU ranks everything runs in the order in which it is written down, so
the three say nothing there; the race checker takes them at their word all the same, and so finds a
fork or a join that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the current one."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """
        Args:
            stream: None on CPU ranks.
        """
        self._stream = stream

    def fork(self) -> None:
        """What is entered from now on comes after all that is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        """What is queued on the current stream from now on comes after all that was entered."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, torch's operations go to this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
