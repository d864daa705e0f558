"""Anonymous shared memory of one machine.

A segment is a memfd: it has no name, so nothing is left behind when a rank is killed, and the size
of ``/dev/shm`` does not limit it. The kernel frees it when the last mapping is gone.
"""

from __future__ import annotations

import mmap
import os

import torch

from fusedcomm.errors import SharedMemoryError


class Segment:
    """``size`` bytes of zeroed memory, mapped into this process and, by descriptor, into peers."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        #: The memory as int32 words, for flags: one load or store each, never torn.
        self.words = memoryview(self._map).cast("i")
        self.bytes = memoryview(self._map)

    @classmethod
    def create(cls, label: str, size: int) -> Segment:
        """Make a segment; every page is reserved now.

        Raises:
            SharedMemoryError: the memory is not to be had (found here, not by a SIGBUS later).
        """
        size = max(size, mmap.PAGESIZE)
        fd = -1
        try:
            fd = os.memfd_create(f"fusedcomm:{label}", os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise SharedMemoryError(
                f"cannot get {size} bytes of shared memory for {label}: {error.strerror}"
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """Map a segment whose descriptor came from a peer; takes over ``fd`` and closes it.

        Raises:
            SharedMemoryError: it cannot be mapped.
        """
        try:
            return cls(fd, size)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map {size} bytes of a peer's shared memory: {error.strerror}"
            ) from error
        finally:
            os.close(fd)

    @property
    def descriptor(self) -> int:
        return self._fd

    @property
    def address(self) -> int:
        """Where the segment lies in this process's address space."""
        return self.tensor(0, (1,), torch.uint8).data_ptr()

    def release_descriptor(self) -> None:
        """Close the descriptor; the mapping stays until nothing refers to it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from ``offset``; it keeps the mapping alive."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)
