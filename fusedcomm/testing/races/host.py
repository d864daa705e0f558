"""Hooks for the host: torch's operations on symmetric memory, and flags raised and awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.streams import SideStream
from fusedcomm.protocol.workspace import BANK_WORD, FLAG_WORDS
from fusedcomm.symmetric.shm import Segment
from fusedcomm.testing.races.addresses import of_tensor
from fusedcomm.testing.races.recording import Recorder, replaced
from fusedcomm.waiting import Awaited, Watch

_SIDE = "copy"
_NEW, _WANTED = {"before": 0}, {"wanted": 1}
#: They look at a tensor's shape and not into it. (Views are known to torch as such.)
_SHAPE_ONLY = {
    "aten::empty_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::zeros_like",
}


class Accesses(TorchDispatchMode):
    """Notes which symmetric memory each of torch's operations reads and writes, as it begins."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # In a launch, it is the interpreter at its own work.
        if not func.is_view and func._schema.name not in _SHAPE_ONLY:
            if self._recorder.launch is None:
                self._note(func._schema.arguments, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
        for argument in schema:
            value = kwargs.get(argument.name, given.get(argument.name))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    self._recorder.add("write" if writes else "read", of_tensor(tensor))


class Flags:
    """A segment's int32 words, each access to which is an acquire or a release.

    All but those that tell a bank: they are data, for which a flag must have been awaited.
    """

    def __init__(self, words: memoryview, recorder: Recorder) -> None:
        self.words = words
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> int:
        value = self.words[index]
        if index % FLAG_WORDS == BANK_WORD:
            self._recorder.add("read", word(self.words, index))
        else:
            self._recorder.add("acquire", word(self.words, index), value=value)
        return value

    def __setitem__(self, index: int, value: int) -> None:
        if index % FLAG_WORDS == BANK_WORD:
            self._recorder.add("write", word(self.words, index))
        else:
            before = self.words[index]
            self._recorder.add("release", word(self.words, index), value=value, before=before)
        self.words[index] = value


def word(words: memoryview, index: int) -> np.ndarray:
    """The range of addresses ``[1, 2]`` of one int32 word."""
    address = int(np.asarray(words).ctypes.data) + 4 * index
    return np.array([[address, address + 4]])


@contextlib.contextmanager
def host_hooks(recorder: Recorder) -> Iterator[None]:
    """Have the host's accesses noted."""
    accesses = Accesses(recorder)
    collective, barrier = Communicator.collective, Communicator.barrier
    init, wait, poll = Segment.__init__, Watch.wait, Watch.poll

    @contextlib.contextmanager
    def watched_collective(self: Communicator, text: str) -> Iterator[None]:
        recorder.book.name_new()  # before something of it is gone
        with collective(self, text), contextlib.ExitStack() as inside:
            # Within one of torch's custom operations the mode outside of it is not in force.
            if accesses not in _get_current_dispatch_mode_stack():
                inside.enter_context(accesses)
            yield

    def watched_init(self: Segment, fd: int, size: int) -> None:
        init(self, fd, size)
        recorder.keep(self)

    def watched_wait(
        self: Watch, words: Any, index: int, wanted: int, peer: int, awaited: Awaited
    ) -> None:
        if not isinstance(words, Flags):
            wait(self, words, index, wanted, peer, awaited)
            return
        wait(self, words.words, index, wanted, peer, awaited)
        seen = words.words[index]
        recorder.add("acquire", word(words.words, index), value=seen, wanted=wanted)

    def watched_poll(self: Watch, words: Any, index: int, wanted: int) -> bool:
        if not isinstance(words, Flags):
            return poll(self, words, index, wanted)
        if not poll(self, words.words, index, wanted):
            return False
        seen = words.words[index]
        recorder.add("acquire", word(words.words, index), value=seen, wanted=wanted)
        return True

    def watched_barrier(self: Communicator) -> None:
        arrivals = f"barrier of {self.group.group_name} {self.channel!r}"
        number = barriers[arrivals] = barriers.get(arrivals, 0) + 1

        def arrival(rank: int) -> tuple[tuple[int, int], ...]:
            return ((4 * rank, 4 * rank + 4),)

        mine = arrival(self.rank)
        recorder.note("release", arrivals, mine, value=number, before=number - 1)
        barrier(self)
        for peer in range(self.world_size):
            if peer != self.rank:
                recorder.note("acquire", arrivals, arrival(peer), value=number, wanted=number)

    def ordered(before: str, after: str) -> None:
        """What is queued on ``after`` comes behind what was queued on ``before``."""
        recorder.streams += 1
        place = ((4 * recorder.streams, 4 * recorder.streams + 4),)
        points, current = f"streams of rank {recorder.rank}", recorder.stream
        for stream, kind in ((before, "release"), (after, "acquire")):
            recorder.stream = stream
            recorder.note(kind, points, place, value=1, **(_WANTED if kind == "acquire" else _NEW))
        recorder.stream = current

    @contextlib.contextmanager
    def watched_entered(self: SideStream) -> Iterator[None]:
        outer, recorder.stream = recorder.stream, _SIDE
        try:
            yield
        finally:
            recorder.stream = outer

    def get_words(self: Segment) -> Flags | memoryview:
        words: memoryview = vars(self)["words"]
        address = int(np.asarray(words).ctypes.data)
        return words if recorder.book.memory_of(address) is None else Flags(words, recorder)

    def set_words(self: Segment, words: memoryview) -> None:
        vars(self)["words"] = words

    barriers: dict[str, int] = {}
    with (
        replaced(Communicator, collective=watched_collective, barrier=watched_barrier),
        replaced(Segment, __init__=watched_init, words=property(get_words, set_words)),
        replaced(Watch, wait=watched_wait, poll=watched_poll),
        replaced(
            SideStream,
            fork=lambda self: ordered("", _SIDE),
            join=lambda self: ordered(_SIDE, ""),
            entered=watched_entered,
        ),
        accesses,
    ):
        yield
