"""What the device has to know of a placement of experts: made once, and kept there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.gpu import is_capturing
from fusedcomm.planning.routing import Placement


class Constants(NamedTuple):
    """A placement on a device; int64.

    Attributes:
        starts: ``[W + 1]``, rank r has columns ``starts[r]`` to ``starts[r + 1]``.
        column_of: ``[E + 1]``, the column of every expert id; the last entry, E, is "no expert".
        reader_of: ``[E]``, the rank of every column.
    """

    starts: Tensor
    column_of: Tensor
    reader_of: Tensor


_made: dict[tuple[tuple[tuple[int, ...], ...], torch.device], Constants] = {}


def constants_of(placement: Placement, device: torch.device) -> Constants:
    """The constants of a placement.

    Raises:
        ValueError: they would have to be copied to a GPU while a graph is captured.
    """
    key = (placement.experts, device)
    if key not in _made:
        if is_capturing():
            raise ValueError(
                "the first call with this placement of experts copies it to the GPU, which cannot "
                "be captured in a CUDA graph: call the operation once before the capture"
            )
        readers = [rank for rank, own in enumerate(placement.experts) for _ in own]
        _made[key] = Constants(
            torch.tensor(placement.starts, device=device),
            torch.from_numpy(placement.column_of.copy()).to(device),
            torch.tensor(readers, dtype=torch.int64, device=device),
        )
    return _made[key]
