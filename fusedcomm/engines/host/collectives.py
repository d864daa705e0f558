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

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.combining import combine
from fusedcomm.engines.host.exchanging import (
    Piece,
    Resident,
    Writing,
    columns,
    cut,
    exchange,
    exchange_counts,
    offer_parts,
    piece_of,
    place,
    steps,
)
from fusedcomm.engines.host.running import Execution, pieces_of, stages
from fusedcomm.planning.collectives import Plan, space
from fusedcomm.protocol import SLOTS, Call
from fusedcomm.trace import span

Bounds = list[tuple[int, int]]


def all_reduce(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    """``out = reduction over ranks of x``, bitwise equal on every rank; both flat."""
    resident = comm.memory.find_symmetric(x, out)
    with comm.collective(plan.text + place(resident)):
        if comm.world_size == 1:
            out.copy_(x)
            return
        pieces = pieces_of(comm, x)
        # As many at a time as there are slots, stage by stage: while one piece's messages are
        # under way, the other one is worked on.
        writing = Writing()
        for first in range(0, len(pieces), SLOTS):
            if first == SLOTS:
                writing.restart()
            executions = [
                _begun(comm, plan, x, out, start, stop, reduction, resident, writing)
                for start, stop in pieces[first : first + SLOTS]
            ]
            for stage in range(1, max(len(execution.stages) for execution in executions)):
                for execution in executions:
                    if stage < len(execution.stages):
                        execution.run(stage)
        nbytes = 0 if resident is not None else pieces[0][1] * x.dtype.itemsize
        writing.judge(executions[-1].call, nbytes)
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
    writing: Writing,
) -> Execution:
    """The execution of a piece, its first stage run."""
    size = stop - start
    program = stages(plan.algorithm, size, comm.world_size, comm.rank, plan.domains)
    if size != x.shape[0]:
        x, out = x[start:stop], out[start:stop]
        if resident is not None:
            resident = resident[0], resident[1] + start * x.dtype.itemsize
    execution = Execution(comm, "all_reduce", program, x, out, reduction, resident, writing)
    execution.run(0)
    return execution


def all_gather(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds) -> None:
    """``out[:, bounds[r]] = x of rank r``."""
    rank, dtype = comm.rank, x.dtype
    resident = comm.memory.find_symmetric(x)
    with comm.collective(plan.text + place(resident)):
        if comm.world_size == 1:
            out.copy_(x)
            return
        copy, wait = steps()
        received = columns(out, bounds)
        pieces, nbytes = cut(comm, x.shape[0], bounds[0][1], dtype, 1, resident)

        def offer(call: Call, piece: Piece | None) -> None:
            part = piece_of(x, piece)
            copy(call.write(rank, 0, part.shape, dtype), part, rank, "of", rank)

        def keep(piece: Piece | None) -> None:
            copy(piece_of(received[rank], piece), piece_of(x, piece), rank, "from", rank)

        def take(call: Call, piece: Piece | None) -> None:
            for source in comm.successors:
                wait(call, source)
                part = piece_of(received[source], piece)
                if resident is None:
                    theirs = call.read(source, 0, part.shape, dtype)
                else:
                    tensor, base = resident
                    theirs = call.read_symmetric(tensor, source, base, part.shape, dtype)
                copy(part, theirs, rank, "from", source)

        exchange(comm, "all_gather", pieces, nbytes, offer, take, resident, keep)


def reduce_scatter(
    comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds, reduction: str
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``, added in the order of ranks."""
    rank, world_size, dtype = comm.rank, comm.world_size, x.dtype
    resident = comm.memory.find_symmetric(x)
    divisor = world_size if reduction == "avg" else 1
    with comm.collective(plan.text + place(resident)):
        if world_size == 1:
            out.copy_(x)
            return
        copy, wait = steps()
        parts = columns(x, bounds)
        pieces, region = cut(comm, x.shape[0], bounds[0][1], dtype, world_size, resident)

        def offer(call: Call, piece: Piece | None) -> None:
            offer_parts(call, piece, parts, comm.successors, region, copy)

        def part_of(call: Call, piece: Piece | None, source: int, shape: torch.Size) -> Tensor:
            if source == rank:
                return piece_of(parts[rank], piece)
            if resident is None:
                return call.read(source, rank * region, shape, dtype)
            tensor, base = resident
            theirs = call.read_symmetric(tensor, source, base, x.shape, dtype)
            return columns(theirs, bounds)[rank]

        def take(call: Call, piece: Piece | None) -> None:
            for source in comm.successors:
                wait(call, source)  # The sum is made in one pass, in the order of ranks.
            target = piece_of(out, piece)
            shape = target.shape
            values = [part_of(call, piece, source, shape) for source in range(world_size)]
            with span("reduce", "own part", rank=rank):
                combine(values, [target], reduction, divisor)

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
            widest = x.shape[0] // world_size
            sends = takes = [widest] * world_size
            begins = [rank * widest] * world_size
        else:
            counts = exchange_counts(comm, send_counts, recv_counts)
            pairs = ((a, b) for a in range(world_size) for b in range(world_size) if a != b)
            widest = max(counts[a][b] for a, b in pairs)
            sends, takes = counts[rank], [counts[source][rank] for source in range(world_size)]
            begins = [sum(counts[source][:rank]) for source in range(world_size)]
        copy, wait = steps()
        sent, received = x.split_with_sizes(sends), out.split_with_sizes(takes)
        pieces, region = cut(comm, widest, inner, dtype, world_size, resident)

        def offer(call: Call, piece: Piece | None) -> None:
            offer_parts(call, piece, sent, comm.successors, region, copy)

        def take(call: Call, piece: Piece | None) -> None:
            if piece == pieces[-1]:  # Whole, once: the pieces are cut for what travels.
                copy(received[rank], sent[rank], rank, "from", rank)
            for source in comm.successors:
                wait(call, source)
                part = piece_of(received[source], piece)
                if resident is None:
                    theirs = call.read(source, rank * region, part.shape, dtype)
                else:
                    tensor, base = resident
                    base += begins[source] * inner * dtype.itemsize
                    theirs = call.read_symmetric(tensor, source, base, part.shape, dtype)
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
        copy, wait = steps()
        for start, stop in pieces_of(comm, x):
            shape = (stop - start,)
            call = comm.memory.take(
                "broadcast", space((stop - start) * dtype.itemsize, comm.world_size)
            )
            if rank == src:
                call.await_readers(peers)
                copy(call.write(rank, 0, shape, dtype), x[start:stop], rank, "of", rank)
                call.signal_all(peers)
            else:
                wait(call, src)
                copy(out[start:stop], call.read(src, 0, shape, dtype), rank, "from", src)
            call.consumed_all(peers)
