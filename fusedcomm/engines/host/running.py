"""Executes programs on shared memory: a message is read where its sender has it.

Every rank has the vector in its slot, in its own memory, but only those parts of it that peers
read: what is sent as this rank's input is copied in, what is received and sent on is received
there, and everything else goes straight to where the result belongs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.host.combining import combine
from fusedcomm.planning.collectives import space
from fusedcomm.programs.steps import Program, Receive, Send
from fusedcomm.protocol import Call
from fusedcomm.schedule import successors
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import span


class Execution:
    """One rank's program on one slot.

    ``begin`` does what needs no peer's data, so that the next piece's can be done before a wait for
    this one; ``finish`` does the rest.

    Flags: ready[me][message] on the receiver, awaited there by its ``Receive``; consumed on every
    peer at the end, whether or not anything was read of it: the next program may be another.
    """

    def __init__(
        self,
        comm: Communicator,
        op: str,
        program: Program,
        x: Tensor,
        out: Tensor,
        reduction: str,
        messages: int,
        resident: tuple[SymmetricTensor, int] | None,
    ) -> None:
        """Take the slot.

        Args:
            program: this rank's, linked.
            x, out: flat, contiguous, of the program's size; they may be the same.
            reduction: "sum", "avg", "max" or "min".
            messages: ``messages_per_pair`` of all programs.
            resident: the symmetric tensor in which every rank's x lies, and the offset in bytes.
        """
        self.rank = comm.rank
        self.peers = successors(comm.rank, comm.world_size)
        self._program = program
        self._x, self._out = x, out
        self._reduction = reduction
        self._divisor = comm.world_size if reduction == "avg" else 1
        self._resident = resident
        self._call: Call = comm.take(op, space(x.numel() * x.dtype.itemsize, messages))
        self._next = 0

    def begin(self) -> None:
        """Send what is this rank's input, when the readers of the slot's last use are done."""
        for peer in self.peers:
            self._call.await_reader(peer)
        copied: set[tuple[int, int]] = set()
        for step in self._program:
            if not isinstance(step, Send) or not step.fresh:
                return
            self._send(step, copied)
            self._next += 1

    def finish(self) -> None:
        """The remaining steps; the result is there when this returns."""
        copied: set[tuple[int, int]] = set()
        for step in self._program[self._next :]:
            if isinstance(step, Send):
                self._send(step, copied)
            else:
                self._receive(step)
        for peer in self.peers:
            self._call.consumed(peer)

    def await_done(self) -> None:
        """Wait until every peer has read what it reads of x in place."""
        for peer in self.peers:
            self._call.await_done(peer)

    def _send(self, step: Send, copied: set[tuple[int, int]]) -> None:
        if step.fresh and self._resident is None and (step.start, step.stop) not in copied:
            copied.add((step.start, step.stop))
            with span("copy", "copy in", rank=self.rank):
                self._own(step, step.message).copy_(self._x[step.start : step.stop])
        self._call.signal(step.peer, step.message)

    def _receive(self, step: Receive) -> None:
        call, rank = self._call, self.rank
        for source, message in zip(step.sources, step.messages, strict=True):
            if source != rank:
                flag = call.flag(source, message, rank)
                with span("wait", f"wait for rank {source}", rank=rank, awaits=flag):
                    call.wait(source, message)
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
            targets.append(self._out[step.start : step.stop])
        divisor = self._divisor if step.complete else 1
        kind = "reduce" if len(parts) > 1 else "copy"
        with span(kind, f"elements {step.start}:{step.stop}", rank=rank):
            combine(parts, targets, self._reduction, divisor)

    def _part(self, step: Receive, source: int, message: int, fresh: bool) -> Tensor:
        """What a source has in the step's range."""
        if source == self.rank and fresh:
            return self._x[step.start : step.stop]
        dtype = self._x.dtype
        offset, shape = step.start * dtype.itemsize, (step.stop - step.start,)
        if fresh and self._resident is not None:
            tensor, base = self._resident
            return self._call.read_symmetric(tensor, source, base + offset, shape, dtype, message)
        return self._call.read(source, offset, shape, dtype, message)

    def _own(self, step: Send | Receive, message: int) -> Tensor:
        """The step's range of this rank's slot, to be written."""
        dtype = self._x.dtype
        offset, shape = step.start * dtype.itemsize, (step.stop - step.start,)
        return self._call.write(self.rank, offset, shape, dtype, message)


def pieces_of(size: int, dtype: torch.dtype, slot_bytes: int) -> list[tuple[int, int]]:
    """Cut a vector into pieces that fit into a slot; at least one, which may be empty."""
    step = max(1, slot_bytes // dtype.itemsize)
    return [(start, min(start + step, size)) for start in range(0, max(size, 1), step)]
