"""Which part of a full tensor the ranks of one domain have, along a dimension that is cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Bounds = list[tuple[int, int]]


class Part:
    """One domain's part.

    Attributes:
        inner: where its ranks' shards lie in a tensor that has no others.
    """

    def __init__(self, bounds: Bounds, ranks: Sequence[int], dim: int) -> None:
        """
        Args:
            bounds: every rank's, along ``dim`` of the full tensor.
            ranks: the domain's.
        """
        self._dim, self._bounds = dim, [bounds[rank] for rank in ranks]
        self.inner: Bounds = []
        for bound in self._bounds:
            start = self.inner[-1][1] if self.inner else 0
            self.inner.append((start, start + width(bound)))
        start, stop = self._bounds[0][0], self._bounds[-1][1]
        #: Where all of it lies, if side by side.
        self._together = (start, stop) if stop - start == self.inner[-1][1] else None

    def of(self, full: Tensor) -> Tensor:
        """This part of ``full``; a view where it lies side by side."""
        if self._together is not None:
            return self._cut(full, self._together)
        return torch.cat([self._cut(full, bound) for bound in self._bounds], self._dim)

    def place(self, full: Tensor) -> Tensor:
        """Memory for this part: that of ``full`` itself where it can be; see ``put``."""
        if self._together is not None:
            return self._cut(full, self._together)
        return full.new_empty(cut_shape(full.shape, self._dim, self.inner[-1][1]))

    def put(self, full: Tensor, filled: Tensor) -> None:
        """Have ``full`` hold what was written to its ``place``."""
        if self._together is None:
            for bound, inner in zip(self._bounds, self.inner, strict=True):
                self._cut(full, bound).copy_(self._cut(filled, inner))

    def _cut(self, x: Tensor, bound: tuple[int, int]) -> Tensor:
        return x.narrow(self._dim, bound[0], width(bound))


def width(bound: tuple[int, int]) -> int:
    return bound[1] - bound[0]


def cut_shape(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """``shape`` with ``size`` in dimension ``dim``."""
    return [*shape[:dim], size, *shape[dim + 1 :]]
