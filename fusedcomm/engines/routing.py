"""The routing of a mixture of experts, made on the host; for every engine without kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.errors import CapacityError
from fusedcomm.planning.capacity import drop
from fusedcomm.planning.moe import Plan, Terms
from fusedcomm.planning.routing import Layout, columns_of, sort_choices

#: table, order, slot, offs, counts, padded counts, dropped: see ``ops.library.moe.moe_route``.
Route = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def route_on_host(
    exchange_counts: Callable[[Communicator, Plan, np.ndarray], np.ndarray],
    comm: Communicator,
    plan: Plan,
    terms: Terms,
    ids: Tensor,
    overflow: str,
) -> Route:
    """The routing of ids ``[T, k]``.

    Args:
        exchange_counts: makes the table ``[W, E]`` of every rank's own row ``[E]``.

    Raises:
        CapacityError: some rank has no room, and nothing may be dropped.
    """
    placement, align, capacity = terms.placement(comm.world_size), terms.align, terms.capacity
    columns = columns_of(ids.cpu().numpy(), placement)
    counts, order, slot = sort_choices(columns, terms.num_experts)
    table = exchange_counts(comm, plan, counts)
    layout, dropped = Layout(table, placement, align), 0
    if capacity is not None and layout.most_received > capacity:
        if overflow == "error":
            reader = int(layout.received.argmax())
            raise CapacityError.at(reader, layout.most_received, capacity)
        columns = drop(columns, comm.rank, table, placement, align, capacity)
        dropped = int(counts.sum())
        counts, order, slot = sort_choices(columns, terms.num_experts)
        dropped -= int(counts.sum())
        table = exchange_counts(comm, plan, counts)
        layout = Layout(table, placement, align)
    own = placement.columns(comm.rank)

    def per_expert(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    return (
        torch.from_numpy(table).to(table_device(ids.device, capacity)),
        torch.from_numpy(order).to(ids.device),
        torch.from_numpy(slot).to(ids.device),
        per_expert(layout.offsets(comm.rank)),
        per_expert(layout.counts_E[own.start : own.stop]),
        per_expert(layout.padded_E[own.start : own.stop]),
        torch.tensor(dropped, device=ids.device),
    )


def table_device(ids: torch.device, capacity: int | None) -> torch.device:
    """Where the table lies: by the ids; without ``capacity`` in CPU memory, as sizes need it."""
    return torch.device("cpu") if capacity is None else ids
