"""A routing as the kernels of the mixture of experts read it: tensors on the device, made there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.constants import constants_of
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.kernels import moe_route
from fusedcomm.planning.routing import MAX_PIECES, chunks

#: int64 words of a segment, see ``kernels.moe_rows``.
_FIELDS = 5


class Segments(NamedTuple):
    """What this rank sends: see ``kernels.moe_rows``.

    Attributes:
        fields: int64 ``[count, 5]``.
        pieces: int32 ``[W]``, pieces with rows for each peer.
    """

    fields: Tensor
    pieces: Tensor

    @property
    def number(self) -> int:
        return self.fields.shape[0]

    @property
    def counters(self) -> int:
        return self.number * MAX_PIECES + self.pieces.shape[0]


class Places:
    """Where the rows of one routing lie, for one rank; int64 unless said otherwise.

    The host knows how large these tensors are, and nothing of what is in them.

    Attributes:
        experts: how many this rank has.
        closing: the flag that says that everything was sent.
        first_E, counts_E: ``[experts]``, the first row of each block, and how many it has.
        first_WE, counts_WE, back_WE: ``[W, experts]``, the same of every source's segment, and
            where it lies among its source's rows.
        out, back: what this rank sends to experts, and back to the sources.
    """

    def __init__(self, launch: Launch, routed: Routed, record: Tensor | None = None) -> None:
        """Queue on ``launch`` what computes them.

        Args:
            record: where too many rows are noted, instead of the launch's record of failures.
        """
        placement, size = routed.placement, launch.world_size
        columns, experts = placement.num_experts, len(placement.columns(launch.rank))
        self._launch = launch
        self.experts = experts
        self.closing = chunks(placement) - 1
        segments = size * experts
        sizes = [experts, experts, *[segments] * 3, _FIELDS * columns, _FIELDS * segments]
        parts = _parts(sizes, launch.device)
        self.first_E, self.counts_E = next(parts), next(parts)
        self.first_WE, self.counts_WE, self.back_WE = (
            next(parts).view(size, experts) for _ in range(3)
        )
        self.out, self.back = (
            Segments(next(parts).view(-1, _FIELDS), self._per_rank()) for _ in range(2)
        )
        capacity = routed.terms.capacity
        launch.run(
            moe_route.places_kernel,
            size,
            "copy",
            "places of rows",
            table=routed.table.to(launch.device, non_blocking=True),
            starts_W=constants_of(placement, launch.device).starts,
            **self.arguments(),
            back_WE=self.back_WE,
            out=self.out.fields,
            back=self.back.fields,
            out_pieces_W=self.out.pieces,
            back_pieces_W=self.back.pieces,
            rank=launch.rank,
            world_size=size,
            columns=columns,
            align=routed.terms.align,
            capacity=-1 if capacity is None else capacity,
            record=launch.record if record is None else record,
            BLOCK=triton.next_power_of_2(max(1, columns)),  # a domain may have no experts
        )

    def arguments(self) -> dict[str, Any]:
        """For the grouped products."""
        return {
            "experts": self.experts,
            "first_E": self.first_E,
            "counts_E": self.counts_E,
            "first_WE": self.first_WE,
            "counts_WE": self.counts_WE,
        }

    def row_blocks(self, block: int) -> Tensor:
        """Queue: int32 ``[W]``, blocks of this rank's experts that have rows of each source."""
        blocks = self._per_rank()
        self._launch.run(
            moe_route.row_blocks_kernel,
            self._launch.world_size,
            "copy",
            "blocks of rows",
            first_E=self.first_E,
            first_WE=self.first_WE,
            counts_WE=self.counts_WE,
            blocks_W=blocks,
            experts=self.experts,
            block=block,
            BLOCK=triton.next_power_of_2(max(1, self.experts)),
            num_warps=1,
        )
        return blocks

    def _per_rank(self) -> Tensor:
        launch = self._launch
        return torch.empty(launch.world_size, dtype=torch.int32, device=launch.device)


def _parts(sizes: list[int], device: torch.device) -> Iterator[Tensor]:
    """Tensors of so many words in one allocation, each at a multiple of 16 bytes."""
    whole = torch.empty(sum(size + size % 2 for size in sizes), dtype=torch.int64, device=device)
    begin = 0
    for size in sizes:
        yield whole[begin : begin + size]
        begin += size + size % 2
