"""The fence between data and flags, for a host that writes both from Python.

x86-64 keeps ordinary stores in order, but a copy or a GEMM may end in non-temporal stores, which
only a fence or a locked instruction orders; taking and giving back a lock is one. aarch64 reorders
ordinary accesses as well and needs a real fence, which libatomic exports. x86-64 is tested;
aarch64 is written by the book and has not been run.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

_SEQ_CST = 5


def make_fence() -> Callable[[], None]:
    """A function that orders all memory accesses before it against all after it.

    Raises:
        RuntimeError: this machine's architecture has no known fence.
    """
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        lock = threading.Lock()

        def locked_instruction() -> None:
            with lock:
                pass

        return locked_instruction
    if machine in ("aarch64", "arm64"):
        try:
            thread_fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
        except OSError as error:
            raise RuntimeError(
                "fusedcomm on aarch64 needs libatomic.so.1 (Debian: libatomic1) for its fences"
            ) from error
        return lambda: thread_fence(_SEQ_CST)
    raise RuntimeError(f"fusedcomm has no memory fence for the architecture {machine!r}")
