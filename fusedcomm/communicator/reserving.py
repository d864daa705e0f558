"""Memory that is made ahead of the calls that take it, in a group of one domain or of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from fusedcomm.planning import spaces, spaces_inside

if TYPE_CHECKING:
    from fusedcomm.communicator.communicator import Communicator


def reserve(
    comm: Communicator,
    op: str,
    global_shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> None:
    """``Communicator.reserve``; over several domains, every one makes its own."""
    inside, domains, wanted = comm.inside, len(comm.topology.domains), []
    for shape in global_shapes:
        rest = (dtype, backward, device)
        if inside is None:
            wanted += spaces(op, shape, comm.world_size, *rest)
        else:
            wanted += spaces_inside(op, shape, domains, inside.world_size, *rest)
    comm.require_domain("reserve")
    memory = (inside or comm).memory
    for space in wanted:
        memory.require_room(space, device)
    text = f"reserve {op} {global_shapes} {dtype} backward={backward} on {device.type}"
    with comm.collective(text), inside.collective(text) if inside else nullcontext():
        for space in wanted:
            memory.workspace(space, device)
