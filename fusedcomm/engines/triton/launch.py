"""Launching the operations' kernels: ``begin``, the work, ``end``, on one slot of a workspace.

What an operation does is queued as steps and then started at once: on a GPU every kernel is
compiled and loaded before the first one that waits is started, since loading a kernel may itself
wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.interpreter import install
from fusedcomm.engines.triton.streams import SideStream
from fusedcomm.gpu import is_capturing
from fusedcomm.kernels import signals
from fusedcomm.protocol import Space
from fusedcomm.trace import span

#: Triton's names of the dtypes that the kernels take.
DTYPES = {
    torch.float32: triton.language.float32,
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
}

#: Programs of a persistent launch in the interpreter, which runs them in turn.
_INTERPRETED_PROGRAMS = 3
#: Multiprocessors of a GPU left to others while copies run beside a kernel that waits for them:
#: should the driver carry out a small copy by a kernel, there is room for it.
_SPARE = 4

#: What a launch says to the compiler besides a kernel's arguments.
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_cooperative_grid")
#: Kernels with the kinds of their arguments that were compiled and loaded in this process.
_loaded: set[tuple[Any, ...]] = set()

_Step = Callable[[], None]


class Launch:
    """The launches of one call on one slot; the arguments that they share."""

    def __init__(
        self,
        comm: Communicator,
        op: str,
        space: Space,
        device: torch.device,
        first: Launch | None = None,
    ) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.device = device
        self.workspace = comm.memory.workspace(space, device)
        self.slot = self.workspace.take_slot()
        self.gpu = None if device.type == "cpu" else comm.gpu(device)
        if self.gpu is None:
            self.record = torch.zeros(signals.RECORD_WORDS, dtype=torch.int32)
            self._host_record = torch.zeros_like(self.record)
            self._limit, self._op = 2**30, 0
        else:
            self.record, self._host_record = self.gpu.record, self.gpu.host_record
            self._limit, self._op = self.gpu.limit, self.gpu.op_number(op)
        self._fence = comm.memory.fence
        self._side: SideStream | None = None
        self._forked = False
        #: The other workspaces of the same call; their steps are in one queue with these.
        self.beside: list[Launch] = []
        self._prepare: list[_Step] = [] if first is None else first._prepare
        self._steps: list[_Step] = [] if first is None else first._steps

    @property
    def programs(self) -> int:
        """Programs of a persistent launch: as many as the GPU runs at once."""
        if self.gpu is None:
            return _INTERPRETED_PROGRAMS
        return max(1, self.gpu.programs - self.gpu.left - (_SPARE if self._forked else 0))

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
        return {"limit": self._limit, "record": self.record}

    def counters(self, count: int) -> Tensor:
        """Local counters, zero."""
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    # The steps of a call

    def run(self, kernel: Any, programs: int, kind: str, name: str, **arguments: Any) -> None:
        """Queue a kernel; ``kind`` and ``name`` are for traces."""
        self._queue(kernel, programs, kind, name, arguments)

    def run_resident(
        self, kernel: Any, programs: int, kind: str, name: str, **arguments: Any
    ) -> None:
        """As ``run``, for a kernel whose programs wait for each other, here or on other ranks.

        All of them must be on the device at once: so a grid that is too large fails, not hangs.
        """
        if self.gpu is not None:
            arguments["launch_cooperative_grid"] = True
        self._queue(kernel, programs, kind, name, arguments)

    def _queue(
        self, kernel: Any, programs: int, kind: str, name: str, arguments: dict[str, Any]
    ) -> None:
        grid = (max(programs, 1),)
        if self.gpu is not None:
            self._prepare.append(lambda: _load(kernel, grid, arguments))
        elif unknown := arguments.keys() - {*kernel.arg_names, *_OPTIONS}:
            # The interpreter would drop them, and only a GPU complain.
            raise TypeError(f"the kernel for {name!r} takes no {', '.join(sorted(unknown))}")

        def start() -> None:
            with span(kind, name, rank=self.rank):
                kernel[grid](**arguments)

        self._steps.append(start)

    def call(self, work: Callable[[], None]) -> None:
        """Queue torch operations on the call's own stream."""
        self._steps.append(work)

    def copy(self, owner: int, offset: int, rows: Tensor, chunk: int) -> None:
        """Queue a copy of ``rows`` into this rank's region of ``owner``'s memory, and its flag.

        Copies are behind what is queued so far, and beside what is queued after them, up to
        ``join``. The flag is raised by copying the slot's epoch onto it, behind the data on the
        same stream, so that a captured copy raises the right one at every replay.

        Args:
            offset: bytes from the beginning of the region.
            rows: contiguous; not to be written before the ``join``.

        Raises: ready[s][me][chunk] on the owner.
        """
        self._forked = True
        workspace, slot = self.workspace, self.slot
        start = workspace.data_offset(slot, self.rank) + offset
        segments = workspace.segments

        def carry() -> None:
            side = self._side_stream()
            side.fork()
            with side.entered(), span("copy", f"copy to rank {owner}", rank=self.rank):
                if rows.numel():
                    target = segments[owner].tensor(start, tuple(rows.shape), rows.dtype)
                    target.copy_(rows, non_blocking=True)
                self._raise(owner, chunk)

        self._steps.append(carry)

    def join(self) -> None:
        """Queue that what follows comes after the copies."""
        self._forked = False
        self._steps.append(lambda: self._side_stream().join())

    def flush(self) -> None:
        """Start what is queued, everything on a GPU compiled and loaded first."""
        queued = [*self._prepare, *self._steps]
        self._prepare.clear()
        self._steps.clear()
        for step in queued:
            step()

    # Begin and end

    def begin(self) -> None:
        self._bound(signals.begin, "begin", limit=self._limit)

    def end(self) -> None:
        self._bound(signals.end, "end", op=self._op, host_record=self._host_record)

    def _bound(self, kernel: Any, name: str, **more: Any) -> None:
        words = {
            "epoch_word": self.workspace.epoch_index(self.slot),
            "consumed_word": self.workspace.consumed_index(self.slot, 0),
            "failed_word": self.workspace.failed_index,
        }
        arguments = {"record": self.record, **self.ranks, **words, **more}
        self.run(kernel, 1, "wait", name, num_warps=1, **arguments)

    def _raise(self, owner: int, chunk: int) -> None:
        workspace = self.workspace
        index = workspace.ready_index(self.slot, self.rank, chunk)
        own, theirs = workspace.segments[self.rank], workspace.segments[owner]
        if self.gpu is None:
            self._fence()
        theirs.copy_word(index, own, workspace.epoch_index(self.slot))  # type: ignore[arg-type]

    def _side_stream(self) -> SideStream:
        if self._side is None:
            self._side = SideStream(None if self.gpu is None else self.gpu.copy_stream)
        return self._side


