"""One call of an operation on the host: its waits and signals, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusedcomm import circles
from fusedcomm.protocol.workspace import BANK_WORD, FLAG_WORDS, Workspace
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.waiting import Awaited, Watch, reached

Recorder = Callable[..., None]
_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> Recorder | None:
    """Have every protocol step of this process reported; returns the previous recorder.

    The recorder is called as ``recorder(event, op=, rank=, peer=, slot=, epoch=, chunk=,
    workspace=)``, before the step for begin, write, signal, read and consumed, and after it for
    wait (whose ``chunk`` is -1 where readers of the last use are awaited). For write and read,
    ``peer`` is the rank that owns the memory. ``workspace`` is its kind, or says which symmetric
    tensor is read in place. It serves tests and deliberate delays.
    """
    global _recorder
    previous, _recorder = _recorder, recorder
    return previous


class Call:
    """One call of an operation on one slot of its workspace: the host's waits and signals."""

    __slots__ = (
        "rank",
        "_watch",
        "_workspace",
        "_op",
        "_slot",
        "_epoch",
        "_here",
        "_pairs",
        "_compared",
        "_bank",
    )

    def __init__(self, watch: Watch, workspace: Workspace, op: str) -> None:
        self.rank = watch.rank
        self._watch = watch
        self._workspace = workspace
        self._op = op
        self._slot = slot = workspace.take_slot()
        self._epoch = workspace.advance(slot)
        self._here = workspace.segments[watch.rank]
        self._pairs = workspace.pairs[slot]
        self._compared: set[int] = set()
        # In bytes from the first bank; None where there is but one, and nobody need be told.
        self._bank: int | None = None
        if workspace.banks > 1:
            bank = self._epoch % workspace.banks if workspace.rotation.on else 0
            self._bank = bank * workspace.region_bytes
        if _recorder is not None:
            self._record("begin", self.rank, -1)

    def await_reader(self, reader: int) -> None:
        """Wait until ``reader`` is done with what this rank wrote in the slot's last use."""
        self._await_consumed(reader, self._epoch - 1)

    def await_readers(self, readers: Sequence[int]) -> None:
        """``await_reader`` for each."""
        watch, words, pairs, before = self._watch, self._here.words, self._pairs, self._epoch - 1
        for reader in readers:
            if _recorder is not None or not watch.poll(words, pairs[reader].read, before):
                self._await_consumed(reader, before)

    def await_done(self, readers: Sequence[int]) -> None:
        """Wait until ``readers`` are done with what this rank offered in this very call."""
        for reader in readers:
            self._await_consumed(reader, self._epoch)

    def write(
        self, owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, chunk: int = 0
    ) -> torch.Tensor:
        """A part of this rank's region of the slot in ``owner``'s memory, for it to write."""
        if _recorder is not None:
            self._record("write", owner, chunk)
        start = self._pairs[self.rank].data + (self._bank or 0) + offset
        return self._pairs[owner].there.tensor(start, shape, dtype)

    def read(
        self, source: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, chunk: int = 0
    ) -> torch.Tensor:
        """The part of the slot that ``source`` wrote for this rank, for it to read."""
        owner = self.rank if self._workspace.pushed else source
        if _recorder is not None:
            self._record("read", owner, chunk)
        pair = self._pairs[source]
        start = pair.data + offset
        if self._bank is not None:
            there = self._here.words[pair.came + chunk * FLAG_WORDS + BANK_WORD]
            start += self._bank if source == self.rank else there
        return self._pairs[owner].there.tensor(start, shape, dtype)

    def read_symmetric(
        self,
        tensor: SymmetricTensor,
        source: int,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        chunk: int = 0,
    ) -> torch.Tensor:
        """A part of ``source``'s own symmetric tensor, for this rank to read in place.

        No slot protects such memory: the call must end with ``await_done`` for every reader.
        """
        if _recorder is not None:
            self._record("read", source, chunk, f"symmetric {tensor.number}")
        return tensor.segments[source].tensor(offset, shape, dtype)

    def signal(self, reader: int, chunk: int = 0) -> None:
        """Tell ``reader`` that this rank's ``chunk`` is written; it awaits this in ``wait``."""
        if _recorder is not None:
            self._record("signal", reader, chunk)
        pair = self._pairs[reader]
        words, index = pair.there.words, pair.ready + chunk * FLAG_WORDS
        if self._bank is not None:
            words[index + BANK_WORD] = self._bank
        self._watch.fence()
        words[index] = self._epoch

    def signal_all(self, readers: Sequence[int]) -> None:
        """``signal`` to each, of chunk 0; one fence for all."""
        if _recorder is not None:
            for reader in readers:
                self._record("signal", reader, 0)
        pairs, epoch, bank = self._pairs, self._epoch, self._bank
        if bank is not None:
            for reader in readers:
                pair = pairs[reader]
                pair.there.words[pair.ready + BANK_WORD] = bank
        self._watch.fence()
        for reader in readers:
            pair = pairs[reader]
            pair.there.words[pair.ready] = epoch

    def judge(self, writing_s: float, whole_s: float) -> None:
        """Have it looked at whether this rank's next calls write elsewhere; see ``Rotation``."""
        self._workspace.rotation.judge(writing_s, whole_s)

    def wait(self, source: int, chunk: int = 0) -> None:
        """Wait until ``source`` has written its ``chunk`` (its ``signal`` to this rank)."""
        watch, words = self._watch, self._here.words
        index = self._pairs[source].came + chunk * FLAG_WORDS
        if not watch.poll(words, index, self._epoch):
            awaited = Awaited(self._op, self._epoch, chunk, "data")
            watch.wait(words, index, self._epoch, source, awaited)
            watch.fence()
        if source not in self._compared:
            self._compared.add(source)
            watch.compare(source)
        if _recorder is not None:
            self._record("wait", source, chunk)

    def arrived(self, source: int, chunk: int = 0) -> bool:
        """Whether ``wait`` for the same chunk would return at once; it must still be called."""
        index = self._pairs[source].came + chunk * FLAG_WORDS
        return reached(self._here.words[index], self._epoch)

    def wait_until(self, over: Callable[[], bool], source: int, chunk: int = 0) -> None:
        """Wait until ``over()``, with the errors of a wait for the ``chunk`` of ``source``.

        Args:
            over: true at the latest when that chunk has arrived; ``wait`` must still be called.
        """
        awaited = Awaited(self._op, self._epoch, chunk, "data")
        self._watch.wait_until(over, self._watch.background, circles.CALL, source, awaited)

    def consumed(self, source: int) -> None:
        """Tell ``source`` that all it wrote in this call has been read; see ``await_reader``."""
        if _recorder is not None:
            self._record("consumed", source, -1)
        pair = self._pairs[source]
        self._watch.fence()
        pair.there.words[pair.consumed] = self._epoch

    def consumed_all(self, sources: Sequence[int]) -> None:
        """``consumed`` to each; one fence for all."""
        if _recorder is not None:
            for source in sources:
                self._record("consumed", source, -1)
        pairs, epoch = self._pairs, self._epoch
        self._watch.fence()
        for source in sources:
            pair = pairs[source]
            pair.there.words[pair.consumed] = epoch

    def flag(self, source: int, chunk: int, reader: int = -1) -> tuple[int | str, ...]:
        """A name for a flag's value in this call, by which a trace ties signals to waits."""
        return (self._workspace.kind, self._slot, self._epoch, source, chunk, reader)

    def _await_consumed(self, reader: int, epoch: int) -> None:
        watch, words = self._watch, self._here.words
        index = self._pairs[reader].read
        if not watch.poll(words, index, epoch):
            awaited = Awaited(self._op, self._epoch, -1, "the reader's signal")
            watch.wait(words, index, epoch, reader, awaited)
            watch.fence()
        if _recorder is not None:
            self._record("wait", reader, -1)

    def _record(self, event: str, peer: int, chunk: int, workspace: str | None = None) -> None:
        assert _recorder is not None
        _recorder(
            event,
            op=self._op,
            rank=self.rank,
            peer=peer,
            slot=self._slot,
            epoch=self._epoch,
            chunk=chunk,
            workspace=workspace or self._workspace.kind,
        )
