"""What the host engine does on either side of a border: sums, and the gradients of weights."""

from __future__ import annotations

import torch

from fusedcomm.engines.across.border import Border
from fusedcomm.engines.choices import dot_rows, sum_choices
from fusedcomm.engines.host.rows import Returns
from fusedcomm.trace import span

Tensor = torch.Tensor


class Sums:
    """The way back of finished rows: added up where they are carried, then where they belong.

    Attributes:
        dots: after ``own``, of every other domain the gradients that came with its sums, if any.
    """

    def __init__(self, border: Border, returns: Returns, *, weighted: bool, keep: bool) -> None:
        """Begin.

        Args:
            weighted: whether rows are multiplied by ``border.weights``.
            keep: whether ``kept`` is asked for.
        """
        self._border, self._returns = border, returns
        self._weighted, self._keep = weighted, keep
        self.dots: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def of_others(self, dots: dict[int, Tensor] | None = None) -> None:
        """Add up the rows of other domains' sources, and begin to give them the sums.

        Args:
            dots: what goes back with them; see ``Border.send_back``.
        """
        with self._border.step("sums of other domains"):
            for domain in self._border.relays.others:
                self._add(domain)
        self._border.send_back(self._sums, dots or {})

    def own(self) -> Tensor:
        """Add up the own rows, and then all domains' sums: y ``[T, hidden]``."""
        border, mine = self._border, self._border.relays.mine
        with border.step("own sums"):
            self._add(mine)
            self._returns.done()
        came, self.dots = border.finish_back()
        self._sums |= came
        parts = [self._sums[domain] for domain in range(len(self._sums))]
        with span("reduce", "add the domains' sums", rank=border.levels.comm.rank):
            return sum_choices(torch.cat(parts), border.relays.slots, None, False)[0]

    def _add(self, domain: int) -> None:
        routed = self._border.relays.carried[domain].routed
        weights = self._border.weights[domain] if self._weighted else None
        rows = self._returns.rows(routed)
        with span("reduce", f"add the choices of domain {domain}", rank=self._returns.rank):
            self._sums[domain], _ = sum_choices(rows, routed.slot, weights, False)
        if self._keep:
            self._kept[domain] = rows.clone()

    def kept(self) -> Tensor:
        """The rows that were added, of all sources, in the order of domains; or nothing."""
        if not self._keep:
            return self._sums[0].new_empty(0)
        return torch.cat([self._kept[domain] for domain in range(len(self._kept))])


def weight_dots(border: Border, dy: Tensor, kept: Tensor) -> dict[int, Tensor]:
    """The gradients of the weights of all carried choices, of every domain ``[choices]``.

    Args:
        dy: this rank's own; the others' are ``border.rows``.
        kept: as ``Sums.kept``.
    """
    relays = border.relays
    sizes = [each.choices for each in relays.carried]
    found = {}
    for domain, rows in enumerate(kept.split(sizes)):
        carried = relays.carried[domain]
        theirs = dy if domain == relays.mine else border.rows[domain]
        found[domain] = carried.in_order(dot_rows(rows, carried.routed.tokens[: len(rows)], theirs))
    return found
