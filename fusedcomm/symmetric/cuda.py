"""Memory of GPUs that every rank can address, on torch's symmetric memory.

Only its documented parts are used (torch 2.11 and later): ``empty``, ``rendezvous``,
``get_buffer`` and ``multicast_ptr``. Flags lie in the allocation itself and never in torch's signal
pads, which are small and shared by all users of a group.

Torch pairs up the ranks' allocations by the order in which each rank makes them. Two channels that
allocate from two threads at once could be paired crosswise, so every allocation ends in a tag that
says what it is for, and the ranks compare tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from fusedcomm.errors import MismatchError, SharedMemoryError
from fusedcomm.symmetric.groups import TorchGroup

#: Tensors kept for the next call of the same shape.
_VIEWS = 256
#: Bytes behind the data; the tag is in the first eight, the rest keeps sizes on cache lines.
_TAIL = 128

#: Allocations that were let go while a graph was captured. Unmapping synchronises the device, which
#: would break the capture; they go at the next allocation.
_postponed: list[Any] = []


class Allocation:
    """What keeps one rank's memory, and its views of the peers', mapped."""

    def __init__(self, own: torch.Tensor, handle: Any) -> None:
        self.own = own
        self.handle = handle

    def __del__(self) -> None:
        if self.own.is_cuda and torch.cuda.is_current_stream_capturing():
            _postponed.append((self.own, self.handle))


class CudaSegment:
    """``size`` bytes of one rank's GPU, addressable by this rank's kernels and copies.

    The views that it hands out are valid for as long as a segment of the allocation lives.
    """

    def __init__(self, memory: torch.Tensor, size: int, allocation: Allocation) -> None:
        self.size = size
        self.device = memory.device
        self._memory = memory
        self._allocation = allocation
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    @property
    def address(self) -> int:
        """Where the segment lies in the address space of this rank's kernels."""
        return self._memory.data_ptr()

    @property
    def multicast(self) -> int | None:
        """Address through which a switch writes to all ranks at once, if it can."""
        handle = self._allocation.handle
        return None if handle is None else int(handle.multicast_ptr) or None

    @property
    def words(self) -> memoryview:
        """Only of CPU memory: the host neither reads nor raises flags of a GPU."""
        raise TypeError("flags in GPU memory are read and raised by kernels and stream copies only")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from ``offset``."""
        key = (offset, shape, dtype)
        found = self._views.get(key)
        if found is None:
            count = dtype.itemsize
            for extent in shape:
                count *= extent
            with torch.inference_mode(False):
                found = self._memory[offset : offset + count].view(dtype).view(shape)
            if len(self._views) >= _VIEWS:
                self._views.clear()
            self._views[key] = found
        return found

    def copy_word(self, index: int, source: CudaSegment, source_index: int) -> None:
        """Copy a flag's int32 word, in stream order: behind all that the stream copied before."""
        flag = self.tensor(4 * index, (1,), torch.int32)
        flag.copy_(source.tensor(4 * source_index, (1,), torch.int32), non_blocking=True)


def allocate(
    group: TorchGroup,
    label: str,
    size: int,
    device: torch.device,
    first_words: Sequence[int] = (),
    first_value: int = 0,
) -> list[CudaSegment]:
    """Zeroed memory of the same size on every rank's GPU, by rank; collective.

    It blocks until every rank of ``group`` is here, so the caller makes sure that all are coming.

    Args:
        label: what it is for, equal on every rank.
        first_words, first_value: int32 words that begin with another value than 0.

    Raises:
        SharedMemoryError: there is no such memory, or torch cannot map the peers'.
        MismatchError: the ranks' allocations are not for the same.
    """
    import torch.distributed._symmetric_memory as symmetric  # not needed by CPU ranks

    _postponed.clear()
    size = max(1, -(-size // _TAIL)) * _TAIL
    rank, world_size = group.rank, group.world_size
    if world_size == 1:
        with torch.inference_mode(False):
            alone = torch.zeros(size, dtype=torch.uint8, device=device)
            _fill(alone, first_words, first_value)
        return [CudaSegment(alone, size, Allocation(alone, None))]
    tag = torch.frombuffer(bytearray(_digest(label, size)), dtype=torch.uint8)
    try:
        with torch.inference_mode(False), torch.cuda.device(device):
            own = symmetric.empty(size + _TAIL, dtype=torch.uint8, device=device)
            own.zero_()
            _fill(own[:size], first_words, first_value)
            own[size : size + len(tag)] = tag.to(device)
            # Peers write as soon as they have mapped it, which the next call lets them do.
            torch.cuda.synchronize(device)
            handle = symmetric.rendezvous(own, group.name)
            if handle is None:
                raise RuntimeError("torch does not take it for symmetric memory")
            shape = (size + _TAIL,)
            view = handle.get_buffer
            if view(rank, shape, torch.uint8).data_ptr() != own.data_ptr():
                # Memory out of a pool may begin later than what torch has mapped.
                view = getattr(handle, "get_remote_tensor", view)
            mine = view(rank, shape, torch.uint8)
            buffers = [
                own if peer == rank else view(peer, shape, torch.uint8)
                for peer in range(world_size)
            ]
    except RuntimeError as error:
        raise SharedMemoryError(
            f"cannot get {size} bytes of symmetric GPU memory for {label}: {error}"
        ) from error
    if mine.data_ptr() != own.data_ptr():
        raise SharedMemoryError(
            f"torch {torch.__version__} maps symmetric memory at an offset that fusedcomm does not "
            "know how to ask for; torch 2.11 to 2.14 are supported"
        )
    for peer, buffer in enumerate(buffers):
        if not torch.equal(buffer[size : size + len(tag)].cpu(), tag):
            raise MismatchError(
                f"rank {rank} got memory of rank {peer} that is not for [{label}]: threads of "
                "several channels allocated at once, in another order on each rank. Let one thread "
                "allocate ahead, with Communicator.reserve."
            )
    allocation = Allocation(own, handle)
    return [CudaSegment(buffer[:size], size, allocation) for buffer in buffers]


def _fill(memory: torch.Tensor, words: Sequence[int], value: int) -> None:
    if words:
        memory.view(torch.int32)[torch.tensor(words, device=memory.device)] = value


def _digest(label: str, size: int) -> bytes:
    return hashlib.blake2b(f"{label} {size}".encode(), digest_size=8).digest()
