"""Units: which rows of an expert are multiplied at once, and the way back of the results.

A **unit** is a run of consecutive rows of one expert that is multiplied at once: enough of them
that a product costs no more a row than a long one, and whole pieces, so that it can begin when
these have come. Which rows make a unit depends on the table alone, so results do not depend on who
was early; the units' order does.
"""

from __future__ import annotations

import itertools

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.experts import Experts, product
from fusedcomm.engines.host.rows import Piece, Returns, arriving
from fusedcomm.engines.routed import Routed

Tensor = torch.Tensor

#: Rows from which a product is as fast as a longer one.
UNIT_ROWS = 512
#: Rows from which a product goes straight into its reader's memory. Fewer go in one product for
#: all sources, and are copied.
DIRECT_ROWS = 128


def cut(found: list[Piece]) -> list[list[Piece]]:
    """Consecutive pieces, in units of at least ``UNIT_ROWS`` rows (or all there are).

    >>> sizes = [600, 300, 200, 200, 80]
    >>> starts = [0, 600, 900, 1100, 1300]
    >>> found = [
    ...     Piece(0, i, s, s + n, 0, 0, False) for i, (s, n) in enumerate(zip(starts, sizes))
    ... ]
    >>> [[piece.rows for piece in unit] for unit in cut(found)]
    [[600], [300, 200, 200, 80]]
    """
    units: list[list[Piece]] = []
    for piece in found:
        if units and sum(p.rows for p in units[-1]) < UNIT_ROWS:
            units[-1].append(piece)
        else:
            units.append([piece])
    if len(units) > 1 and sum(p.rows for p in units[-1]) < UNIT_ROWS:
        units[-2].extend(units.pop())
    return units


class Work:
    """The units of one call, in the order in which they are best computed.

    Attributes:
        units, relayed_units: of rows of the own domain (or only one), and of others.
        longest: rows of the longest one.
    """

    def __init__(self, comm: Communicator, routed: Routed) -> None:
        self.rank = comm.rank
        self.expert_of: dict[int, int] = {}  # the first row of a unit -> its expert
        units = []
        for expert, found in enumerate(arriving(routed, comm.rank)):
            # What comes from other domains is late, and nothing else shall wait for it.
            for _, run in itertools.groupby(found, lambda piece: piece.relayed):
                for unit in cut(list(run)):
                    self.expert_of[unit[0].first] = expert
                    units.append(unit)
        # Own rows are there already.
        units.sort(key=lambda unit: any(piece.chunk >= 0 for piece in unit))
        self.units = [unit for unit in units if not unit[0].relayed]
        self.relayed_units = [unit for unit in units if unit[0].relayed]
        self.longest = max((unit[-1].last - unit[0].first for unit in units), default=0)
        #: Pieces of every source that are still to come back.
        self._left = [0] * len(routed.layout.counts_WE)
        for unit in units:
            for piece in unit:
                self._left[piece.source] += 1

    def begin(self, returns: Returns) -> None:
        """Signal the sources that get nothing."""
        for source, left in enumerate(self._left):
            if not left:
                returns.signal(source)

    def back(self, unit: list[Piece], returns: Returns) -> None:
        """The unit's rows lie where they came from."""
        for piece in unit:
            self._left[piece.source] -= 1
            if not self._left[piece.source]:
                returns.signal(piece.source)

    def deliver_down(
        self,
        unit: list[Piece],
        returns: Returns,
        a: Tensor,
        experts: Experts,
        expert: int,
        scratch: Tensor,
    ) -> None:
        """The down-projection of a unit's activations, back to the sources."""
        bias = None if experts.b2 is None else experts.b2[expert]
        self.deliver(unit, returns, a, experts.down(expert), bias, scratch)

    def deliver(
        self,
        unit: list[Piece],
        returns: Returns,
        x: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        scratch: Tensor,
    ) -> None:
        """``x · factor + bias`` of a unit, back to the sources."""
        first = unit[0].first
        direct = len(unit) == 1 or all(piece.rows >= DIRECT_ROWS for piece in unit)
        if not direct:
            product(x, factor, bias, scratch[: x.shape[0]])
        for piece in unit:
            out = returns.targets[piece.source][piece.back : piece.back + piece.rows]
            part = slice(piece.first - first, piece.last - first)
            if direct:
                product(x[part], factor, bias, out)
            else:
                out.copy_(scratch[part])
        self.back(unit, returns)
