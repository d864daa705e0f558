"""The routing of a mixture of experts, made on the device: with ``capacity`` no host ever waits.

Steps, all on the current stream: choices are sorted by column; every rank's counts are written into
the memory of all others (``kernels.moe_route``), and the table is collected there; with
``overflow="drop"`` each rank strikes out what finds no room, and counts are exchanged once more,
whether or not something was; from the table the places are made. Without ``capacity`` the host then
reads the table, which sizes depend on: the one time that it waits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.routing import Route, table_device
from fusedcomm.engines.triton.constants import Constants, constants_of
from fusedcomm.engines.triton.launch import Launch, launches
from fusedcomm.engines.triton.places import Places
from fusedcomm.errors import CapacityError
from fusedcomm.gpu import is_capturing
from fusedcomm.kernels import moe_route
from fusedcomm.kernels.signals import RECORD_WORDS
from fusedcomm.planning.moe import Plan, Terms, counts_space

#: Columns of the table that a program moves at once.
_COLUMNS = 256


def route(comm: Communicator, plan: Plan, terms: Terms, ids: Tensor, overflow: str) -> Route:
    """The routing of ids ``[T, k]``; see ``engines.routing``.

    Raises:
        CapacityError: on CPUs, some rank has no room and nothing may be dropped; on GPUs a later
            call raises it, and until then no operation sends or stores a row.
        ValueError: a graph is captured, but there is no capacity.
    """
    if terms.capacity is None and is_capturing():
        raise ValueError(
            "without capacity the number of rows is read on the host, which cannot be captured in "
            "a CUDA graph: give capacity and max_tokens"
        )
    placement = terms.placement(comm.world_size)
    known = constants_of(placement, ids.device)
    columns = columns_of(ids, known)
    order, slot, bounds = sort_choices(columns, terms.num_experts)
    dropped = torch.zeros((), dtype=torch.int64, device=ids.device)
    align, capacity = terms.align, terms.capacity
    if capacity is not None and overflow == "drop":
        table, _ = _exchange(comm, plan, terms, order, slot, bounds, places=False)
        columns = fit(columns, slot, bounds, table, align, capacity, comm.rank, known)
        before = bounds[-1]
        order, slot, bounds = sort_choices(columns, terms.num_experts)
        dropped = before - bounds[-1]
    table, places = _exchange(comm, plan, terms, order, slot, bounds, places=True)
    assert places is not None
    counts = places.counts_E
    padded = (counts + (align - 1)) // align * align
    ends = places.first_E + padded
    table = table.to(table_device(ids.device, capacity))
    return table, order, slot, ends.int(), counts.int(), padded.int(), dropped


def columns_of(ids: Tensor, known: Constants) -> Tensor:
    """The column of every id, int64; E where it names no expert."""
    none = known.reader_of.shape[0]
    wide = ids.to(torch.int64)
    valid = (wide >= 0) & (wide < none)
    return known.column_of[torch.where(valid, wide, none)]


def sort_choices(columns: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort one rank's choices by column; see ``planning.routing.sort_choices``.

    Returns:
        order ``[T * k]`` and slot ``[T, k]``; bounds ``[E + 1]``: the choices for column e are
        those from ``bounds[e]`` to ``bounds[e + 1]``, sorted.
    """
    flat = columns.reshape(-1)
    # Narrow keys are sorted in fewer passes.
    keys, order = torch.sort(
        flat.to(torch.int16 if num_experts < 1 << 15 else torch.int32), stable=True
    )
    every = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    bounds = torch.searchsorted(keys, every)
    place = torch.arange(flat.shape[0], device=flat.device)
    slot = torch.empty_like(place).scatter_(0, order, place)
    return order, torch.where(flat < num_experts, slot, -1).view(columns.shape), bounds


def fit(
    columns: Tensor,
    slot: Tensor,
    bounds: Tensor,
    table: Tensor,
    align: int,
    capacity: int,
    rank: int,
    known: Constants,
) -> Tensor:
    """``columns`` with those that find no room replaced by "no expert"; see ``planning.capacity``.

    A row takes ``align`` rows of room if it is the first of a new multiple of its expert's. A
    choice fits if what it and all in front of it take, on earlier sources and here, is there.
    """
    flat, none = columns.reshape(-1), known.reader_of.shape[0]
    valid = flat < none
    column = flat.clamp(max=none - 1)
    before = table[:rank].sum(0)
    number = slot.reshape(-1) - bounds[column] + before[column]  # among its expert's rows
    taken = F.pad(((before + (align - 1)) // align * align).cumsum(0), (1, 0))[known.starts]
    grows = torch.where(valid & (number % align == 0), align, 0)
    reader = known.reader_of[column]
    size = known.starts.shape[0] - 1
    own = grows.new_zeros(flat.shape[0], size).scatter_(1, reader[:, None], grows[:, None])
    taken = (taken[1:] - taken[:-1])[reader] + own.cumsum(0).gather(1, reader[:, None])[:, 0]
    return torch.where(valid & (taken <= capacity), flat, none).view(columns.shape)


def _exchange(
    comm: Communicator,
    plan: Plan,
    terms: Terms,
    order: Tensor,
    slot: Tensor,
    bounds: Tensor,
    *,
    places: bool,
) -> tuple[Tensor, Places | None]:
    """The table ``[W, E]`` of all ranks' counts, and the places that follow from it."""
    size, columns, device = comm.world_size, terms.num_experts, order.device
    table = torch.zeros(size, columns, dtype=torch.int64, device=device)
    found, record = None, None
    with launches(comm, "dispatch", counts_space(columns, size), plan.text, device) as launch:
        common = {"columns": columns, "BLOCK": min(_COLUMNS, triton.next_power_of_2(columns))}
        launch.run(
            moe_route.push_counts_kernel,
            size,
            "copy",
            "push counts",
            bounds=bounds,
            record=launch.record,
            **common,
            **launch.ranks,
            **launch.flags,
        )
        launch.run(
            moe_route.collect_kernel,
            size,
            "wait",
            "wait for all counts",
            table=table,
            **common,
            **launch.ranks,
            **launch.flags,
            **launch.waits,
        )
        if places:
            record = _own_record(launch)
            routed = Routed(terms, comm.rank, size, table, order, slot)
            found = Places(launch, routed, record)
    if record is not None and device.type == "cpu" and not is_capturing() and record[0]:
        _, _, reader, _, capacity, rows, *_ = record.tolist()
        raise CapacityError.at(reader, rows, capacity)
    return table, found


def _own_record(launch: Launch) -> Tensor:
    """Where a lack of room is noted. On a CPU it is no failure: the call ends as usual, and then
    raises what is found there."""
    if launch.gpu is not None:
        return launch.record
    return torch.zeros(RECORD_WORDS, dtype=torch.int32)
