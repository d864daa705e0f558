"""What the one-step collectives of the host engine share: pieces, slots, arrivals, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.planning import collectives as planning
from fusedcomm.planning.collectives import space
from fusedcomm.protocol import Call
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import is_open, span

#: The symmetric tensor in which every rank's input lies, and where in it, in bytes.
Resident = tuple[SymmetricTensor, int]


def place(resident: Resident | None) -> str:
    """Where an input lies, for the board: all ranks' must lie alike."""
    return "" if resident is None else f" in symmetric tensor {resident[0].number} at {resident[1]}"


class Piece(NamedTuple):
    """Rows and columns of a part, in which parts with fewer columns have fewer or none."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def elements(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def of(self, part: Tensor) -> Tensor:
        """The piece of a part ``[rows, columns]``."""
        rows, columns = part.shape
        if self.right >= columns and self.bottom >= rows and not self.left and not self.top:
            return part
        return part[self.top : self.bottom, self.left : self.right]


def columns(x: Tensor, bounds: tuple[int, int]) -> Tensor:
    """Columns of a matrix; less work than a slice."""
    start, stop = bounds
    return x.narrow(1, start, stop - start)


def cut(
    rows: int, width: int, dtype: torch.dtype, parts: int, resident: Resident | None
) -> list[Piece]:
    """Cut the widest part so that ``parts`` of them fit into a slot; whole where all lies in place.

    At least one piece, which may be empty; the first one is the largest.
    """
    fitting = max(1, planning.SLOT_BYTES // dtype.itemsize // parts)
    if resident is not None or rows * width <= fitting:
        return [Piece(0, rows, 0, width)]
    if width <= fitting:
        step = fitting // width
        return [Piece(top, min(top + step, rows), 0, width) for top in range(0, rows, step)]
    return [
        Piece(row, row + 1, left, min(left + fitting, width))
        for row in range(rows)
        for left in range(0, width, fitting)
    ]


def exchange(
    comm: Communicator,
    op: str,
    pieces: list[Piece],
    nbytes: int,
    offer: Callable[[Call, Piece], None],
    take: Callable[[Call, Piece], None],
    resident: Resident | None,
) -> None:
    """Every piece through a slot of its own; one is offered before the last one is taken.

    Args:
        nbytes: what a slot must hold where nothing is resident.
        offer: copies in what peers read of a piece; not called where it is resident.
        take: reads what they offered, when it has ``arrivals``.
    """
    peers = comm.successors
    need = space(0 if resident is not None else nbytes, comm.world_size)

    def finish(call: Call, piece: Piece) -> None:
        take(call, piece)
        for peer in peers:
            call.consumed(peer)

    before: tuple[Call, Piece] | None = None
    for piece in pieces:
        call = comm.memory.take(op, need)
        for peer in peers:
            call.await_reader(peer)
        if resident is None:
            offer(call, piece)
        for peer in peers:
            call.signal(peer)
        if before is not None:
            finish(*before)
        before = (call, piece)
    assert before is not None
    finish(*before)
    if resident is not None:
        for peer in peers:
            before[0].await_done(peer)


def arrivals(comm: Communicator, call: Call) -> Iterator[int]:
    """This rank, then every peer when what it offers is there."""
    rank = comm.rank
    yield rank
    for source in comm.successors:
        wait_for(call, source)
        yield source


def wait_for(call: Call, source: int, message: int = 0) -> None:
    """Wait for what a peer offers; seen in traces."""
    if not is_open():  # naming a span costs as much as a flag that is up
        call.wait(source, message)
        return
    flag = call.flag(source, message)
    with span("wait", f"wait for rank {source}", rank=call.rank, awaits=flag):
        call.wait(source, message)


def copy(target: Tensor, source: Tensor, rank: int, what: str, peer: int) -> None:
    """``target = source``; seen in traces as "copy ``what`` rank ``peer``"."""
    if not is_open():
        target.copy_(source)
        return
    with span("copy", f"copy {what} rank {peer}", rank=rank):
        target.copy_(source)


def offer_parts(call: Call, piece: Piece, parts: Iterable[Tensor], region: int) -> None:
    """Copy each peer's part into this rank's slot, ``region`` bytes apart."""
    for peer, part in enumerate(parts):
        if peer != call.rank:
            chosen = piece.of(part)
            target = call.write(call.rank, peer * region, tuple(chosen.shape), part.dtype)
            copy(target, chosen, call.rank, "for", peer)


def parts_of(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive parts of a contiguous tensor, each ``[1, size]``."""
    flat, start, parts = x.view(1, x.numel()), 0, []
    for size in sizes:
        parts.append(flat.narrow(1, start, size))
        start += size
    return parts


def exchange_counts(
    comm: Communicator, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> list[list[int]]:
    """``counts[a][b]``: how many rows rank a has for rank b; one exchange of its own.

    Raises:
        MismatchError: a rank sends not what another one expects.
    """
    rank, world_size = comm.rank, comm.world_size
    peers = comm.successors
    shape = (2 * world_size,)
    call = comm.memory.take("all_to_all", space(16 * world_size, world_size))
    for peer in peers:
        call.await_reader(peer)
    call.write(rank, 0, shape, torch.int64).copy_(torch.tensor([*send_counts, *recv_counts]))
    for peer in peers:
        call.signal(peer)
    counts: list[list[int]] = [[*send_counts, *recv_counts]] * world_size
    for source in arrivals(comm, call):
        if source != rank:
            counts[source] = call.read(source, 0, shape, torch.int64).tolist()
    for peer in peers:
        call.consumed(peer)
    return check_all_counts(counts)
