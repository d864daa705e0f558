"""What crosses between domains in one call of the mixture of experts, there and back.

A rank's rows go to those in its place in other domains, its **carriers** there, and it carries
theirs; ``moe_across`` has the steps, ``engines.relays`` the words.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.levels import Levels, Like, Parcels
from fusedcomm.engines.choices import dot_rows, sum_choices
from fusedcomm.engines.host.rows import Returns
from fusedcomm.engines.relays import Relays
from fusedcomm.trace import span

Tensor = torch.Tensor


class Border:
    """One call's exchange with the other domains.

    Attributes:
        rows: after ``finish``, of every other domain, the rows ``[tokens, hidden]`` to be carried.
        weights: after ``finish``, of every domain, the carried tokens' ``[tokens, k]``, or None.
    """

    def __init__(self, comm: Communicator, op: str, relays: Relays) -> None:
        """Within ``comm.collective``."""
        self.levels = Levels(comm, comm.calls.text, op)
        self.inside, self.relays, self.op = self.levels.inside, relays, op
        self.rows: dict[int, Tensor] = {}
        self.weights: list[Tensor | None] = [None] * len(relays.carried)
        self._there: Parcels | None = None
        self._back: Parcels | None = None
        self._sent = self._sent_back = (False, False)

    def step(self, name: str) -> AbstractContextManager[None]:
        """A part of the call, inside the domain."""
        return self.inside.collective(self.levels.named(name))

    def send(self, x: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> None:
        """Begin to give the other domains this rank's rows and weights, or one of them.

        Args:
            x: ``[T, hidden]``; given on every rank or on none, as are the weights.
            weights: ``[T, k]``.
            dtype: of the rows; weights cross in float32, or, with float64, in this.
        """
        relays, wide = self.relays, _wide(dtype)
        self.weights[relays.mine] = weights
        self._sent = (x is not None, weights is not None)
        if x is None and weights is None:
            return
        count = len(relays.carried)
        parcels: list[list[Tensor]] = [[] for _ in range(count)]
        likes: list[list[Like]] = [[] for _ in range(count)]
        for domain in relays.others:
            carried = relays.carried[domain]
            if x is not None:
                parcels[domain].append(x.index_select(0, relays.tokens[domain]))
                likes[domain].append(Like((carried.tokens, x.shape[1]), dtype))
            if weights is not None:
                parcels[domain].append(weights.reshape(-1)[relays.choices[domain]].to(wide))
                likes[domain].append(Like((carried.choices,), wide))
        self._there = Parcels(self.levels, "there", parcels, likes)

    def finish(self) -> None:
        """Wait for what the other domains sent, if anything was to be sent."""
        if self._there is None:
            return
        came, self._there = self._there.finish(), None
        for domain in self.relays.others:
            parts = iter(came[domain])
            if self._sent[0]:
                self.rows[domain] = next(parts)
            if self._sent[1]:
                self.weights[domain] = self.relays.carried[domain].spread(next(parts))

    def send_back(self, sums: dict[int, Tensor], dots: dict[int, Tensor]) -> None:
        """Begin to give back what was made of the rows that this rank carried.

        Args:
            sums: of every other domain ``[tokens, hidden]``; or nothing, on every rank.
            dots: of every domain the gradients of their choices' weights ``[choices]``, or nothing.
        """
        relays = self.relays
        count = len(relays.carried)
        parcels: list[list[Tensor]] = [[] for _ in range(count)]
        likes: list[list[Like]] = [[] for _ in range(count)]
        for domain in relays.others:
            if sums:
                tokens, (_, hidden) = len(relays.tokens[domain]), sums[domain].shape
                parcels[domain].append(sums[domain])
                likes[domain].append(Like((tokens, hidden), sums[domain].dtype))
            if dots:
                parcels[domain].append(dots[domain])
                likes[domain].append(Like((len(relays.choices[domain]),), dots[domain].dtype))
        self._sent_back = (bool(sums), bool(dots))
        self._back = Parcels(self.levels, "back", parcels, likes)

    def finish_back(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait; of every other domain, the sums and gradients that came, if such were sent."""
        assert self._back is not None
        came = self._back.finish()
        sums, dots = self._sent_back
        others = self.relays.others
        return (
            {domain: came[domain][0] for domain in others} if sums else {},
            {domain: came[domain][-1] for domain in others} if dots else {},
        )


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


def weight_grad(relays: Relays, dots: dict[int, Tensor], weights: Tensor) -> Tensor:
    """The gradient of a rank's weights ``[T, k]`` from all domains'; 0 for no expert."""
    found = weights.new_zeros(weights.numel(), dtype=dots[relays.mine].dtype)
    for domain, values in dots.items():
        found[relays.choices[domain]] = values
    return found.view(weights.shape).to(weights.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
