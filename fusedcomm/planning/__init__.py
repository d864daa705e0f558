"""Which engine and which chunking an operation uses, and why; one file per family of operations.

Decided only from facts that are equal on all ranks: global shape, dtype, world size, device kind,
whether the group shares memory. So every rank comes to the same answer without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedcomm.planning import collectives, moe, tensor_parallel
from fusedcomm.planning.engine import ENGINES
from fusedcomm.protocol import Space

__all__ = ["ENGINES", "spaces"]

_FAMILIES = (tensor_parallel, collectives, moe)


def spaces(
    op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype, backward: bool
) -> list[Space]:
    """The memory that calls of ``op`` on this global shape take; see ``Communicator.reserve``.

    Raises:
        ValueError: ``op`` is not known, or the shape is none.
    """
    for family in _FAMILIES:
        if op in family.OPS:
            return family.spaces(op, shape, world_size, dtype, backward)
    raise ValueError(f"reserve knows no operation {op!r}")
