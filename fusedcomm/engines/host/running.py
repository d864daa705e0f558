"""Executes programs on shared memory: a message is read where its sender has it.

Every rank has the vector in its slot, in its own memory, but only those parts of it that peers
read: what is sent as this rank's input is copied in, what is received and sent on is received
there, and everything else goes straight to where the result belongs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.host.combining import combine
from fusedcomm.planning.collectives import space
from fusedcomm.programs import all_reduce_programs
from fusedcomm.programs.all_reduce import Domains
from fusedcomm.programs.steps import Program, Receive, Send, messages_per_pair
from fusedcomm.protocol import Call
from fusedcomm.schedule import successors
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import is_open, span


class Stages(NamedTuple):
    """One rank's program, cut where it comes to wait for what its own messages bring about.

    Attributes:
        steps: of each stage. The first one sends what is this rank's input; every other one begins
            with the receives that the messages of the one before answer.
        messages: the most that one rank sends to another.
    """

    steps: list[Program]
    messages: int


@lru_cache(maxsize=256)
def stages(algorithm: str, size: int, n: int, rank: int, domains: Domains | None) -> Stages:
    """The stages of ``rank``; the arguments are those of ``all_reduce_programs``."""
    programs = all_reduce_programs(algorithm, size, n, domains)
    steps: list[Program] = [[]]
    for step in programs[rank]:
        if isinstance(step, Send) and step.fresh and len(steps) == 1:
            steps[0].append(step)
            continue
        if len(steps) == 1 or (isinstance(step, Receive) and isinstance(steps[-1][-1], Send)):
            steps.append([])
        steps[-1].append(step)
    return Stages(steps, messages_per_pair(programs))


class Execution:
    """One rank's program on one slot. All stages must be run, in their order.

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
        resident: tuple[SymmetricTensor, int] | None,
    ) -> None:
        """Take the slot.

        Args:
            x, out: flat, contiguous, of the program's size; they may be the same.
            reduction: "sum", "avg", "max" or "min".
            resident: the symmetric tensor in which every rank's x lies, and the offset in bytes.
        """
        self.rank = comm.rank
        self.peers = successors(comm.rank, comm.world_size)
        self.stages = program.steps
        self._x, self._out = x, out
        self._size = x.shape[0]
        self._dtype = x.dtype
        self._reduction = reduction
        self._divisor = comm.world_size if reduction == "avg" else 1
        self._resident = resident
        self._copied: set[tuple[int, int]] = set()
        nbytes = self._size * self._dtype.itemsize
        self._call: Call = comm.take(op, space(nbytes, program.messages))

    def run(self, stage: int) -> None:
        """Run a stage; the result is there when the last one is done."""
        if stage == 0:
            for peer in self.peers:
                self._call.await_reader(peer)
        for step in self.stages[stage]:
            if isinstance(step, Send):
                self._send(step)
            else:
                self._receive(step)
        if stage == len(self.stages) - 1:
            for peer in self.peers:
                self._call.consumed(peer)

    def await_done(self) -> None:
        """Wait until every peer has read what it reads of x in place."""
        for peer in self.peers:
            self._call.await_done(peer)

    def _send(self, step: Send) -> None:
        if step.fresh and self._resident is None and (step.start, step.stop) not in self._copied:
            self._copied.add((step.start, step.stop))
            with span("copy", "copy in", rank=self.rank):
                self._own(step, step.message).copy_(self._range(self._x, step))
        self._call.signal(step.peer, step.message)

    def _receive(self, step: Receive) -> None:
        for source, message in zip(step.sources, step.messages, strict=True):
            if source != self.rank:
                self._wait(source, message)
        if step.start == step.stop:
            return
        parts = [
            self._part(step, source, message, fresh)
            for source, message, fresh in zip(step.sources, step.messages, step.fresh, strict=True)
        ]
        targets = []
        if step.kept:
            targets.append(self._own(step, max(step.messages)))
        if step.final:
            targets.append(self._range(self._out, step))
        divisor = self._divisor if step.complete else 1
        kind = "reduce" if len(parts) > 1 else "copy"
        with span(kind, "a range", rank=self.rank, start=step.start, stop=step.stop):
            combine(parts, targets, self._reduction, divisor)

    def _wait(self, source: int, message: int) -> None:
        if not is_open():
            self._call.wait(source, message)
            return
        flag = self._call.flag(source, message, self.rank)
        with span("wait", f"wait for rank {source}", rank=self.rank, awaits=flag):
            self._call.wait(source, message)

    def _part(self, step: Receive, source: int, message: int, fresh: bool) -> Tensor:
        """What a source has in the step's range."""
        if source == self.rank and fresh:
            return self._range(self._x, step)
        offset, shape = step.start * self._dtype.itemsize, (step.stop - step.start,)
        if fresh and self._resident is not None:
            tensor, base = self._resident
            place = (source, base + offset, shape, self._dtype, message)
            return self._call.read_symmetric(tensor, *place)
        return self._call.read(source, offset, shape, self._dtype, message)

    def _own(self, step: Send | Receive, message: int) -> Tensor:
        """The step's range of this rank's slot, to be written."""
        offset, shape = step.start * self._dtype.itemsize, (step.stop - step.start,)
        return self._call.write(self.rank, offset, shape, self._dtype, message)

    def _range(self, vector: Tensor, step: Send | Receive) -> Tensor:
        if step.stop - step.start == self._size:
            return vector
        return vector[step.start : step.stop]


def pieces_of(size: int, dtype: torch.dtype, slot_bytes: int) -> list[tuple[int, int]]:
    """Cut a vector into pieces that fit into a slot; at least one, which may be empty."""
    step = max(1, slot_bytes // dtype.itemsize)
    if size <= step:
        return [(0, size)]
    return [(start, min(start + step, size)) for start in range(0, size, step)]
