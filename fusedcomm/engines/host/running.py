"""Executes programs on shared memory: a message is read where its sender has it.

Every rank has the vector in its slot, in its own memory, but only those parts of it that peers
read: what is sent as this rank's input is copied in, what is received and sent on is received
there, and everything else goes straight to where the result belongs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.combining import combine
from fusedcomm.engines.host.exchanging import Resident, Writing, steps
from fusedcomm.planning import collectives as planning
from fusedcomm.planning.collectives import space
from fusedcomm.programs import all_reduce_programs
from fusedcomm.programs.all_reduce import Domains
from fusedcomm.programs.steps import Send
from fusedcomm.protocol import Call
from fusedcomm.trace import is_open, span


class _Give(NamedTuple):
    """``Send``s of one range: whether it is copied in first, and (peer, message) of each signal."""

    signals: tuple[tuple[int, int], ...]
    start: int
    stop: int
    copies: bool


class _Take(NamedTuple):
    """A ``Receive``: what is waited for, then (source, message, fresh) of each part in order."""

    awaited: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int, bool], ...]
    start: int
    stop: int
    kept: bool
    final: bool
    complete: bool


Stages = list[list[_Give | _Take]]


@lru_cache(maxsize=256)
def stages(algorithm: str, size: int, n: int, rank: int, domains: Domains | None) -> Stages:
    """The program of ``rank``, cut where it comes to wait for what its own messages bring about.

    The first stage sends what is this rank's input; every other one begins with the receives that
    the messages of the one before answer. The arguments are those of ``all_reduce_programs``.
    """
    program = all_reduce_programs(algorithm, size, n, domains)[rank]
    steps: Stages = [[]]
    copied: set[tuple[int, int]] = set()  # one copy serves all who are sent a range
    for step in program:
        if isinstance(step, Send):
            place = (step.start, step.stop)
            copies = step.fresh and place not in copied
            copied.add(place)
            if len(steps) == 1 and not step.fresh:
                steps.append([])
            signals: tuple[tuple[int, int], ...] = ((step.peer, step.message),)
            before = steps[-1][-1] if steps[-1] else None
            if isinstance(before, _Give) and place == (before.start, before.stop) and not copies:
                signals, copies = before.signals + signals, before.copies
                steps[-1].pop()
            steps[-1].append(_Give(signals, *place, copies))
            continue
        parts = tuple(zip(step.sources, step.messages, step.fresh, strict=True))
        awaited = tuple((source, message) for source, message, _ in parts if source != rank)
        if len(steps) == 1 or isinstance(steps[-1][-1], _Give):
            steps.append([])
        place = (step.start, step.stop)
        steps[-1].append(_Take(awaited, parts, *place, step.kept, step.final, step.complete))
    return steps


class Execution:
    """One rank's program on one slot. All stages must be run, in their order.

    Attributes:
        call: the slot's use.

    Flags: ready[me][message] on the receiver, awaited there by its ``Receive``; consumed on every
    peer after the last stage, whether or not anything was read of it: the next program may be
    another.
    """

    def __init__(
        self,
        comm: Communicator,
        op: str,
        program: Stages,
        x: Tensor,
        out: Tensor,
        reduction: str,
        resident: Resident | None,
        writing: Writing,
    ) -> None:
        """Take the slot.

        Args:
            x, out: flat, contiguous, of the program's size; they may be the same.
            reduction: "sum", "avg", "max" or "min".
            resident: the symmetric tensor in which every rank's x lies, and the offset in bytes.
            writing: takes the time in which x is copied in.
        """
        self.rank = comm.rank
        self.peers = comm.successors
        self.stages = program
        self._x, self._out = x, out
        self._size = x.shape[0]
        self._dtype = x.dtype
        self._bytes = x.dtype.itemsize
        self._reduction = reduction
        self._divisor = comm.world_size if reduction == "avg" else 1
        self._resident = resident
        self._copy, self._wait = steps()
        self._writing = writing
        self.call: Call = comm.memory.take(op, space(self._size * self._bytes, comm.world_size))

    def run(self, stage: int) -> None:
        """Run a stage; the result is there when the last one is done."""
        if stage == 0:
            self.call.await_readers(self.peers)
        for step in self.stages[stage]:
            if isinstance(step, _Give):
                self._give(step)
            else:
                self._take(step)
        if stage == len(self.stages) - 1:
            self.call.consumed_all(self.peers)

    def await_done(self) -> None:
        """Wait until every peer has read what it reads of x in place."""
        self.call.await_done(self.peers)

    def _give(self, step: _Give) -> None:
        if step.copies and self._resident is None:
            peer, message = step.signals[0]
            target = self._own(step.start, step.stop, message)
            part = self._range(self._x, step.start, step.stop)
            with self._writing:
                self._copy(target, part, self.rank, "for", peer)
        for peer, message in step.signals:
            self.call.signal(peer, message)

    def _take(self, step: _Take) -> None:
        for source, message in step.awaited:
            self._wait(self.call, source, message)
        start, stop = step.start, step.stop
        if start == stop:
            return
        parts = [self._part(start, stop, *part) for part in step.parts]
        targets = []
        if step.kept:
            targets.append(self._own(start, stop, step.awaited[-1][1] if step.awaited else 0))
        if step.final:
            targets.append(self._range(self._out, start, stop))
        divisor = self._divisor if step.complete else 1
        if not is_open():
            combine(parts, targets, self._reduction, divisor)
            return
        kind = "reduce" if len(parts) > 1 else "copy"
        with span(kind, f"elements {start}:{stop}", rank=self.rank):
            combine(parts, targets, self._reduction, divisor)

    def _part(self, start: int, stop: int, source: int, message: int, fresh: bool) -> Tensor:
        """What a source has in a range."""
        if source == self.rank and fresh:
            return self._range(self._x, start, stop)
        offset, shape = start * self._bytes, (stop - start,)
        if fresh and self._resident is not None:
            tensor, base = self._resident
            place = (source, base + offset, shape, self._dtype, message)
            return self.call.read_symmetric(tensor, *place)
        return self.call.read(source, offset, shape, self._dtype, message)

    def _own(self, start: int, stop: int, message: int) -> Tensor:
        """A range of this rank's slot, to be written."""
        shape = (stop - start,)
        return self.call.write(self.rank, start * self._bytes, shape, self._dtype, message)

    def _range(self, vector: Tensor, start: int, stop: int) -> Tensor:
        return vector if stop - start == self._size else vector.narrow(0, start, stop - start)


def pieces_of(comm: Communicator, x: Tensor) -> list[tuple[int, int]]:
    """Cut a vector into pieces that fit into a slot; at least one, which may be empty."""
    size = x.shape[0]
    step = max(1, planning.piece_bytes(comm.world_size) // x.dtype.itemsize)
    if size <= step:
        return [(0, size)]
    return [(start, min(start + step, size)) for start in range(0, size, step)]
