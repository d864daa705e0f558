"""Collectives on the host engine: peers read each other's memory, in pieces that stay in cache.

============== ======================================= ============================================
operation      this rank has                           this rank gets
============== ======================================= ============================================
all_reduce     x [size]                                out [size], the reduction over ranks
all_gather     x [outer, own columns]                  out [outer, all columns]
reduce_scatter x [outer, all columns]                  out [outer, own columns] of the reduction
all_to_all     x [rows, inner], cut by counts[rank]    out: what every rank sent it, in their order
broadcast      x [size] on src                         out [size] everywhere
============== ======================================= ============================================

Every function is one call on the communicator, whatever the number of pieces, and fills ``out``.
A piece takes a slot: a rank copies in what peers read of it, signals, does the same for the next
piece, and only then waits for the peers' part of this one. An x that lies in a symmetric tensor on
every rank is read there, in one piece; the call then ends when every peer has read it.

Flags: ready[me][message] on the reader, awaited there by the same function; consumed on every peer
at the end of each piece, whether or not anything was read of it: the next call may be another.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.host.combining import combine
from fusedcomm.engines.host.exchanging import (
    Piece,
    Resident,
    arrivals,
    columns,
    copy,
    cut,
    exchange,
    exchange_counts,
    offer_parts,
    parts_of,
    place,
    wait_for,
)
from fusedcomm.engines.host.running import Execution, pieces_of, stages
from fusedcomm.planning import collectives as planning
from fusedcomm.planning.collectives import Plan, space
from fusedcomm.protocol import SLOTS, Call
from fusedcomm.trace import span

Bounds = list[tuple[int, int]]


def all_reduce(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    """``out = reduction over ranks of x``, bitwise equal on every rank; both flat."""
    # Peers may still read x there when this rank's result is written.
    resident = None if out.data_ptr() == x.data_ptr() else comm.memory.find_symmetric(x)
    with comm.collective(plan.text + place(resident)):
        if comm.world_size == 1:
            out.copy_(x)
            return
        pieces = pieces_of(x.numel(), x.dtype, planning.SLOT_BYTES)
        # As many at a time as there are slots, stage by stage: while one piece's messages are
        # under way, the other one is worked on.
        for first in range(0, len(pieces), SLOTS):
            executions = [
                _begun(comm, plan, x, out, start, stop, reduction, resident)
                for start, stop in pieces[first : first + SLOTS]
            ]
            for stage in range(1, max(len(execution.stages) for execution in executions)):
                for execution in executions:
                    if stage < len(execution.stages):
                        execution.run(stage)
        if resident is not None:
            executions[-1].await_done()


def _begun(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    out: Tensor,
    start: int,
    stop: int,
    reduction: str,
    resident: Resident | None,
) -> Execution:
    """The execution of a piece, its first stage run."""
    size = stop - start
    program = stages(plan.algorithm, size, comm.world_size, comm.rank, plan.domains)
    if size != x.shape[0]:
        x, out = x[start:stop], out[start:stop]
        if resident is not None:
            resident = resident[0], resident[1] + start * x.dtype.itemsize
    execution = Execution(comm, "all_reduce", program, x, out, reduction, resident)
    execution.run(0)
    return execution


def all_gather(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds) -> None:
    """``out[:, bounds[r]] = x of rank r``."""
    rank, dtype = comm.rank, x.dtype
    own = columns(out, bounds[rank])
    resident = comm.memory.find_symmetric(x)
    with comm.collective(plan.text + place(resident)):
        if comm.world_size == 1:
            own.copy_(x)
            return

        def offer(call: Call, piece: Piece) -> None:
            part = piece.of(x)
            copy(call.write(rank, 0, tuple(part.shape), dtype), part, rank, "of", rank)

        def take(call: Call, piece: Piece) -> None:
            for source in arrivals(comm, call):
                part = piece.of(columns(out, bounds[source]))
                if source == rank:
                    theirs = piece.of(x)
                elif resident is None:
                    theirs = call.read(source, 0, tuple(part.shape), dtype)
                else:
                    tensor, base = resident
                    theirs = call.read_symmetric(tensor, source, base, tuple(part.shape), dtype)
                copy(part, theirs, rank, "from", source)

        pieces = cut(x.shape[0], bounds[0][1], dtype, 1, resident)
        exchange(
            comm, "all_gather", pieces, pieces[0].elements * dtype.itemsize, offer, take, resident
        )


def reduce_scatter(
    comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds, reduction: str
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``, added in the order of ranks."""
    rank, world_size, dtype = comm.rank, comm.world_size, x.dtype
    resident = comm.memory.find_symmetric(x)
    with comm.collective(plan.text + place(resident)):
        if world_size == 1:
            out.copy_(x)
            return
        pieces = cut(x.shape[0], bounds[0][1], dtype, world_size, resident)
        region = pieces[0].elements * dtype.itemsize

        def offer(call: Call, piece: Piece) -> None:
            offer_parts(call, piece, [columns(x, b) for b in bounds], region)

        def part_of(call: Call, piece: Piece, source: int, shape: tuple[int, ...]) -> Tensor:
            if source == rank:
                return piece.of(columns(x, bounds[rank]))
            if resident is None:
                return call.read(source, rank * region, shape, dtype)
            tensor, base = resident
            theirs = call.read_symmetric(tensor, source, base, tuple(x.shape), dtype)
            return piece.of(columns(theirs, bounds[rank]))

        def take(call: Call, piece: Piece) -> None:
            for _ in arrivals(comm, call):
                pass  # The sum is made in one pass, in the order of ranks.
            target = piece.of(out)
            shape = tuple(target.shape)
            parts = [part_of(call, piece, source, shape) for source in range(world_size)]
            with span("reduce", "own part", rank=rank):
                combine(parts, [target], reduction, world_size if reduction == "avg" else 1)

        exchange(comm, "reduce_scatter", pieces, world_size * region, offer, take, resident)


