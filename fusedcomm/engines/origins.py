"""A domain's rows by where they come from: its own ranks, or other domains.

Kernels know a row by the rank of the domain that sends it, and have one list of tokens from each.
So they move, and multiply, the rows of either origin in a call of its own, with a routing like that
of a group of one domain: nobody there can tell that the others' rows are not their carriers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fusedcomm.engines.routed import Laid
from fusedcomm.planning.moe import Terms
from fusedcomm.planning.relaying import places_from
from fusedcomm.planning.routing import Array, Layout, sort_choices

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Origin(Laid):
    """The rows of some sources for this domain; ranks are those of the domain.

    Without padding, whatever ``align`` is, and as many as there are, also with a capacity: nobody
    but the engine sees them.

    Attributes:
        whole: the places of these rows.
        room: the capacity of the call, or None.
        places: ``[received]``, where each row that this rank receives lies among all.
    """

    room: int | None
    places: Tensor

    @property
    def most_received(self) -> int:
        return self.whole.most_received if self.room is None else self.room

    @property
    def most_sent_unread(self) -> int:
        return self.most_sent  # the host has the table, also with a capacity

    @property
    def sent(self) -> int:
        """How many rows this rank sends, and gets back."""
        return int(self.whole.sent[self.rank])


class Origins(NamedTuple):
    """The rows of the domain's own ranks, and those of all others."""

    own: Origin
    others: Origin

    @property
    def sent(self) -> list[int]:
        return [origin.sent for origin in self]

    @property
    def received(self) -> list[int]:
        return [origin.received for origin in self]


def rows_from(
    terms: Terms,
    layout: Layout,
    rank: int,
    sources: Sequence[Sequence[int]],
    columns: Array,
    device: torch.device,
) -> Origin:
    """The rows of some sources.

    Args:
        terms: the call's, with the most tokens of these that a rank may send.
        layout: of all sources' rows.
        rank: in the domain.
        sources: of every rank of the domain, whose rows it sends.
        columns: ``[tokens, k]`` of this rank's, one source's tokens after the other's.
        device: where tensors are to lie.
    """
    table = np.stack([layout.counts_WE[theirs].sum(0) for theirs in sources])
    _, order, slot = sort_choices(columns, layout.placement.num_experts)
    places = places_from(layout, rank, sources)
    tensors = (torch.from_numpy(array).to(device) for array in (table, order, slot, places))
    table_gE, order_C, slot_Tk, places_R = tensors  # noqa: N806
    return Origin(
        replace(terms, num_experts=layout.placement.num_experts, align=1, capacity=None),
        rank,
        len(sources),
        table_gE,
        order_C,
        slot_Tk,
        Layout(table, layout.placement),
        terms.capacity,
        places_R,
    )
