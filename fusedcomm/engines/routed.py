"""A routing as the engines take it: the table's layout, and this rank's order of choices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from fusedcomm.planning.moe import Terms
from fusedcomm.planning.routing import Layout

Tensor = torch.Tensor


class Routed(NamedTuple):
    """Where all rows of a call go.

    Attributes:
        terms: what the routing depends on besides the ids.
        layout: all places, from the table.
        tokens: ``[sent]``, the token of the n-th row that this rank sends.
        order: ``[sent]``, its flat number, token * k + choice.
        slot: ``[T, k]``, the row of every choice among those sent, -1 for no expert.
    """

    terms: Terms
    layout: Layout
    tokens: Tensor
    order: Tensor
    slot: Tensor

    @classmethod
    def of(
        cls, terms: Terms, rank: int, world_size: int, table: Tensor, order: Tensor, slot: Tensor
    ) -> Routed:
        """From the tensors that the public operations keep.

        Args:
            table: int64 ``[W, E]`` in CPU memory.
            order: ``[T * k]``, the choices of no expert last.
        """
        layout = _layout(table.numpy().tobytes(), world_size, terms)
        order = order[: int(layout.sent[rank])]
        return cls(terms, layout, order // terms.top_k, order, slot)

    def received(self, rank: int) -> int:
        """The first dimension of the rows that a rank gets: ``capacity``, or what there is."""
        capacity = self.terms.capacity
        return int(self.layout.received[rank]) if capacity is None else capacity

    def scale(self, weights: Tensor | None) -> Tensor | None:
        """The weight of every row that this rank sends ``[sent, 1]``, in float32 at least."""
        if weights is None:
            return None
        wide = torch.promote_types(weights.dtype, torch.float32)
        return weights.reshape(-1)[self.order].to(wide).unsqueeze(1)


@functools.lru_cache(maxsize=64)
def _layout(table: bytes, world_size: int, terms: Terms) -> Layout:
    counts_WE = np.frombuffer(table, dtype=np.int64).reshape(world_size, terms.num_experts)
    return Layout(counts_WE, terms.placement(world_size), terms.align)
