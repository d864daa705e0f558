"""What the launches of the collectives' kernels share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.triton.config import COLLECTIVE_REGISTERS
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.planning.collectives import Plan
from fusedcomm.planning.exchanges import ALIGN, Pieces


def alone(comm: Communicator, plan: Plan, x: Tensor, out: Tensor) -> None:
    with comm.collective(plan.text):
        out.copy_(x)


def numbers(x: Tensor) -> Tensor:
    """Truth values as bytes, of which the greatest and the least are their or and their and."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def windows(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``most`` elements; at least one, which may be empty."""
    most = max(ALIGN, most // ALIGN * ALIGN)
    for start in range(0, max(size, 1), most):
        yield start, min(start + most, size)


def common(launch: Launch, cut: Pieces) -> dict[str, Any]:
    return {
        "pieces": cut.number,
        "piece_size": cut.size,
        "BLOCK": cut.block,
        "num_warps": cut.warps,
        **({} if launch.gpu is None else {"maxnreg": COLLECTIVE_REGISTERS}),
        **launch.ranks,
        **launch.flags,
        **launch.waits,
    }


def alignment(data: Tensor, stride: int, tables: Sequence[Tensor] = ()) -> int:
    """Bytes, at most 16, of which every part's address is a multiple."""
    itemsize = data.dtype.itemsize
    if tables:
        return itemsize
    spread = data.data_ptr() | stride * itemsize | 16
    return spread & -spread
