"""The all-gather of the host engine: every rank reads its peers' chunks in place.

A rank copies its chunk into its own memory once and signals each peer; who reads needs no copy.
The rank's own chunk comes first and is not waited for, so its use covers the peers' copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.schedule import piece_bounds, successors
from fusedcomm.trace import span


def gather(
    comm: Communicator, op: str, shard: torch.Tensor, bounds: list[tuple[int, int]], pieces: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ``(start, stop, rows)`` for every part of the gathered tensor, own chunk first.

    Each ``rows`` may be read until the next step of the iteration; the iteration must be finished.

    Args:
        shard: this rank's rows, ``[rows, features]``.
        bounds: which rows of the gathered tensor each rank has; the first chunk is the longest.
        pieces: signalled pieces per chunk.

    Flags: ready[me][piece] on each peer, awaited there by this function; consumed likewise.
    """
    rank, features, dtype = comm.rank, shard.shape[1], shard.dtype
    row_bytes = features * dtype.itemsize
    peers = successors(rank, comm.world_size)
    if peers:
        call = comm.take(
            op,
            "gather",
            regions=1,
            region_bytes=(bounds[0][1] - bounds[0][0]) * row_bytes,
            chunks=pieces,
        )
        for peer in peers:
            call.await_reader(peer)
        for piece, (start, stop) in enumerate(piece_bounds(shard.shape[0], pieces)):
            with span("copy", "copy in", rank=rank, piece=piece):
                place = (start * row_bytes, (stop - start, features), dtype, piece)
                call.write(rank, *place).copy_(shard[start:stop])
            for peer in peers:
                call.signal(peer, piece)
    yield *bounds[rank], shard
    for source in peers:
        first, last = bounds[source]
        for piece, (start, stop) in enumerate(piece_bounds(last - first, pieces)):
            with span("wait", f"wait for rank {source}", rank=rank, source=source, piece=piece):
                call.wait(source, piece)
            if stop > start:
                place = (start * row_bytes, (stop - start, features), dtype, piece)
                yield first + start, first + stop, call.read(source, *place)
        call.consumed(source)
