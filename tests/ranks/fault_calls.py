"""What tests of faults share: calls, faults, what a rank saw of them and what it may have seen.

Everything runs on the ranks, except for ``survivors``, ``assert_lost`` and ``assert_told``.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fusedcomm as fc
from fusedcomm.testing import Outcome

Record = Callable[[str, object], None]  # pytest's record_property

#: Seconds from a fault to the errors, on a machine with too much else to do. The design says 2.
LIMIT_S = 10.0

REASON = "told on purpose"

# Calls

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

#: How a rank can come to wait for all others.
WAYS_TO_WAIT = (
    "an operation",
    "its backward pass",
    "a plain operation",
    "barrier",
    "symmetric_empty",
    "growth",
)


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


def assert_works(comm: fc.Communicator) -> None:
    for form in OPS:
        assert right(form, comm, call(form, comm)), form


def wait_for_all(comm: fc.Communicator, how: str) -> None:
    """Does what no rank can finish alone; ``how`` is one of ``WAYS_TO_WAIT``."""
    if how == "barrier":
        comm.barrier()
    elif how == "symmetric_empty":
        comm.symmetric_empty(10)
    elif how == "growth":
        call("all_gather_linear", comm, scale=5000)
    elif how == "its backward pass":
        x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
        fc.replicated_linear(x, weight, group=comm).sum().backward()
    else:
        call("linear_reduce_scatter", comm, engine="plain" if "plain" in how else "auto")


# Faults


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Stumbled(Exception):  # noqa: N818
    """Raised on purpose."""


def stumble(error: type[BaseException]) -> None:
    raise error(REASON)


def before(owner: Any, name: str, action: Callable[[], object], nth: int = 0) -> None:
    """From now on in this process, ``action()`` runs before the nth call of ``owner.name``."""
    original = getattr(owner, name)
    numbers = count()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == nth:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    """A soft limit of this process, one of ``resource.RLIMIT_*``."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


# What was seen of them


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


def survivors(outcomes: Sequence[Outcome], victim: int, record: Record) -> list[Seen]:
    """What the other ranks saw of the victim's death, which they must have done in time."""
    assert outcomes[victim].fate == "died", outcomes[victim]
    seen = []
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.fate == "returned", f"{outcome.summary}\n{outcome.details}"
            seen.append(outcome.value)
    took = max(one.at_ns - outcomes[victim].at_ns for one in seen) / 1e9
    record("noticed_s", round(took, 3))
    assert took < LIMIT_S, took
    return seen


def assert_lost(seen: Sequence[Seen], victim: int, op: str) -> None:
    for one in seen:
        assert_told(one, "PeerLostError", f"rank {victim}", op)


def assert_told(seen: Seen, error: str, *words: str) -> None:
    """That the error is of this type and has these words, and that later calls repeat it."""
    assert seen.error == error, seen
    assert all(word in seen.message for word in words), seen
    assert seen.after.startswith("ClosedError") and seen.message in seen.after, seen


# What a process holds


def held() -> tuple[list[str], list[int]]:
    """What its open files stand for, and the sizes of the shared memory that it maps."""
    gc.collect()
    return open_files(), mappings()


def mappings() -> list[int]:
    """Sizes in bytes of the shared memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:fusedcomm" in line]
    return sorted(int(stop, 16) - int(start, 16) for start, stop in spans)


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
