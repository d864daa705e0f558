"""What tests of faults send to the ranks: every operation, a fault, and what a rank saw of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fusedcomm as fc

#: Rows of a rank: few make one GEMM and, for an all-reduce, one exchange; many are cut by chunks.
FEW, MANY = 4, 256
K, N = 8, 6

OPS = {
    "all_gather_linear": "all_gather_linear",
    "all_gather_linear, chunked": "all_gather_linear",
    "all_gather_linear, in place": "all_gather_linear",
    "linear_reduce_scatter": "linear_reduce_scatter",
    "linear_reduce_scatter, chunked": "linear_reduce_scatter",
    "linear_all_reduce, one-shot": "linear_all_reduce",
    "linear_all_reduce, two-shot": "linear_all_reduce",
}
"""Forms of the operations, and the names by which messages call them."""


def call(form: str, comm: fc.Communicator, *, scale: int = 1, engine: str = "auto") -> torch.Tensor:
    """A correct call; ``scale`` multiplies the rows."""
    rows = scale * (MANY if "chunked" in form or "two-shot" in form else FEW)
    weight = torch.ones(N, K)
    if form.startswith("all_gather"):
        x = torch.ones(rows, K)
        if form.endswith("in place"):
            symmetric = comm.symmetric_empty(rows, K)
            x = symmetric.local.copy_(x)
        return fc.all_gather_linear(x, weight, group=comm, engine=engine)
    x = torch.ones(rows * comm.world_size, K)
    op = fc.linear_reduce_scatter if "scatter" in form else fc.linear_all_reduce
    return op(x, weight, group=comm, engine=engine)


def right(form: str, comm: fc.Communicator, y: torch.Tensor) -> bool:
    """Whether y is the result of ``call``."""
    return bool((y == (K if form.startswith("all_gather") else K * comm.world_size)).all())


@dataclass(frozen=True)
class Seen:
    """How a fault looked on one rank.

    error, message   the exception's type and text; "" if there was none
    at_ns            when it came, by ``time.monotonic_ns``, which all processes share
    after            what the next call on the same communicator then raised, as "Type: text"
    """

    error: str
    message: str
    at_ns: int
    after: str


def see(comm: fc.Communicator, work: Callable[[], Any]) -> Seen:
    """Does ``work``, which may fail, and then tries the communicator once more."""
    try:
        work()
    except fc.FusedcommError as error:
        at_ns = time.monotonic_ns()
        return Seen(type(error).__name__, str(error), at_ns, refusal(comm))
    return Seen("", "", time.monotonic_ns(), "")


def refusal(comm: fc.Communicator) -> str:
    """How the communicator refuses a call, or "" if it does not."""
    try:
        comm.barrier()
    except fc.FusedcommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_files() -> list[str]:
    """What this process's file descriptors stand for; gloo's TCP sockets are left out.

    Their numbers are not told: a list before and a list after are equal if nothing was left open.
    """
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    names = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            kind, _, inode = os.readlink(f"/proc/self/fd/{entry}").partition(":[")
            if kind != "socket" or inode.rstrip("]") in unix:
                names.append(kind)
    return sorted(names)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def before(owner: Any, name: str, action: Callable[[], object], nth: int = 0) -> None:
    """From now on in this process, ``action()`` runs before the nth call of ``owner.name``."""
    original = getattr(owner, name)
    numbers = count()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == nth:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
