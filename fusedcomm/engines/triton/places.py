"""A routing as the kernels of the mixture of experts read it: tensors on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedcomm.engines.routed import Routed
from fusedcomm.planning.routing import MAX_PIECES, Layout, chunk, chunks
from fusedcomm.planning.routing import pieces as cut
from fusedcomm.schedule import successors


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

    Attributes:
        experts: how many this rank has.
        closing: the flag that says that everything was sent.
        first_E, counts_E: ``[experts]``, the first row of each block, and how many it has.
        first_WE, counts_WE, back_WE: ``[W, experts]``, the same of every source's segment, and
            where it lies among its source's rows.
        out, back: what this rank sends to experts, and back to the sources.
    """

    def __init__(self, routed: Routed, rank: int, device: torch.device) -> None:
        layout = routed.layout
        own = layout.placement.columns(rank)
        mine = slice(own.start, own.stop)
        self._device = device
        self._layout = layout
        self._own = own
        self.experts = len(own)
        self.closing = chunks(layout.placement) - 1
        self.first_E = self._tensor(layout.first_row_E[mine])
        self.counts_E = self._tensor(layout.counts_E[mine])
        self.first_WE = self._tensor(layout.first_row_WE[:, mine])
        self.counts_WE = self._tensor(layout.counts_WE[:, mine])
        self.back_WE = self._tensor(layout.sent_row_WE[:, mine])
        self.out = self._segments(_outward(layout, rank))
        self.back = self._segments(_homeward(layout, rank, own))

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
        """int32 ``[W]``: blocks of this rank's experts that have rows of each source."""
        layout, mine = self._layout, slice(self._own.start, self._own.stop)
        counts = layout.counts_WE[:, mine]
        begin = layout.first_row_WE[:, mine] - layout.first_row_E[mine]
        blocks = np.where(counts > 0, (begin + counts - 1) // block - begin // block + 1, 0)
        return self._tensor(blocks.sum(1), torch.int32)

    def _segments(self, found: list[tuple[int, int, int, int, int]]) -> Segments:
        pieces = np.zeros(len(self._layout.counts_WE), dtype=np.int64)
        for peer, _, _, rows, flag in found:
            if rows:
                pieces[peer] += 1 if flag < 0 else sum(last > first for _, first, last in cut(rows))
        fields = np.array(found, dtype=np.int64).reshape(len(found), 5)
        return Segments(self._tensor(fields), self._tensor(pieces, torch.int32))

    def _tensor(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, dtype)


def _outward(layout: Layout, rank: int) -> list[tuple[int, int, int, int, int]]:
    """To every expert, the next rank's first and this rank's own last."""
    found = []
    for peer in (*successors(rank, len(layout.counts_WE)), rank):
        for local, column in enumerate(layout.placement.columns(peer)):
            here, there = layout.sent_row_WE[rank, column], layout.first_row_WE[rank, column]
            rows, flag = layout.counts_WE[rank, column], chunk(local, 0)
            found.append((peer, int(here), int(there), int(rows), flag))
    return found


def _homeward(layout: Layout, rank: int, own: range) -> list[tuple[int, int, int, int, int]]:
    """From this rank's experts to every source."""
    found = []
    for peer in (*successors(rank, len(layout.counts_WE)), rank):
        for column in own:
            here, there = layout.first_row_WE[peer, column], layout.sent_row_WE[peer, column]
            found.append((peer, int(here), int(there), int(layout.counts_WE[peer, column]), -1))
    return found
