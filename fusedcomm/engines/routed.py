"""A routing as the engines take it: the table, and this rank's order of choices."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from fusedcomm.planning.moe import Terms
from fusedcomm.planning.relaying import Carriers, each_its_own
from fusedcomm.planning.routing import Layout, Placement

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Routed:
    """Where all rows of a call go.

    What the host needs of the table it reads when it is first asked for: with ``capacity`` the
    table lies on the ids' device, and an engine that leaves ``layout`` alone never waits for it.

    Attributes:
        terms: what the routing depends on besides the ids.
        table: int64 ``[W, E]``, by source and column; without ``capacity`` in CPU memory.
        order: ``[T * k]``, the choices (token * k + choice) in the order in which they are sent;
            those of no expert last.
        slot: ``[T, k]``, the row of every choice among those sent, -1 for no expert.
    """

    terms: Terms
    rank: int
    world_size: int
    table: Tensor
    order: Tensor
    slot: Tensor

    @functools.cached_property
    def placement(self) -> Placement:
        return self.terms.placement(self.world_size)

    @functools.cached_property
    def layout(self) -> Layout:
        """All places, on the host."""
        return _layout(self.table.cpu().numpy().tobytes(), self.world_size, self.terms)

    @functools.cached_property
    def source(self) -> int:
        """Whose rows these are, among all that have rows in the table."""
        return self.rank

    @functools.cached_property
    def carriers(self) -> Carriers:
        """Which rank sends the rows of every source."""
        return each_its_own(self.world_size)

    @functools.cached_property
    def tokens(self) -> Tensor:
        """``[T * k]``, the token of the n-th choice that is sent."""
        return self.order // self.terms.top_k

    @property
    def received(self) -> int:
        """The first dimension of the rows that this rank gets: ``capacity``, or what there is."""
        capacity = self.terms.capacity
        return int(self.layout.received[self.rank]) if capacity is None else capacity

    @property
    def most_received(self) -> int:
        """The most rows that any rank gets, or may get."""
        capacity = self.terms.capacity
        return self.layout.most_received if capacity is None else capacity

    @property
    def most_sent(self) -> int:
        """The most rows that any rank sends, or may send."""
        limit = self.terms.max_tokens
        return self.layout.most_sent if limit is None else limit * self.terms.top_k

    @property
    def most_sent_unread(self) -> int:
        """The same without a look at the table where there is a capacity.

        Without ``max_tokens`` a rank may send no more than all ranks together receive.
        """
        capacity = self.terms.capacity
        if capacity is None or self.terms.max_tokens is not None:
            return self.most_sent
        return capacity * self.world_size

    def scale(self, weights: Tensor | None) -> Tensor | None:
        """The weight of every choice in order ``[T * k, 1]``, in float32 at least."""
        if weights is None:
            return None
        wide = torch.promote_types(weights.dtype, torch.float32)
        return weights.reshape(-1)[self.order].to(wide).unsqueeze(1)

    def by_choice(self, values: Tensor) -> Tensor:
        """A value of every row, as they are sent, ``[T * k]`` by choice; of no row, anything."""
        found = values.new_empty(self.slot.numel())
        found[self.order[: len(values)]] = values
        return found


@dataclass(frozen=True, eq=False)
class Laid(Routed):
    """A part of a larger routing, inside one domain, whose places are there already.

    Attributes:
        whole: the places.
    """

    whole: Layout

    @functools.cached_property
    def placement(self) -> Placement:
        return self.whole.placement

    @functools.cached_property
    def layout(self) -> Layout:
        return self.whole


@functools.lru_cache(maxsize=64)
def _layout(table: bytes, world_size: int, terms: Terms) -> Layout:
    counts_WE = np.frombuffer(table, dtype=np.int64).reshape(world_size, terms.num_experts)
    return Layout(counts_WE, terms.placement(world_size), terms.align)
