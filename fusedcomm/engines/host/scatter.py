"""The reduce-scatter of the host engine: every rank writes its partials where they are summed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.combining import add_in_order
from fusedcomm.planning.tensor_parallel import scatter_space
from fusedcomm.schedule import piece_bounds, reduce_order
from fusedcomm.trace import span

#: Fills a tensor with this rank's partial result for rows start..stop.
Partial = Callable[[int, int, torch.Tensor], None]


def reduce_scatter(
    comm: Communicator,
    op: str,
    partial: Partial,
    accumulate: Partial | None,
    *,
    bounds: list[tuple[int, int]],
    features: int,
    wire: torch.dtype,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    pieces: int,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' partials: ``[rows, features]`` in ``dtype``.

    The partials are made in the order next rank … own rank, each straight in its owner's memory,
    and added in float32 in the order of ranks; then the bias, and one rounding.

    Args:
        partial: writes this rank's partial into a tensor of dtype ``wire``.
        accumulate: adds it to what the tensor holds, in the GEMM's own accumulator; used for two
            ranks, where it saves a pass over the result. None if there is no such thing.
        bounds: which rows of the result each rank gets; the first chunk is the longest.

    Flags: ready[me][piece] on the owner, awaited there by this function; consumed likewise.
    """
    rank, world_size = comm.rank, comm.world_size
    row_bytes = features * wire.itemsize
    if world_size > 1:
        call = comm.memory.take(op, scatter_space(bounds, row_bytes, pieces))
    *owners, _ = reduce_order(rank, world_size)
    for owner in owners:
        call.await_reader(owner)
        first, last = bounds[owner]
        for piece, (start, stop) in enumerate(piece_bounds(last - first, pieces)):
            flag = call.flag(rank, piece, owner)
            with span("gemm", f"partial for rank {owner}", rank=rank, signal=flag):
                place = (start * row_bytes, (stop - start, features), wire, piece)
                partial(first + start, first + stop, call.write(owner, *place))
            call.signal(owner, piece)

    first, last = bounds[rank]
    rows = last - first

    def await_part(source: int) -> torch.Tensor:
        for piece in range(pieces):
            flag = call.flag(source, piece, rank)
            with span("wait", f"wait for rank {source}", rank=rank, awaits=flag):
                call.wait(source, piece)
        return call.read(source, 0, (rows, features), wire)

    if world_size == 2 and accumulate is not None and bias is None:
        peer = 1 - rank
        result = torch.empty(rows, features, dtype=dtype)
        theirs = await_part(peer)
        with span("gemm", "own rows, added to the peer's partial", rank=rank):
            accumulate(first, last, result.copy_(theirs))
        call.consumed(peer)
        return result
    with span("gemm", "own rows", rank=rank):
        own = torch.empty(rows, features, dtype=wire)
        partial(first, last, own)
    parts = [own if source == rank else await_part(source) for source in range(world_size)]
    with span("reduce", "add the partials", rank=rank):
        result = add_in_order(parts, bias, dtype)
    for owner in owners:
        call.consumed(owner)
    return result