def _load(kernel: Any, grid: tuple[int], arguments: dict[str, Any]) -> None:
    """Compile and load a kernel for arguments like these, once."""
    key = (kernel, torch.cuda.current_device(), *map(_kind_of, arguments.values()))
    if key in _loaded:
        return
    compiled = kernel.warmup(grid=grid, **arguments)
    if compiled is not None:
        compiled.run  # noqa: B018  # loads it, where Triton has only compiled so far
    _loaded.add(key)


def _kind_of(value: Any) -> Any:
    """What Triton may compile an argument for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            value if value < 16 else (value % 16 == 0, value > 0x7FFFFFFF, value < 1024 and value)
        )
    return value


def _compare_first(comm: Communicator, op: str, text: str, device: torch.device) -> None:
    """Within a call: compare it with the peers', the first time or where it is asked for."""
    seen = comm.gpu(device).seen
    if comm.check or text not in seen:
        comm.calls.await_peers(op, exchanging=False)
        seen.add(text)


@contextmanager
def launches(
    comm: Communicator, op: str, space: Space, text: str, device: torch.device, *beside: Space
) -> Iterator[Launch]:
    """One call on the communicator, whose steps are queued on the ``Launch`` that it yields.

    Args:
        space: the memory that it takes.
        beside: more of it, in other workspaces: each has a ``Launch`` in ``Launch.beside``.
        text: all that must be equal on every rank; see ``Communicator.collective``.
        device: of the tensors.

    Raises:
        FusedcommError: of a wait in an interpreted kernel, see ``Calls.await_any``; of an
            earlier call on a GPU, see ``GpuSide.enter``.
        ValueError: memory is lacking while a graph is captured.
    """
    with ExitStack() as stack:
        if device.type == "cpu":
            install()
        else:
            stack.enter_context(torch.cuda.device(device))
            comm.gpu(device).enter()
            for needed in (space, *beside):
                comm.memory.require_room(needed, device)
        stack.enter_context(comm.collective(text))
        if device.type != "cpu":
            _compare_first(comm, op, text, device)
        launch = Launch(comm, op, space, device)
        launch.beside = [Launch(comm, op, other, device, launch) for other in beside]
        everything = (launch, *launch.beside)
        if device.type == "cpu":
            stack.callback(setattr, signals, "relax", signals.relax)
            signals.relax = comm.calls.await_any(op)
        try:
            for each in everything:
                each.begin()
            yield launch
            if device.type == "cpu":
                launch.flush()
                comm.calls.compare_peers()
            for each in everything:
                each.end()
            launch.flush()
        except triton.runtime.errors.InterpreterError as error:
            raise _raised_in(error) from None
        if launch.gpu is not None and is_capturing():
            for each in everything:
                each.workspace.captured = True


def _raised_in(error: BaseException) -> BaseException:
    """What was raised in an interpreted kernel: every function of it that is left wraps it anew."""
    while isinstance(error, triton.runtime.errors.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error
