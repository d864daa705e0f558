"""Ranks on this machine: start them, send them functions, and lose none of them.

    def double(rank, x):                 # importable: it is sent by name
        return 2 * x[rank]

    with RankPool(3) as pool:
        assert pool.run(double, [1, 2, 3]) == [2, 4, 6]

A rank is a process with a gloo process group as its default group. What its function prints goes
where this process's output went when the pool was made.

| what happens                | what the caller sees                                               |
|-----------------------------|--------------------------------------------------------------------|
| a rank raises               | the open communicators of that rank are aborted, so that the others|
|                             | stop waiting for it; ``RankError`` with every traceback            |
| a rank dies                 | ``RankError`` that names the signal or exit code                   |
| a rank does not finish      | ``RankError`` with the stacks of all its threads                   |
| Ctrl-C, or any exception    | it propagates, after the ranks were killed                         |
| this process dies           | the ranks are killed                                               |
"""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from fusedcomm.ranks.launcher import Ended, Launcher
from fusedcomm.ranks.outcomes import Outcome, RankError, failures
from fusedcomm.ranks.rank import STACKS_SIGNAL
from fusedcomm.ranks.request import Request, adopting_main
from fusedcomm.ranks.wire import Channel

#: What is told of the values that ranks send: the rank, the value.
OnEvent = Callable[[int, Any], None]

_JOIN_S = 60.0  # for new ranks to form their group
_SETTLE_S = 5.0  # in run(), after the first failure: for the other ranks to say what they saw
_STACKS_S = 1.0  # for a rank to write its stacks

