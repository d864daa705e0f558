"""Recording what a rank does to memory that others can see."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import fusedcomm
from fusedcomm.symmetric.shm import Segment
from fusedcomm.testing.races.addresses import AddressBook
from fusedcomm.testing.races.events import KINDS, Event, Launch, Range, Recording

_PACKAGE = Path(fusedcomm.__file__).parent
#: Through these every access goes, so they do not say where one comes from.
_PASSED_THROUGH = {"waiting.py", "signals.py", "shm.py", "contextlib.py"}
_PASSED_PACKAGES = (_PACKAGE / "protocol", _PACKAGE / "testing")
_LIBRARIES = ("numpy", "torch", "triton")


class Recorder:
    """Collects the events of this process, from one thread."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.book = AddressBook()
        self.launch: Launch | None = None
        self.program: tuple[int, ...] | None = None
        #: The stream that the host is queuing on, and whether there was one beside the main one.
        self.stream = ""
        self.streams = 0
        #: Tensors of the launch: name, first address, address behind it.
        self.buffers: list[tuple[str, int, int]] = []
        self.events: list[Event] = []
        self._launches = 0
        self._begin = 0
        self._thread = threading.get_ident()
        self._mapped: list[Segment] = []

    def add(self, kind: str, ranges: np.ndarray, **values: int | None) -> None:
        """Note an access to ranges of addresses ``[n, 2]`` of this process.

        Raises:
            RuntimeError: it came from another thread than the one that records.
        """
        if not len(ranges):
            return
        for memory, part in self.book.split(ranges):
            if memory is not None:
                self.note(kind, memory, part, **values)
            elif self.stream or (self.streams and kind == "write" and self.launch is None):
                self.note(kind, f"memory of rank {self.rank}", part, **values)
            elif self.launch is not None:  # else nobody but this stream sees it
                start = part[0][0]
                inside = (name for name, first, end in self.buffers if first <= start < end)
                buffer = next(inside, "local memory")
                self.note(kind, f"memory of rank {self.rank}", part, buffer=buffer, **values)

    def note(self, kind: str, memory: str, ranges: tuple[Range, ...], **values: Any) -> None:
        """Note an access to ranges of a memory; see ``Event``."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("the race checker records one thread; another one came along")
        self.events.append(
            Event(
                self.rank,
                self.launch,
                self.program,
                kind,
                memory,
                ranges,
                where=_caller(self.launch),
                stream=self.stream,
                **values,
            )
        )

    def enter_launch(self, kernel: str, buffers: list[tuple[str, int, int]]) -> None:
        self.launch = Launch(self._launches, kernel)
        self._launches += 1
        self._begin = len(self.events)
        self.buffers = buffers

    def leave_launch(self) -> None:
        """Forget what the programs of the launch read of memory that none of them wrote.

        Other launches of the rank come before or after it, and other ranks cannot see that memory.
        """
        own = f"memory of rank {self.rank}"
        events = self.events[self._begin :]
        written = [r for e in events if e.memory == own and KINDS[e.kind][0] for r in e.ranges]
        starts = np.array(sorted(start for start, _ in written), dtype=np.int64)
        ends = np.maximum.accumulate(np.array([e for _, e in sorted(written)], dtype=np.int64))

        def matters(event: Event) -> bool:
            if event.memory != own or event.kind != "read":
                return True
            for start, end in event.ranges:
                before = int(np.searchsorted(starts, end))  # writes that begin before it ends
                if before and ends[before - 1] > start:
                    return True
            return False

        self.events[self._begin :] = filter(matters, events)
        self.launch = self.program = None
        self.buffers = []

    def keep(self, segment: Segment) -> None:
        """Have a new mapping known, and kept, so that its addresses are not given away again."""
        self._mapped.append(segment)
        self.book.refresh()


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record what this process does to symmetric memory, and to memory shared by programs.

    Recorded are the kernels run by Triton's interpreter, torch's operations on tensors in symmetric
    memory, and the host's waits and signals; see ``fusedcomm.testing.races``. The recording is
    complete when the block is left. To be used on all ranks of the communicators concerned.

    Raises:
        RuntimeError: this process records already.
    """
    from fusedcomm.testing.races.host import host_hooks

    global _recording
    if _recording:
        raise RuntimeError("this process records already")
    recorder = Recorder()
    recording = Recording(recorder.rank, recorder.events, recorder.book.names)
    with contextlib.ExitStack() as hooks:
        _recording = True
        hooks.callback(_stop)
        hooks.enter_context(host_hooks(recorder))
        if os.environ.get("TRITON_INTERPRET") == "1":
            from fusedcomm.testing.races.kernels import interpreter_hooks

            hooks.enter_context(interpreter_hooks(recorder))
        yield recording
        recorder.book.name_new()


_recording = False


def _stop() -> None:
    global _recording
    _recording = False


@contextlib.contextmanager
def replaced(owner: Any, **members: Any) -> Iterator[None]:
    """Members of a class or module, replaced for a while.

    A class may get what it does not have; raises AttributeError for a module that has no such
    member: it would change nothing, unseen.
    """
    own = vars(owner)
    missing = members.keys() - own.keys()
    if missing and not isinstance(owner, type):
        raise AttributeError(f"{owner!r} has no {', '.join(sorted(missing))} of its own")
    before = {name: own[name] for name in members if name in own}
    try:
        for name, member in members.items():
            setattr(owner, name, member)
        yield
    finally:
        for name in members:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _caller(launch: Launch | None) -> str:
    """The line of the operation, or of the kernel, on whose behalf this is called."""
    kernel = None if launch is None else launch.kernel
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_plumbing(frame.f_code.co_filename):
        if frame.f_code.co_name == kernel:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


@cache
def _is_plumbing(filename: str) -> bool:
    path = Path(filename)
    if path.name in _PASSED_THROUGH or any(map(path.is_relative_to, _PASSED_PACKAGES)):
        return True
    loaded = [sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules]
    return any(path.is_relative_to(Path(file).parent) for file in loaded if file)
