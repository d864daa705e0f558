"""Launching the operations' kernels: ``begin``, the work, ``end``, on one slot of a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.interpreter import install
from fusedcomm.kernels import signals
from fusedcomm.protocol import Space
from fusedcomm.trace import span

#: Looks at a flag before a wait on a device gives up: minutes.
_LIMIT = 2**30

#: Triton's names of the dtypes that the kernels take.
DTYPES = {
    torch.float32: triton.language.float32,
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
}


class Launch:
    """The launches of one call on one slot; the arguments that they share."""

    def __init__(self, comm: Communicator, op: str, space: Space) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.workspace = comm.workspace(space)
        self.slot = self.workspace.take_slot()
        self.record = torch.zeros(8, dtype=torch.int32)

    @property
    def programs(self) -> int:
        """Programs of a persistent launch: a few in the interpreter, which runs them in turn."""
        return 3

    @property
    def flags(self) -> dict[str, Any]:
        """Where this slot's epoch, flags and data are, by the kernels' argument names."""
        workspace = self.workspace
        return {
            "epoch_word": workspace.epoch_index(self.slot),
            "ready_word": workspace.ready_index(self.slot, 0, 0),
            "chunks": workspace.chunks,
            "data_offset": workspace.data_offset(self.slot, 0),
            "region_bytes": workspace.region_bytes,
        }

    @property
    def ranks(self) -> dict[str, Any]:
        return {
            "bases": self.workspace.pointers,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    @property
    def waits(self) -> dict[str, Any]:
        return {"limit": _LIMIT, "record": self.record}

    def counters(self, count: int) -> torch.Tensor:
        """Local counters, zero."""
        return torch.zeros(count, dtype=torch.int32)

    def run(self, kernel: Any, programs: int, kind: str, name: str, **arguments: Any) -> None:
        """Launch a kernel; ``kind`` and ``name`` are for traces."""
        with span(kind, name, rank=self.rank):
            kernel[(max(programs, 1),)](**arguments)

    def bound(self, kernel: Any, name: str, **more: Any) -> None:
        words = {"consumed_word": self.workspace.consumed_index(self.slot, 0)}
        words["epoch_word"] = self.workspace.epoch_index(self.slot)
        self.run(kernel, 1, "wait", name, record=self.record, **self.ranks, **words, **more)


@contextmanager
def launches(comm: Communicator, op: str, space: Space) -> Iterator[Launch]:
    """Within ``Communicator.collective``: the launches of one call, between ``begin`` and ``end``.

    Raises:
        FusedcommError: of a wait in a kernel; see ``Communicator.await_any``.
    """
    install()
    launch = Launch(comm, op, space)
    previous, signals.relax = signals.relax, comm.await_any(op)
    try:
        launch.bound(signals.begin, "begin", limit=_LIMIT)
        yield launch
        comm.compare_peers()
        launch.bound(signals.end, "end")
    except triton.runtime.errors.InterpreterError as error:
        raise (error.__cause__ or error) from None
    finally:
        signals.relax = previous
