"""The signalling protocol: slots, epochs, ready and consumed flags.

A **workspace** is the memory of one kind of operation on one communicator. Every rank has a copy of
the same layout, in shared memory of its own::

    epoch[slot]                     how often this slot has been used; written by its own rank
    failed                          set by a rank that gave up (on GPUs, whose host does not wait)
    ready[slot][source][chunk]      set by ``source``, whose data this rank will read
    consumed[slot][reader]          set by ``reader`` when it has read what this rank wrote
    data[slot][region]              ``region_bytes`` each

Every byte of data has one writer for as long as the workspace lives: one region where a rank writes
only into its own memory (and peers pull), one region per source where it writes into its peers'
(push). So it is enough that a writer awaits the readers of what it wrote itself, whatever the
shapes of the calls before.

A **shared** region is pushed into by all sources, each row at the place that the call's plan gives
it, so that a byte has one writer in a call but another one in the next. There a reader awaits
*every* source before it says consumed, to every source, also to those that sent it nothing. Then a
writer that has seen the reader's consumed knows that all others' writes of that call are done.

A call on slot ``s`` with epoch ``e``, in the order that makes it safe:

1. Before a rank writes, it awaits ``consumed[s][reader] >= e - 1`` of every reader.
2. It writes, then sets ``ready[s][me][chunk] = e`` on the reader, for a chunk with no rows too.
3. A reader awaits ``ready[s][source][chunk] >= e``, and reads.
4. When it has read all, it sets ``consumed[s][me] = e`` on the source.

Flags are set, never counted; one flag has one writer; nothing is ever reset. ``docs/protocol.md``
explains why this is safe; ``fusedcomm.testing.protocol_model`` checks it over all interleavings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedcomm import circles
from fusedcomm.board import FLAG_STRIDE
from fusedcomm.symmetric.exchange import allocate
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.waiting import Awaited, Watch, reached

#: Buffer sets of a workspace: one may be written while the readers of the other are still busy.
SLOTS = 2

_PAGE = 4096
_LINE = 128
_FLAG_WORDS = FLAG_STRIDE // 4

Recorder = Callable[..., None]
_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> Recorder | None:
    """Have every protocol step of this process reported; returns the previous recorder.

    The recorder is called as ``recorder(event, op=, rank=, peer=, slot=, epoch=, chunk=)``, before
    the step for begin, write, signal, read and consumed, and after it for wait (whose ``chunk`` is
    -1 where readers of the last use are awaited). For write and read, ``peer`` is the rank that
    owns the memory, and ``workspace``, ``offset`` and ``nbytes`` say which part of it. It serves
    the race checker and deliberate delays.
    """
    global _recorder
    previous, _recorder = _recorder, recorder
    return previous


class Space(NamedTuple):
    """The memory that a call needs.

    Attributes:
        kind: the workspace it is taken from.
        regions: 1 if each rank writes into its own memory, the world size if into its peers', for
            each source one.
        region_bytes: bytes of data per slot and region.
        chunks: the most chunks that a source signals to one reader.
        slots: buffer sets; 1 where the readers of a call are done before the next one begins.
        shared: whether all sources push into the one region of their reader's memory.
    """

    kind: str
    regions: int
    region_bytes: int
    chunks: int
    slots: int = SLOTS
    shared: bool = False


class Pair(NamedTuple):
    """This rank and a peer in one slot: the peer's memory and where the four flags lie.

    Attributes:
        there: the peer's memory.
        ready, consumed: the words there that this rank sets; of its first chunk.
        came, read: the words here that the peer sets; of its first chunk.
        data: the offset of what the peer writes, in whichever memory that is.
    """

    there: Any
    ready: int
    consumed: int
    came: int
    read: int
    data: int


class Workspace:
    """The symmetric memory of one kind of operation. Made and grown collectively."""

    def __init__(
        self,
        watch: Watch,
        group: dist.ProcessGroup,
        world_size: int,
        space: Space,
        device: torch.device,
        first_epoch: int,
    ) -> None:
        """Allocate on every rank; collective.

        Args:
            group: whose ranks take part, or, on CPU, of which ``world_size`` ranks do.
            device: this rank's.
            first_epoch: where all counters start; not 0 only in tests of the wrap-around.
        """
        self.kind = space.kind
        self.regions = space.regions
        self.region_bytes = -(-space.region_bytes // _LINE) * _LINE
        self.chunks = space.chunks
        self.slots = space.slots
        #: Whether a source writes into its reader's memory, not into its own.
        self.pushed = space.regions > 1 or space.shared
        self.device = device
        #: Whether a graph was captured on it: then it is kept for as long as the communicator.
        self.captured = False
        self._next_slot = 0
        self._world_size = world_size
        self._ready = (self.slots + 1) * _FLAG_WORDS
        self._consumed = self._ready + self.slots * world_size * space.chunks * _FLAG_WORDS
        flag_bytes = (self._consumed + self.slots * world_size * _FLAG_WORDS) * 4
        self._data = -(-flag_bytes // _PAGE) * _PAGE
        counters = [n for n in range(flag_bytes // (4 * _FLAG_WORDS)) if n != self.slots]
        self.segments = allocate(
            watch,
            group,
            world_size,
            self.kind,
            f"workspace {self.kind}",
            self._data + self.data_bytes,
            device,
            [_FLAG_WORDS * number for number in counters] if first_epoch else [],
            first_epoch,
        )
        self._rank = watch.rank
        self._here = self.segments[watch.rank]
        #: By slot and peer.
        self.pairs = [
            [self._pair(slot, peer) for peer in range(world_size)] for slot in range(self.slots)
        ]
        #: int64 ``[world_size]``: where each rank's memory lies for this rank's kernels.
        self.pointers = torch.tensor(
            [segment.address for segment in self.segments], dtype=torch.int64, device=device
        )

    @property
    def flag_bytes(self) -> int:
        """Bytes in front of the data: epochs and flags, to the next page."""
        return self._data

    @property
    def data_bytes(self) -> int:
        """Bytes of data, all slots."""
        return self.slots * self.regions * self.region_bytes

    def fits(self, space: Space) -> bool:
        return space.region_bytes <= self.region_bytes and space.chunks <= self.chunks

    def joined(self, space: Space) -> Space:
        """What holds this workspace's calls and those of ``space``."""
        return space._replace(
            region_bytes=max(space.region_bytes, self.region_bytes),
            chunks=max(space.chunks, self.chunks),
        )

    def take_slot(self) -> int:
        """The next slot, round-robin."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % self.slots
        return slot

    def advance(self, slot: int) -> int:
        """The slot's epoch, advanced for the call that begins. (Kernels do it themselves.)"""
        words, index = self._here.words, slot * _FLAG_WORDS
        words[index] = epoch = (words[index] + 0x80000001) % 0x100000000 - 0x80000000
        return epoch  # ``following``, without a call

    def _pair(self, slot: int, peer: int) -> Pair:
        return Pair(
            self.segments[peer],
            self.ready_index(slot, self._rank, 0),
            self.consumed_index(slot, self._rank),
            self.ready_index(slot, peer, 0),
            self.consumed_index(slot, peer),
            self.data_offset(slot, peer),
        )

    def epoch_index(self, slot: int) -> int:
        return slot * _FLAG_WORDS

    @property
    def failed_index(self) -> int:
        return self.slots * _FLAG_WORDS

    def ready_index(self, slot: int, source: int, chunk: int) -> int:
        flag = (slot * self._world_size + source) * self.chunks + chunk
        return self._ready + flag * _FLAG_WORDS

    def consumed_index(self, slot: int, reader: int) -> int:
        return self._consumed + (slot * self._world_size + reader) * _FLAG_WORDS

    def data_offset(self, slot: int, writer: int) -> int:
        """Where the data that ``writer`` writes begins."""
        region = writer if self.regions > 1 else 0
        return self._data + (slot * self.regions + region) * self.region_bytes

    def part(
        self, owner: int, slot: int, writer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The beginning of what ``writer`` wrote into the slot of ``owner``'s memory."""
        return self.segments[owner].tensor(self.data_offset(slot, writer), shape, dtype)


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
        start = self._pairs[self.rank].data + offset
        part = self._pairs[owner].there.tensor(start, shape, dtype)
        if _recorder is not None:
            self._record_part("write", owner, chunk, self._workspace.kind, start, part)
        return part

    def read(
        self, source: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, chunk: int = 0
    ) -> torch.Tensor:
        """The part of the slot that ``source`` wrote for this rank, for it to read."""
        owner = self.rank if self._workspace.pushed else source
        start = self._pairs[source].data + offset
        part = self._pairs[owner].there.tensor(start, shape, dtype)
        if _recorder is not None:
            self._record_part("read", owner, chunk, self._workspace.kind, start, part)
        return part

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
        part = tensor.segments[source].tensor(offset, shape, dtype)
        if _recorder is not None:
            self._record_part("read", source, chunk, f"symmetric {tensor.number}", offset, part)
        return part

    def signal(self, reader: int, chunk: int = 0) -> None:
        """Tell ``reader`` that this rank's ``chunk`` is written; it awaits this in ``wait``."""
        if _recorder is not None:
            self._record("signal", reader, chunk)
        pair = self._pairs[reader]
        self._watch.fence()
        pair.there.words[pair.ready + chunk * _FLAG_WORDS] = self._epoch

    def signal_all(self, readers: Sequence[int]) -> None:
        """``signal`` to each, of chunk 0; one fence for all."""
        if _recorder is not None:
            for reader in readers:
                self._record("signal", reader, 0)
        pairs, epoch = self._pairs, self._epoch
        self._watch.fence()
        for reader in readers:
            pair = pairs[reader]
            pair.there.words[pair.ready] = epoch

    def wait(self, source: int, chunk: int = 0) -> None:
        """Wait until ``source`` has written its ``chunk`` (its ``signal`` to this rank)."""
        watch, words = self._watch, self._here.words
        index = self._pairs[source].came + chunk * _FLAG_WORDS
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
        index = self._pairs[source].came + chunk * _FLAG_WORDS
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

    def _record_part(
        self, event: str, owner: int, chunk: int, memory: str, offset: int, part: torch.Tensor
    ) -> None:
        place = {"workspace": memory, "offset": offset, "nbytes": part.nbytes}
        self._record(event, owner, chunk, **place)

    def _record(self, event: str, peer: int, chunk: int, **place: Any) -> None:
        assert _recorder is not None
        _recorder(
            event,
            op=self._op,
            rank=self.rank,
            peer=peer,
            slot=self._slot,
            epoch=self._epoch,
            chunk=chunk,
            **place,
        )
