"""Anonymous shared memory of one machine.

A segment is a memfd: it has no name, so nothing is left behind when a rank is killed, and the size
of ``/dev/shm`` does not limit it. The kernel frees it when the last mapping is gone.
"""

from __future__ import annotations

import mmap
import os

import torch

from fusedcomm.errors import SharedMemoryError

#: Tensors kept for the next call of the same shape: making one costs as much as a flag's round.
_VIEWS = 256


class Segment:
    """``size`` bytes of zeroed memory, mapped into this process and, by descriptor, into peers."""

    def __init__(self, fd: int, size: int) -> None:
        # Not mmap.mmap, which keeps a descriptor per mapping. Not an inference tensor either, where
        # a workspace is made in inference mode: later calls write into it elsewhere.
        with torch.inference_mode(False):
            self._memory = torch.from_file(
                f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8
            )
        self.size = size
        self.device = self._memory.device
        self.multicast: int | None = None
        self._fd = fd
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self.bytes = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        #: The memory as int32 words, for flags: one load or store each, never torn.
        self.words = self.bytes.cast("i")

    @classmethod
    def create(cls, label: str, size: int) -> Segment:
        """Make a segment, of whole pages; every page is reserved now.

        Raises:
            SharedMemoryError: the memory is not to be had (found here, not by a SIGBUS later).
        """
        size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        fd = -1
        try:
            fd = os.memfd_create(f"fusedcomm:{label}", os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except (OSError, RuntimeError) as error:  # torch reports a failed mapping as the latter
            if fd >= 0:
                os.close(fd)
            raise SharedMemoryError(
                f"cannot get {size} bytes of shared memory for {label}: {error}"
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """Map a segment whose descriptor came from a peer; takes over ``fd`` and closes it.

        Raises:
            SharedMemoryError: it cannot be mapped.
        """
        try:
            segment = cls(fd, size)
        except RuntimeError as error:
            raise SharedMemoryError(
                f"cannot map {size} bytes of a peer's shared memory: {error}"
            ) from error
        finally:
            os.close(fd)
        segment._fd = -1
        return segment

    @property
    def descriptor(self) -> int:
        return self._fd

    @property
    def address(self) -> int:
        """Where the segment lies in this process's address space."""
        return self._memory.data_ptr()

    def release_descriptor(self) -> None:
        """Close the descriptor; the mapping stays until nothing refers to it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def copy_word(self, index: int, source: Segment, source_index: int) -> None:
        """Copy a flag's int32 word; what it is about must be fenced before."""
        self.words[index] = source.words[source_index]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from ``offset``; it keeps the mapping alive."""
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
