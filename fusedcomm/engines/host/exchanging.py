"""What the one-step collectives of the host engine share: pieces, slots, arrivals, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.planning import collectives as planning
from fusedcomm.planning.collectives import space
from fusedcomm.protocol import SLOTS, Call
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import is_open, span

#: Pieces from which on the time to write them says something.
_JUDGED_BYTES = 1 << 17
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


def piece_of(part: Tensor, piece: Piece | None) -> Tensor:
    """The piece of a part ``[rows, columns]``; None stands for all of it."""
    if piece is None:
        return part
    return part[piece.top : piece.bottom, piece.left : piece.right]


class Cut(NamedTuple):
    """What a part is cut into, and the bytes of the largest piece.

    At least one piece, which may be empty; the first one is the largest.
    """

    pieces: tuple[Piece | None, ...]
    nbytes: int


def cut(
    comm: Communicator,
    rows: int,
    width: int,
    dtype: torch.dtype,
    parts: int,
    resident: Resident | None,
) -> Cut:
    """Cut the widest part so that ``parts`` of them are a piece; not if all lies in place."""
    if resident is not None:
        return Cut((None,), 0)
    most = planning.piece_bytes(comm.world_size)
    return _cut(rows, width, dtype.itemsize, max(1, most // dtype.itemsize // parts))


@lru_cache(maxsize=256)
def _cut(rows: int, width: int, itemsize: int, fitting: int) -> Cut:
    if rows * width <= fitting:
        return Cut((None,), rows * width * itemsize)
    if width <= fitting:
        step = fitting // width
        tops = range(0, rows, step)
        pieces = tuple(Piece(top, min(top + step, rows), 0, width) for top in tops)
    else:
        pieces = tuple(
            Piece(row, row + 1, left, min(left + fitting, width))
            for row in range(rows)
            for left in range(0, width, fitting)
        )
    return Cut(pieces, pieces[0].elements * itemsize)


def exchange(
    comm: Communicator,
    op: str,
    pieces: Sequence[Piece | None],
    nbytes: int,
    offer: Callable[[Call, Piece | None], None],
    take: Callable[[Call, Piece | None], None],
    resident: Resident | None,
    keep: Callable[[Piece | None], None] | None = None,
) -> None:
    """Every piece through a slot of its own; one is offered before the last one is taken.

    Args:
        nbytes: what a slot must hold; nothing where all is resident.
        offer: copies in what peers read of a piece; not called where it is resident.
        take: waits for the peers, and reads what they offered.
        keep: does what needs no peer, while what it reads is still in cache.
    """
    peers = comm.successors
    need = space(nbytes, comm.world_size)
    before: tuple[Call, Piece | None] | None = None
    writing = Writing()
    for number, piece in enumerate(pieces):
        call = comm.memory.take(op, need)
        call.await_readers(peers)
        if number == SLOTS:
            writing.restart()
        if resident is None:
            with writing:
                offer(call, piece)
        call.signal_all(peers)
        if keep is not None:
            keep(piece)
        if before is not None:
            take(*before)
            before[0].consumed_all(peers)
        before = (call, piece)
    assert before is not None
    take(*before)
    before[0].consumed_all(peers)
    writing.judge(before[0], nbytes)
    if resident is not None:
        before[0].await_done(peers)


class Writing:
    """The time within ``with``, in which a rank writes what others read, out of all since it began.

    To be restarted where a call first takes a slot again: memory was read there in this very call.
    """

    __slots__ = ("_began", "_entered", "_spent")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._began, self._spent = perf_counter(), 0.0

    def __enter__(self) -> None:
        self._entered = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spent += perf_counter() - self._entered

    def judge(self, call: Call, nbytes: int) -> None:
        """Have later calls write elsewhere if this took long; pieces of few bytes say nothing."""
        if nbytes >= _JUDGED_BYTES:
            call.judge(self._spent, perf_counter() - self._began)


def steps() -> tuple[Callable[..., None], Callable[..., None]]:
    """``copy(target, source, rank, what, peer)`` and ``wait(call, source, message)``.

    They are seen in a trace if one is open; to name them takes as long as a small copy.
    """
    return (_named_copy, named_wait) if is_open() else (_copy, Call.wait)


def named_wait(call: Call, source: int, message: int = 0) -> None:
    """Wait for what a peer offers."""
    flag = call.flag(source, message)
    with span("wait", f"wait for rank {source}", rank=call.rank, awaits=flag):
        call.wait(source, message)


def _copy(target: Tensor, source: Tensor, *_: object) -> None:
    target.copy_(source)


def _named_copy(target: Tensor, source: Tensor, rank: int, what: str, peer: int) -> None:
    with span("copy", f"copy {what} rank {peer}", rank=rank):
        target.copy_(source)


def offer_parts(
    call: Call,
    piece: Piece | None,
    parts: Sequence[Tensor],
    peers: Sequence[int],
    region: int,
    copy: Callable[..., None],
) -> None:
    """Copy each peer's part into this rank's slot, ``region`` bytes apart, by ``copy``."""
    rank = call.rank
    for peer in peers:
        part = piece_of(parts[peer], piece)
        copy(call.write(rank, peer * region, part.shape, part.dtype), part, rank, "for", peer)


def columns(x: Tensor, bounds: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """The columns of each rank."""
    return x.split_with_sizes([stop - start for start, stop in bounds], 1)


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
    call.await_readers(peers)
    call.write(rank, 0, shape, torch.int64).copy_(torch.tensor([*send_counts, *recv_counts]))
    call.signal_all(peers)
    counts: list[list[int]] = [[*send_counts, *recv_counts]] * world_size
    for source in peers:
        call.wait(source)
        counts[source] = call.read(source, 0, shape, torch.int64).tolist()
    call.consumed_all(peers)
    return check_all_counts(counts)
