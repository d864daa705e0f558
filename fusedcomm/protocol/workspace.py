"""The memory of one kind of operation: where the epochs, the flags and the data lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedcomm.board import FLAG_STRIDE
from fusedcomm.protocol.rotation import Rotation
from fusedcomm.symmetric.exchange import allocate
from fusedcomm.symmetric.groups import TorchGroup
from fusedcomm.waiting import Watch

#: Buffer sets of a workspace: one may be written while the readers of the other are still busy.
SLOTS = 2

#: From one flag to the next, in int32 words.
FLAG_WORDS = FLAG_STRIDE // 4
#: The word behind a ready flag, written before it: which bank the writer took, as bytes from the
#: first one. It is data, which the flag guards.
BANK_WORD = 1

_PAGE = 4096
_LINE = 128


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
        banks: places for a slot's data, of which the writer takes one and tells its readers; more
            than 1 only where it writes into its own memory, for the host.
    """

    kind: str
    regions: int
    region_bytes: int
    chunks: int
    slots: int = SLOTS
    shared: bool = False
    banks: int = 1


class Pair(NamedTuple):
    """This rank and a peer in one slot: the peer's memory and where the four flags lie.

    Attributes:
        there: the peer's memory.
        ready, consumed: the words there that this rank sets; of its first chunk.
        came, read: the words here that the peer sets; of its first chunk.
        data: the offset of what the peer writes, in whichever memory that is; of its first bank.
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
        group: TorchGroup,
        space: Space,
        device: torch.device,
        first_epoch: int,
    ) -> None:
        """Allocate on every rank; collective.

        Args:
            group: whose ranks take part.
            device: this rank's.
            first_epoch: where all counters start; not 0 only in tests of the wrap-around.
        """
        self.kind = space.kind
        self.regions = space.regions
        self.region_bytes = -(-space.region_bytes // _LINE) * _LINE
        self.chunks = space.chunks
        self.slots = space.slots
        self.banks = space.banks
        self.rotation = Rotation()
        #: Whether a source writes into its reader's memory, not into its own.
        self.pushed = space.regions > 1 or space.shared
        self.device = device
        #: Whether a graph was captured on it: then it is kept for as long as the communicator.
        self.captured = False
        self._next_slot = 0
        self._world_size = world_size = group.world_size
        self._ready = (self.slots + 1) * FLAG_WORDS
        self._consumed = self._ready + self.slots * world_size * space.chunks * FLAG_WORDS
        flag_bytes = (self._consumed + self.slots * world_size * FLAG_WORDS) * 4
        self._data = -(-flag_bytes // _PAGE) * _PAGE
        counters = [n for n in range(flag_bytes // (4 * FLAG_WORDS)) if n != self.slots]
        self.segments = allocate(
            watch,
            group,
            self.kind,
            f"workspace {self.kind}",
            self._data + self.data_bytes,
            device,
            [FLAG_WORDS * number for number in counters] if first_epoch else [],
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
        """Bytes of data, all slots and banks."""
        return self.slots * self.banks * self.regions * self.region_bytes

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
        words, index = self._here.words, slot * FLAG_WORDS
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
        return slot * FLAG_WORDS

    @property
    def failed_index(self) -> int:
        return self.slots * FLAG_WORDS

    def ready_index(self, slot: int, source: int, chunk: int) -> int:
        flag = (slot * self._world_size + source) * self.chunks + chunk
        return self._ready + flag * FLAG_WORDS

    def consumed_index(self, slot: int, reader: int) -> int:
        return self._consumed + (slot * self._world_size + reader) * FLAG_WORDS

    def data_offset(self, slot: int, writer: int) -> int:
        """Where the data that ``writer`` writes begins; its first bank."""
        region = writer if self.regions > 1 else 0
        return self._data + (slot * self.banks * self.regions + region) * self.region_bytes

    def part(
        self, owner: int, slot: int, writer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The beginning of what ``writer`` wrote into the slot of ``owner``'s memory."""
        return self.segments[owner].tensor(self.data_offset(slot, writer), shape, dtype)
