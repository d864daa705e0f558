"""The race checker: accesses that nothing orders, found although this run's timing hid them.

    from fusedcomm.testing import RankPool, races

    def calls(rank):                                # importable, as for any pool
        y = fc.all_gather_linear(x, weight, engine="triton")

    with RankPool(2, env={"TRITON_INTERPRET": "1"}) as pool:
        assert races.find(pool, calls) == []

``record`` collects one rank's accesses to symmetric memory (and, of kernels, to memory that their
programs share), each with its rank, launch, program and line of code. ``check`` takes the
recordings of all ranks, derives what the flags and counters guarantee to come before what, and
reports every pair of conflicting accesses that is left without an order.

Its limits: it sees the accesses that this run made, on its shapes and slots, and not how memory
orders them (barriers and fences are for the compile tests). One thread of each rank is recorded.
Barriers of a communicator make order; torch.distributed's own collectives do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusedcomm.ranks.pool import RankPool
from fusedcomm.testing.races.checking import Race, check
from fusedcomm.testing.races.events import Event, Launch, Recording
from fusedcomm.testing.races.recording import record

__all__ = ["Event", "Launch", "Race", "Recording", "check", "find", "record"]


def find(
    pool: RankPool, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Race]:
    """The races of ``fn(rank, *args)``, called on every rank of a pool.

    Args:
        fn: importable by name, as for ``RankPool.run``.
    """
    return check(pool.run(recorded, fn, *args, timeout_s=timeout_s))


def recorded(rank: int, fn: Callable[..., Any], *args: Any) -> Recording:
    """Calls ``fn(rank, *args)`` and returns what was recorded of it on this rank."""
    with record() as recording:
        fn(rank, *args)
    return recording
