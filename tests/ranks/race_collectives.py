"""Calls of every collective and of messages, for the race checker; rank functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm import pairs
from fusedcomm.programs import ALGORITHMS
from fusedcomm.protocol import Workspace
from fusedcomm.testing.races.recording import replaced
from tests.ranks.collective_calls import counts_of, going_round, small_slots

CALLS = 3
#: Elements of a vector; float32. With slots of 64 bytes it goes through in several pieces.
SIZE = 43


def _input(comm: fc.Communicator, size: int = SIZE) -> Tensor:
    return torch.randn(size)


def _all_reduce(algorithm: str) -> Callable[[fc.Communicator], None]:
    def call(comm: fc.Communicator) -> None:
        x = _input(comm)
        fc.all_reduce(x, group=comm, algorithm=algorithm)
        fc.all_reduce(x, group=comm, algorithm=algorithm, op="avg", out=x)

    return call


def _all_gather(comm: fc.Communicator) -> None:
    rows = -(-7 // comm.world_size)
    x = torch.randn(max(0, min(rows, 7 - rows * comm.rank)), 3)
    fc.all_gather(x, gathered_size=7, group=comm)
    fc.all_gather(torch.randn(3, 2), dim=1, group=comm)


def _reduce_scatter(comm: fc.Communicator) -> None:
    fc.reduce_scatter(torch.randn(7, 5), group=comm)
    fc.reduce_scatter(torch.randn(7, 5), dim=1, group=comm)


def _all_to_all(comm: fc.Communicator) -> None:
    fc.all_to_all(torch.randn(2 * comm.world_size, 3), group=comm)


def _all_to_all_counts(comm: fc.Communicator) -> None:
    n = comm.world_size
    counts = counts_of(1, n)
    receives = [counts[source][comm.rank] for source in range(n)]
    x = torch.randn(sum(counts[comm.rank]), 3)
    fc.all_to_all(x, send_counts=counts[comm.rank], recv_counts=receives, group=comm)


def _broadcast(comm: fc.Communicator) -> None:
    for src in (0, 0, comm.world_size - 1):
        fc.broadcast(_input(comm), src, group=comm)


def _in_place(comm: fc.Communicator) -> None:
    """Peers read the input where it is, and it is written anew at once."""
    n = comm.world_size
    memory = comm.symmetric_empty(4 * n, 3)
    x = memory.local
    operations: tuple[Callable[..., Tensor], ...] = (
        lambda x: fc.all_reduce(x, group=comm, algorithm="two_shot"),
        lambda x: fc.all_reduce(x, group=comm, algorithm="one_shot"),
        lambda x: fc.all_reduce(x, group=comm, out=x),
        lambda x: fc.all_gather(x, group=comm),
        lambda x: fc.reduce_scatter(x, group=comm),
        lambda x: fc.all_to_all(x, group=comm),
    )
    for operation in operations:
        x.normal_()
        operation(x)
    x.zero_()


def _messages(comm: fc.Communicator, sizes: tuple[int, ...]) -> None:
    """Messages of so many parts; more than the buffer holds, around the ring in both directions."""
    n = comm.world_size
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    elements = pairs.PART_BYTES // 4
    for parts in sizes:
        x = torch.randn(parts * elements - 3)
        fc.batch_send_recv(
            [
                ("send", x, after),
                ("recv", torch.empty_like(x), before),
                ("send", x, before),
                ("recv", torch.empty_like(x), after),
            ],
            group=comm,
        )


OPERATIONS: dict[str, Callable[[fc.Communicator], None]] = {
    **{f"all_reduce {algorithm}": _all_reduce(algorithm) for algorithm in ALGORITHMS},
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all counts": _all_to_all_counts,
    "broadcast": _broadcast,
    "in place": _in_place,
}


def calls(
    rank: int, names: tuple[str, ...], slot_bytes: int, same_slot: bool, round_: bool = False
) -> None:
    """Three rounds of the operations.

    Args:
        round_: whether the even ranks go round their banks, the others not.
    """
    comm = fc.Communicator.of(channel="races round" if round_ else "races")
    with contextlib.ExitStack() as stack:
        if round_:
            stack.enter_context(going_round(rank % 2 == 0))
        stack.enter_context(small_slots(slot_bytes))
        if same_slot:
            stack.enter_context(replaced(Workspace, take_slot=lambda self: 0))
        for _ in range(CALLS):
            for name in names:
                OPERATIONS[name](comm)


def messages(rank: int, sizes: tuple[int, ...]) -> None:
    comm = fc.Communicator.of(channel="racing messages")
    with replaced(pairs, PART_BYTES=64):
        for _ in range(CALLS):
            _messages(comm, sizes)


def faulty_calls(rank: int, fault: str, *arguments: Any) -> None:
    from tests.interpreter import race_faults

    with race_faults.FAULTS[fault]():
        calls(rank, *arguments)


def faulty_messages(rank: int, fault: str) -> None:
    with _MESSAGE_FAULTS[fault]():
        messages(rank, (pairs.PARTS // 2 + 1,))  # all alike, so that no comparison stops it


@contextlib.contextmanager
def _finished_before_copying(side: Any) -> Iterator[None]:
    """The counter goes on before the part was written, or read."""
    copy, finish = side.copy, side.finish

    def early(self: Any, place: int, part: Tensor) -> None:
        finish(self, max(1, -(-part.numel() // pairs.PART_BYTES)))
        copy(self, place, part)

    with replaced(side, copy=early, finish=lambda self, parts: None):
        yield


_MESSAGE_FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "written before": lambda: _finished_before_copying(pairs._Sending),
    "emptied before": lambda: _finished_before_copying(pairs._Receiving),
    "no room awaited": lambda: replaced(pairs._Sending, ready=lambda self, parts: True),
}