# One machine, and as many ranks as cores or more. That the launcher has a single thread, and can
# fork, depends on the first two.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class RankPool:
    """Ranks that are started once and reused. Not for use from several threads.

    A pool is ``broken`` once a call did not return on every rank: its ranks are gone by then, and
    only ``restart`` and ``close`` are left to do. Restarting takes some ten milliseconds, a new
    pool as long as importing torch.
    """

    def __init__(
        self,
        world_size: int,
        *,
        env: Mapping[str, str] | None = None,
        threads: int = 1,
        pin: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        """Starts the ranks and waits until they have joined their group.

        Args:
            world_size: how many ranks, 1 to 100.
            env: environment variables of the ranks, on top of this process's; they are set before
                anything is imported.
            threads: torch's threads in each rank.
            pin: bind rank r to the r-th core that this process may use, wrapping around.
            preload: names of modules to import once, for all ranks and also for those that
                ``restart`` starts. Importing them must start no thread: ranks are forked.

        Raises:
            RuntimeError: what starts the ranks could not, or a module of ``preload`` could not be
                imported or has started a thread; its own error output says which.
        """
        if not 1 <= world_size <= 100:
            raise ValueError(f"world_size must be 1 to 100, got {world_size}")
        if adopting_main():
            raise RuntimeError(
                "ranks import the main program: guard it, if __name__ == '__main__':"
            )
        self.world_size = world_size
        self._threads, self._pin = threads, pin
        self.broken: str | None = None  # why, once it is
        self._channels: list[Channel] = []
        self._stacks: list[int] = []  # a descriptor for each rank
        self._ended: dict[int, Ended] = {}  # the ranks that are no more
        self.closed = False
        self._launcher = Launcher({**os.environ, **_ENVIRONMENT, **(env or {})}, preload)
        try:
            self._fork()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        on_event: OnEvent | None = None,
    ) -> list[Any]:
        """Calls ``fn(rank, *args)`` on every rank; returns the results by rank.

        Args:
            fn: importable by name; its arguments and results can be pickled. Tensors travel by
                value, through CPU memory. torch's generator has the same seed at every call, on
                every rank.
            timeout_s: seconds for the whole call; ``math.inf`` for no limit.
            on_event: if given, ranks call ``fn(rank, emit, *args)`` instead, and for every
                ``emit(value)`` there ``on_event(rank, value)`` is called here, in order for each
                rank.

        Raises:
            RankError: a rank raised, died, or did not finish in time. Once a rank has failed, the
                others have 5 seconds to finish.
        """
        outcomes = self._call(fn, args, timeout_s, _SETTLE_S, on_event)
        if failures(outcomes):
            raise RankError(_name(fn), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[Outcome]:
        """As ``run``, but returns how the call ended on each rank, whatever that is.

        For tests of faults: a rank that dies or raises does not shorten the others' time.
        """
        return self._call(fn, args, timeout_s, timeout_s)

    def restart(self) -> None:
        """Puts new ranks in the place of the old ones, which are killed if they still live."""
        if self.closed:
            raise RuntimeError("this pool is closed")
        try:
            if self._channels:
                self._end_ranks()
            self._fork()
        except BaseException:
            self.close()
            raise
        self.broken = None

    def close(self) -> None:
        """Ends all processes and returns when they are gone; idempotent.

        The ranks are killed: nothing that they hold outlives them.
        """
        self.closed = True
        self._drop_descriptors()
        self._launcher.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.close()

    # The ranks' processes

    def _fork(self) -> None:
        """New ranks; returns when all have joined their group."""
        self._ended.clear()
        with ExitStack() as passed:
            store = os.memfd_create("store")
            passed.callback(os.close, store)
            descriptors = [store]
            for _ in range(self.world_size):
                ours, theirs = socket.socketpair()
                passed.enter_context(theirs)
                self._channels.append(Channel(ours))
                self._stacks.append(os.memfd_create("stacks"))
                descriptors += [theirs.fileno(), self._stacks[-1]]
            self._launcher.fork(self.world_size, descriptors, threads=self._threads, pin=self._pin)
        outcomes = self._gather(_JOIN_S, settle_s=_SETTLE_S)
        if failures(outcomes):
            raise RankError("joining the process group", outcomes)

    def _end_ranks(self) -> None:
        """Kills the ranks, and returns when they are gone."""
        self._launcher.kill()
        while len(self._ended) < self.world_size:
            self._note_end()
        self._drop_descriptors()

    def _note_end(self) -> None:
        end = self._launcher.ended()
        self._ended[end.rank] = end

    def _drop_descriptors(self) -> None:
        for channel in self._channels:
            channel.close()
        for descriptor in self._stacks:
            os.close(descriptor)
        self._channels.clear()
        self._stacks.clear()

    # Calls

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        settle_s: float,
        on_event: OnEvent | None = None,
    ) -> list[Outcome]:
        if self.closed:
            raise RuntimeError("this pool is closed")
        if self.broken is not None:
            raise RuntimeError(f"this pool is broken, restart() it first: {self.broken}")
        request = pickle.dumps(Request.of(fn, args, on_event is not None))
        try:
            for channel in self._channels:
                with suppress(ConnectionError):  # that rank has died: _gather finds out
                    channel.send(request)
            outcomes = self._gather(timeout_s, settle_s, on_event)
            if failed := failures(outcomes):
                self.broken = f"in {_name(fn)}, rank {failed[0].rank} {failed[0].summary}"
                self._end_ranks()
        except BaseException:
            self.close()
            raise
        return outcomes

    def _gather(
        self, timeout_s: float, settle_s: float, on_event: OnEvent | None = None
    ) -> list[Outcome]:
        """How every rank ended its current call, within ``settle_s`` of the first failure."""
        limit = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        talking = dict(enumerate(self._channels))  # ranks whose answer may still come
        while len(outcomes) < self.world_size and (left := limit - time.monotonic()) > 0:
            sources: list[Any] = [self._launcher, *talking.values()]
            ready, _, _ = select.select(sources, [], [], None if left == math.inf else left)
            if self._launcher in ready:
                self._note_end()
            for rank, channel in list(talking.items()):
                if channel not in ready:
                    continue
                try:
                    message = pickle.loads(channel.receive())
                except EOFError:  # it died: the launcher will tell how
                    del talking[rank]
                    continue
                if isinstance(message, Outcome):
                    del talking[rank]
                    outcomes[rank] = message
                elif on_event is not None:
                    on_event(rank, message.value)
            for rank, end in self._ended.items():
                # All that it said before it ended lies in the channel, and is read first.
                if rank not in outcomes and not (rank in talking and talking[rank].readable()):
                    talking.pop(rank, None)
                    outcomes[rank] = Outcome(rank, "died", end.at_ns, exit_code=end.exit_code)
            if any(not outcome.ok for outcome in outcomes.values()):
                limit = min(limit, time.monotonic() + settle_s)
                settle_s = math.inf
        outcomes.update(self._unfinished(set(range(self.world_size)) - outcomes.keys()))
        return [outcomes[rank] for rank in range(self.world_size)]

    def _unfinished(self, ranks: set[int]) -> dict[int, Outcome]:
        """The outcomes of ranks that are still at work, with their stacks."""
        for rank in ranks:
            self._launcher.signal(rank, STACKS_SIGNAL)
        limit = time.monotonic() + _STACKS_S
        sizes = [0]
        while ranks and time.monotonic() < limit:
            time.sleep(0.05)
            before, sizes = sizes, [os.fstat(self._stacks[rank]).st_size for rank in ranks]
            if all(sizes) and sizes == before:
                break
        at_ns = time.monotonic_ns()
        return {
            rank: Outcome(
                rank,
                "unfinished",
                at_ns,
                details=os.pread(self._stacks[rank], 1 << 20, 0).decode()
                or "it did not even write its stacks: stopped, or in the kernel",
            )
            for rank in ranks
        }


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)
