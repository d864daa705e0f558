"""From addresses of this process to names of memory that are the same on every rank.

Symmetric memory is made of memfds. The kernel lists every mapping of one with its inode, and that
is one number, whichever process asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch

from fusedcomm.communicator import Communicator
from fusedcomm.testing.races.events import Range

# start-end permissions offset device inode path
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ \S+ (\d+)\s+/memfd:fusedcomm:(\S+)", re.MULTILINE
)
#: Holds boards, states and barriers, no data and no flags of an operation.
_CONTROL = "control"


class AddressBook:
    """Which mapping of symmetric memory an address lies in."""

    def __init__(self) -> None:
        #: memory -> what people call it
        self.names: dict[str, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the mappings again; to be called when one was made."""
        with open("/proc/self/maps") as maps:
            found = [m for m in _MAPPING.findall(maps.read()) if m[3] != _CONTROL]
        found.sort(key=lambda mapping: int(mapping[0], 16))
        self._starts = np.array([int(start, 16) for start, *_ in found], dtype=np.int64)
        self._ends = np.array([int(end, 16) for _, end, *_ in found], dtype=np.int64)
        self._memories = [f"{label}#{inode}" for *_, inode, label in found]

    def split(self, ranges: np.ndarray) -> Iterator[tuple[str | None, tuple[Range, ...]]]:
        """The memory of ranges of addresses ``[n, 2]``, and where in it they lie, piece by piece.

        None stands for memory of this process alone; there, offsets are addresses.
        """
        index = np.searchsorted(self._starts, ranges[:, 0], side="right") - 1
        if len(self._starts):
            index[(index < 0) | (ranges[:, 0] >= self._ends[index])] = -1
        for place in np.unique(index):
            part = ranges[index == place]
            memory = None
            if place >= 0:
                memory, part = self._memories[place], part - self._starts[place]
            yield memory, tuple(map(tuple, part.tolist()))

    def memory_of(self, address: int) -> tuple[str, int] | None:
        """The symmetric memory at an address, and the offset in it."""
        memory, ((offset, _),) = next(self.split(np.array([[address, address + 1]])))
        return None if memory is None else (memory, offset)

    def name_new(self) -> None:
        """Learn what people call memory: workspaces and tensors of the open communicators."""
        if self.names.keys() >= set(self._memories):
            return
        for comm in _with_domains(Communicator.live()):
            suffix = f", channel {comm.channel!r}" if comm.channel else ""
            named = [
                (f"workspace {kind}", w.segments) for kind, w in comm.memory.workspaces.items()
            ]
            for tensor in comm.memory.tensors():
                named.append((f"symmetric tensor {tensor.number}", tensor.segments))
            if comm._pairs is not None:
                for source, receiver, memory in comm._pairs.segments():
                    if found := self.memory_of(memory.address):
                        name = f"messages from rank {source} to rank {receiver}{suffix}"
                        self.names[found[0]] = name
            for name, segments in named:
                for rank, segment in enumerate(segments):
                    if found := self.memory_of(segment.address):
                        self.names[found[0]] = f"{name} of rank {rank}{suffix}"


def _with_domains(comms: list[Communicator]) -> Iterator[Communicator]:
    """Communicators, and those of the domains that groups are cut into."""
    for comm in comms:
        yield comm
        if comm.inside is not None:
            yield comm.inside


def merged(addresses: np.ndarray, size: int) -> np.ndarray:
    """The ranges ``[n, 2]`` that elements of ``size`` bytes at ``addresses`` cover."""
    if addresses.size == 1:
        start = int(addresses.reshape(-1)[0])
        return np.array([[start, start + size]])
    starts = np.unique(addresses).astype(np.int64)
    first = np.flatnonzero(np.diff(starts, prepend=starts[0] - size - 1) > size)
    last = np.append(first[1:], len(starts)) - 1
    return np.stack([starts[first], starts[last] + size], axis=1)


def of_tensor(tensor: torch.Tensor) -> np.ndarray:
    """The ranges of addresses ``[n, 2]`` that a strided tensor covers."""
    if tensor.numel() == 0:
        return np.empty((0, 2), dtype=np.int64)
    size = tensor.element_size()
    offsets = np.zeros(1, dtype=np.int64)
    run = size  # bytes of the innermost, contiguous part
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, extent in by_stride:
        if extent > 1 and stride * size == run:
            run *= extent
        elif extent > 1 and stride:
            offsets = (offsets[:, None] + np.arange(extent) * stride * size).reshape(-1)
    starts = np.unique(offsets) + tensor.data_ptr()
    return np.stack([starts, starts + run], axis=1)