def all_to_all(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    out: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
) -> None:
    """``out`` is the concatenation of the rows that every rank has for this one.

    Args:
        x, out: ``[rows, inner]``.
        send_counts, recv_counts: rows for and from each rank; both None for equal parts.
    """
    rank, world_size, dtype = comm.rank, comm.world_size, x.dtype
    inner = x.shape[1]
    resident = comm.memory.find_symmetric(x)
    with comm.collective(plan.text + place(resident)):
        if world_size == 1:
            out.copy_(x)
            return
        if send_counts is None or recv_counts is None:
            share = x.shape[0] // world_size
            counts, widest = [[share] * world_size] * world_size, share
        else:
            counts = exchange_counts(comm, send_counts, recv_counts)
            pairs = ((a, b) for a in range(world_size) for b in range(world_size) if a != b)
            widest = max(counts[a][b] for a, b in pairs)
        everyone = range(world_size)
        sent = parts_of(x, [counts[rank][to] * inner for to in everyone])
        received = parts_of(out, [counts[source][rank] * inner for source in everyone])
        pieces = cut(1, widest * inner, dtype, world_size, resident)
        region = pieces[0].elements * dtype.itemsize

        def offer(call: Call, piece: Piece) -> None:
            offer_parts(call, piece, sent, region)

        def take(call: Call, piece: Piece) -> None:
            for source in arrivals(comm, call):
                if source == rank:
                    if piece.left == 0:  # once, whole: the pieces are cut for what travels
                        received[rank].copy_(sent[rank])
                    continue
                part = piece.of(received[source])
                if resident is None:
                    theirs = call.read(source, rank * region, tuple(part.shape), dtype)
                else:
                    tensor, base = resident
                    base += sum(counts[source][:rank]) * inner * dtype.itemsize
                    theirs = call.read_symmetric(tensor, source, base, tuple(part.shape), dtype)
                copy(part, theirs, rank, "from", source)

        exchange(comm, "all_to_all", pieces, world_size * region, offer, take, resident)


def broadcast(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, src: int) -> None:
    """``out = x of src``; both flat. What x holds elsewhere does not matter."""
    rank, dtype = comm.rank, x.dtype
    peers = comm.successors
    with comm.collective(plan.text):
        if rank == src and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        if not peers:
            return
        for start, stop in pieces_of(x.numel(), dtype, planning.SLOT_BYTES):
            shape = (stop - start,)
            call = comm.memory.take(
                "broadcast", space((stop - start) * dtype.itemsize, comm.world_size)
            )
            if rank == src:
                for peer in peers:
                    call.await_reader(peer)
                copy(call.write(rank, 0, shape, dtype), x[start:stop], rank, "of", rank)
                for peer in peers:
                    call.signal(peer)
            else:
                wait_for(call, src)
                copy(out[start:stop], call.read(src, 0, shape, dtype), rank, "from", src)
            for peer in peers:
                call.consumed(peer)
