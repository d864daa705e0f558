"""The calls of a communicator, one after the other: announced, made by one thread, compared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fusedcomm.communicator.life import Life
from fusedcomm.waiting import Awaited, Watch


class Calls:
    """The call that this rank is in, and what it needs of the peers' as a whole.

    Attributes:
        aside: what calls began and later ones will end.
    """

    def __init__(self, watch: Watch, life: Life) -> None:
        self.aside: dict[int, Any] = {}
        self._watch, self._life = watch, life
        self._thread: int | None = None

    def announced(self, text: str) -> AbstractContextManager[None]:
        """A call, as ``Communicator.collective`` describes it."""
        return _Announced(self, self._watch, self._life, text)

    def require_turn(self) -> None:
        """Raise if this thread may not make a call now.

        Raises:
            ClosedError: the communicator is not usable.
            ValueError: it belongs to another thread.
        """
        self._life.require_usable()
        if torch._C._current_graph_task_id() != -1:
            return  # A backward pass; its caller waits for it, so the order of calls is kept.
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif self._thread != thread:
            raise ValueError(
                f"this communicator (channel {self._watch.channel!r}) belongs to another thread; a "
                "second thread needs its own: Communicator.of(group, channel='…')"
            )

    @property
    def text(self) -> str:
        """Within a call: its text, as on the board."""
        return self._watch.text

    @property
    def number(self) -> int:
        """Within a call: which of the communicator's it is; equal on all ranks."""
        return self._watch.number

    def await_peers(self, op: str, *, exchanging: bool = True) -> None:
        """Within a call: wait until every peer has begun the same one.

        Args:
            exchanging: whether a collective of torch.distributed follows. It must not be begun when
                a peer has failed since: a collective that nobody joins leaves the torch group out
                of step.
        """
        awaited = Awaited(op, self._watch.number, -1, "the call")
        for peer in self._watch.links.peers:
            self._watch.await_call(peer, awaited)
        if exchanging:
            self._watch.look(awaited)

    def await_any(self, op: str) -> Callable[[], None]:
        """Within a call: what a wait elsewhere (in a kernel) calls now and then.

        The function returned gives up the core, and raises when a peer is gone, has failed, or is
        in another call; see ``Watch``.
        """
        return self._watch.relaxer(Awaited(op, self._watch.number, -1, "a flag"))

    def compare_peers(self) -> None:
        """Within a call, when all peers' flags were seen: compare their calls with ours."""
        for peer in self._watch.links.peers:
            self._watch.compare(peer)

    def put_aside(self, begun: Any) -> int:
        """Within a call: keep what it began; a number for ``take_up``."""
        self.aside[self._watch.number] = begun
        return self._watch.number

    def take_up(self, number: int) -> Any:
        """Within a later call: what the call of this number began."""
        return self.aside.pop(number)


class _Announced:
    """A class, which costs half of what a generator does."""

    __slots__ = ("_calls", "_life", "_text", "_watch")

    def __init__(self, calls: Calls, watch: Watch, life: Life, text: str) -> None:
        self._calls, self._watch, self._life, self._text = calls, watch, life, text

    def __enter__(self) -> None:
        self._calls.require_turn()
        self._watch.post(self._text)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._life.fail(error)
