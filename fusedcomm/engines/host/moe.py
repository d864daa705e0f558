"""The mixture of experts on the host engine: rows are written straight where they are read.

Every function is one call on the communicator: announced on the board with all that must be equal
on every rank, the table included, then carried out on the workspaces of ``planning.moe``; ``rows``
holds the protocol.
"""

from __future__ import annotations

import numpy as np
import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.host.moe_ffn import (
    moe_ffn,
    moe_ffn_backward,
    moe_ffn_choices,
    moe_send,
)
from fusedcomm.engines.host.rows import Returns, Rows, arriving, clear_padding, give_back, take
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.routing import Route, route_on_host
from fusedcomm.planning.moe import Plan, Terms, counts_space, table_text
from fusedcomm.schedule import successors
from fusedcomm.trace import span

__all__ = [
    "combine",
    "dispatch",
    "moe_ffn",
    "moe_ffn_backward",
    "moe_ffn_choices",
    "moe_send",
    "route",
]

Tensor = torch.Tensor


def exchange_counts(comm: Communicator, plan: Plan, counts: np.ndarray) -> np.ndarray:
    """The table ``[W, E]``, from every rank's own row ``[E]``.

    Flags: ready[me][0] on each peer, awaited there by this function; consumed likewise.
    """
    op, own = "dispatch", torch.from_numpy(counts.astype(np.int32))
    table = own.new_empty(comm.world_size, len(counts))
    table[comm.rank] = own
    peers = successors(comm.rank, comm.world_size)
    with comm.collective(plan.text):
        if peers:
            call = comm.memory.take(op, counts_space(len(counts), comm.world_size))
        for peer in peers:
            call.await_reader(peer)
            call.write(peer, 0, (len(counts),), torch.int32).copy_(own)
            call.signal(peer)
        for peer in peers:
            with span("wait", f"wait for rank {peer}'s counts", rank=comm.rank):
                call.wait(peer)
            table[peer] = call.read(peer, 0, (len(counts),), torch.int32)
        for peer in peers:
            call.consumed(peer)
    return table.numpy().astype(np.int64)


def route(comm: Communicator, plan: Plan, terms: Terms, ids: Tensor, overflow: str) -> Route:
    """The routing of ids ``[T, k]``, agreed on by all ranks; see ``engines.routing``."""
    return route_on_host(exchange_counts, comm, plan, terms, ids, overflow)


def dispatch(
    comm: Communicator, plan: Plan, x: Tensor, scale: Tensor | None, routed: Routed
) -> Tensor:
    """This rank's rows ``[received, hidden]``: all ranks' tokens for its experts.

    Args:
        x: ``[T, hidden]``.
        scale: a factor for every row that this rank sends ``[sent, 1]``, or None.
    """
    rank = comm.rank
    result = x.new_empty(routed.received, x.shape[1])
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        rows = Rows(comm, "dispatch", routed, x.shape[1], x.dtype)
        rows.send(routed, x.contiguous(), scale, own=result)
        take(rows, [piece for found in arriving(routed, rank) for piece in found], result)
        rows.done()
    clear_padding(result, routed, rank)
    return result


def combine(
    comm: Communicator, plan: Plan, h: Tensor, weights: Tensor | None, routed: Routed, keep: bool
) -> tuple[Tensor, Tensor]:
    """The weighted sums of this rank's tokens, and the rows they are made of if ``keep``.

    Args:
        h: ``[received, hidden]``, what this rank's experts made of their rows.
        weights: ``[T, k]`` or None for ones.

    Returns:
        see ``choices.sum_choices``.
    """
    rank = comm.rank
    with comm.collective(f"{plan.text}, {table_text(routed.layout)}"):
        returns = Returns(comm, "combine", routed, h.shape[1], h.dtype)
        for source in [*successors(rank, comm.world_size), rank]:
            give_back(returns, routed, source, h)
        found = returns.sum(routed, weights, keep)
        returns.done()
        return found
