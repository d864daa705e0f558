"""Which engine and which chunking an operation uses, and why; one file per family of operations.

Decided only from facts that are equal on all ranks: global shape, dtype, world size, device kind,
whether the group shares memory. So every rank comes to the same answer without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedcomm.planning import collectives, exchanges, moe, tensor_parallel
from fusedcomm.planning.engine import ENGINES
from fusedcomm.protocol import Space

__all__ = ["ENGINES", "spaces"]

_CPU = torch.device("cpu")

_FAMILIES = (tensor_parallel, collectives, moe)


def spaces(
    op: str,
    shape: Sequence[int],
    world_size: int,
    dtype: torch.dtype,
    backward: bool,
    device: torch.device = _CPU,
) -> list[Space]:
    """The memory that calls of ``op`` on this global shape take; see ``Communicator.reserve``.

    Raises:
        ValueError: ``op`` is not known (for tensors on this device), or the shape is none.
    """
    for family in _FAMILIES:
        if op in family.OPS and device.type == "cpu":
            return family.spaces(op, shape, world_size, dtype, backward)
    if op in tensor_parallel.OPS:
        return tensor_parallel.gpu_spaces(op, shape, world_size, dtype)
    if op in collectives.OPS:
        return exchanges.spaces(op, shape, world_size, dtype, device)
    where = "" if device.type == "cpu" else f" with kernels for tensors on {device.type}"
    raise ValueError(f"reserve knows no operation {op!r}{where}")
