"""The all-gather of the host engine: every rank reads its peers' chunks in place.

A rank copies its chunk into its own memory once and signals each peer; who reads needs no copy.
The rank's own chunk comes first and is not waited for, so its use covers the peers' copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.planning.tensor_parallel import gather_space
from fusedcomm.schedule import piece_bounds, successors
from fusedcomm.trace import span


def describe(comm: Communicator, shard: torch.Tensor) -> str:
    """Where the shard lies, for the board: all ranks' must lie alike."""
    found = comm.memory.find_symmetric(shard)
    return "" if found is None else f" in symmetric tensor {found[0].number} at {found[1]}"


def gather(
    comm: Communicator,
    op: str,
    shard: torch.Tensor,
    bounds: list[tuple[int, int]],
    pieces: int,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ``(start, stop, rows)`` for every part of the gathered tensor, own chunk first.

    Each ``rows`` may be read until the next step of the iteration; the iteration must be finished.
    A shard that lies in a symmetric tensor is read there by the peers, and nothing is copied in.

    Args:
        shard: this rank's rows, ``[rows, features]``.
        bounds: which rows of the gathered tensor each rank has; the first chunk is the longest.
        pieces: signalled pieces per chunk.

    Flags: ready[me][piece] on each peer, awaited there by this function; consumed likewise.
    """
    rank, features, dtype = comm.rank, shard.shape[1], shard.dtype
    row_bytes = features * dtype.itemsize
    peers = successors(rank, comm.world_size)
    resident = comm.memory.find_symmetric(shard)
    if peers:
        call = comm.memory.take(op, gather_space(bounds, 0 if resident else row_bytes, pieces))
        if resident is None:
            for peer in peers:
                call.await_reader(peer)
        for piece, (start, stop) in enumerate(piece_bounds(shard.shape[0], pieces)):
            if resident is None:
                with span("copy", "copy in", rank=rank, signal=call.flag(rank, piece)):
                    place = (start * row_bytes, (stop - start, features), dtype, piece)
                    call.write(rank, *place).copy_(shard[start:stop])
            for peer in peers:
                call.signal(peer, piece)
    yield *bounds[rank], shard
    for source in peers:
        first, last = bounds[source]
        for piece, (start, stop) in enumerate(piece_bounds(last - first, pieces)):
            flag = call.flag(source, piece)
            with span("wait", f"wait for rank {source}", rank=rank, awaits=flag):
                call.wait(source, piece)
            if stop == start:
                continue
            offset, shape = start * row_bytes, (stop - start, features)
            if resident is None:
                rows = call.read(source, offset, shape, dtype, piece)
            else:
                tensor, base = resident
                rows = call.read_symmetric(tensor, source, base + offset, shape, dtype, piece)
            yield first + start, first + stop, rows
        call.consumed(source)
    if resident is not None and peers:
        call.await_done(peers)
