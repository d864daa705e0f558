"""A routing over several domains, as one rank sees it: what crosses, and what it passes on.

For ``planning.relaying`` see what a carrier is. ``relayed``, the tensor from which all of this is
made besides the table and the own choices, holds the number of the call that made the routing, and
behind it the lists of choices that came from the other domains, domain after domain.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fusedcomm.engines.origins import Origin, Origins, rows_from
from fusedcomm.engines.routed import Laid
from fusedcomm.planning.moe import Terms, digest_text
from fusedcomm.planning.relaying import (
    Carriers,
    Domains,
    carriers_in,
    columns_of_slots,
    outgoing,
    part,
    read_choices,
    slots_by_domain,
)
from fusedcomm.planning.routing import Array, Layout, sort_choices

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Carried(Laid):
    """One source's rows for this domain, as if it sent them itself; ranks are those of the domain.

    Attributes:
        whole: the places of all sources' rows.
        of: the source.
        by: who sends them.
    """

    of: int
    by: Carriers

    @functools.cached_property
    def source(self) -> int:
        return self.of

    @functools.cached_property
    def carriers(self) -> Carriers:
        return self.by

    @property
    def most_sent(self) -> int:
        """The most rows that any rank sends, for all its sources."""
        limit = self.terms.max_tokens
        if limit is not None:
            return limit * self.terms.top_k * self.by.most
        return int(np.bincount(self.by.ranks, self.whole.sent).max())


class Relay(NamedTuple):
    """What a rank carries for one source; its own rows for its own domain are one such.

    Attributes:
        routed: tokens and choices ``[tokens, k]``, some of no expert here. Of another domain's
            source, only the tokens that have one.
        places: ``[choices]``, where each choice stands among these ``tokens * k``.
        columns: ``[tokens, k]`` on the host, the columns of the choices, of this domain's; their
            number for no expert here.
    """

    routed: Carried
    places: Tensor
    columns: Array

    @property
    def tokens(self) -> int:
        return self.routed.slot.shape[0]

    @property
    def choices(self) -> int:
        return self.places.shape[0]

    def spread(self, values: Tensor) -> Tensor:
        """Values of the choices as ``[tokens, k]``; 0 for those of no expert here."""
        found = values.new_zeros(self.routed.slot.numel())
        found[self.places] = values
        return found.view(self.routed.slot.shape)

    def in_order(self, values: Tensor) -> Tensor:
        """Values of the rows as they are sent, in the order of the choices."""
        return self.routed.by_choice(values)[self.places]


@dataclass(frozen=True, eq=False)
class Relays:
    """Where all rows of a call go, over several domains. Tensors lie where the rows do.

    Attributes:
        terms: what the routing depends on besides the ids.
        text: names the routing, for the board.
        domains: the ranks of each.
        layout: all places in this domain, of all sources' rows.
        mine: this rank's domain.
        carried: of every domain the rows for this one, from the rank in this one's place.
        tokens: of every domain, this rank's tokens that have an expert there.
        choices: of every domain, the flat numbers (token * k + choice) of their choices there.
        slots: ``[T, N]``, the row of a token among all sums; see ``slots_by_domain``.
    """

    terms: Terms
    text: str
    domains: Domains
    layout: Layout
    mine: int
    carried: list[Relay]
    tokens: list[Tensor]
    choices: list[Tensor]
    slots: Tensor

    @classmethod
    def of(
        cls,
        terms: Terms,
        domains: Domains,
        rank: int,
        table: Tensor,
        order: Tensor,
        slot: Tensor,
        relayed: Tensor,
    ) -> Relays:
        """From the tensors that the public operations keep."""
        counts_WE, device = table.cpu().numpy(), slot.device
        mine = next(number for number, ranks in enumerate(domains) if rank in ranks)
        place = domains[mine].index(rank)
        parted = part(terms.num_experts, len(counts_WE), terms.owners, domains)
        layout = _layout(counts_WE.tobytes(), domains, mine, terms)
        columns = columns_of_slots(slot.cpu().numpy(), counts_WE[rank])
        found = outgoing(columns, parted)
        none = layout.placement.num_experts
        here = np.where(parted.domain_of[columns] == mine, parted.place_of[columns], none)
        carriers, carried, begin = carriers_in(domains, mine), [], 1

        def there(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)

        for number, source in enumerate(ranks[place] for ranks in domains):
            if number == mine:
                theirs, places = here, found[mine].choices
            else:
                end = begin + int(layout.sent[source])
                theirs, places = read_choices(relayed[begin:end].numpy(), terms.top_k, none)
                begin = end
            _, sent, rows = map(there, sort_choices(theirs, none))
            size = len(domains[mine])
            routed = Carried(terms, place, size, table, sent, rows, layout, source, carriers)
            carried.append(Relay(routed, there(places), theirs))
        return cls(
            terms,
            f"{digest_text(counts_WE)} of call {int(relayed[0])}",
            domains,
            layout,
            mine,
            carried,
            [there(each.tokens) for each in found],
            [there(each.choices) for each in found],
            there(slots_by_domain(found, len(columns), mine)),
        )

    @property
    def own(self) -> Relay:
        """This rank's own rows for its own domain."""
        return self.carried[self.mine]

    @property
    def others(self) -> list[int]:
        """The other domains."""
        return [number for number in range(len(self.carried)) if number != self.mine]

    @property
    def received(self) -> int:
        """The first dimension of the rows that this rank gets."""
        return self.own.routed.received

    @functools.cached_property
    def origins(self) -> Origins:
        """The same for engines that know a rank's rows by the rank that sends them alone."""
        place, ranks = self.own.routed.rank, range(len(self.domains[self.mine]))
        # For each, so that memory that one has room in has room for the other.
        most = None if self.terms.max_tokens is None else self.terms.max_tokens * len(self.others)

        def made(domains: list[int]) -> Origin:
            return rows_from(
                replace(self.terms, max_tokens=most),
                self.layout,
                place,
                [[self.domains[domain][rank] for domain in domains] for rank in ranks],
                np.concatenate([self.carried[domain].columns for domain in domains]),
                self.slots.device,
            )

        return Origins(made([self.mine]), made(self.others))


#: By what was relayed, for as long as that is kept.
_made = WeakTensorKeyDictionary()


def relays_of(
    terms: Terms,
    domains: Domains,
    rank: int,
    table: Tensor,
    order: Tensor,
    slot: Tensor,
    relayed: Tensor,
) -> Relays:
    """``Relays.of``, once for a routing: it costs work on the host, and with GPUs a look at them.

    Where a compiler hands the tensors on, it may be others of the same values: once for each.
    """
    found = _made.get(relayed)
    if found is None or found.terms != terms or found.domains != domains:
        found = _made[relayed] = Relays.of(terms, domains, rank, table, order, slot, relayed)
    return found


@functools.lru_cache(maxsize=64)
def _layout(table: bytes, domains: Domains, mine: int, terms: Terms) -> Layout:
    """Of the rows of all sources for one domain's experts."""
    world_size = sum(map(len, domains))
    counts_WE = np.frombuffer(table, dtype=np.int64).reshape(world_size, terms.num_experts)
    parted = part(terms.num_experts, world_size, terms.owners, domains)
    own = np.ascontiguousarray(counts_WE[:, parted.columns[mine]])
    return Layout(own, parted.placements[mine], terms.align)
