"""Topology: which ranks form domains, and the link between any two ranks. Declared or detected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fusedcomm.topology.links import NETWORK, SHARED_MEMORY, Link, as_link, speed

Pair = tuple[int, int]


class Topology:
    """The domains of a group's ranks and the links between them. Immutable.

    A **domain** is a set of ranks that can address each other's memory. Ranks are numbers in the
    group, 0 to world size - 1; the number of ranks that a machine launches is not its domain size.

        Topology(domains=[[0, 1, 2, 3], [4, 5, 6, 7]], inside="nvswitch-h100", between="network")

    Attributes:
        domains: the ranks of every domain, ascending; the domains in the order of their first rank.
        multicast: for every domain, whether a switch can write to all its ranks at once.
        source: where this knowledge comes from, in words.
        notes: what a person should know about it.
    """

    def __init__(
        self,
        domains: Sequence[Sequence[int]],
        *,
        links: Mapping[Pair, Link | str] | None = None,
        inside: Link | str = SHARED_MEMORY,
        between: Link | str = NETWORK,
        multicast: bool | Sequence[bool] = False,
        source: str = "declared",
        notes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            domains: every rank in exactly one of them.
            links: pair of ranks -> link, either way round, where it is another than the usual one.
            inside, between: the usual link between two ranks of one domain, and of two.
            multicast: for all domains, or for each in the order given.

        Raises:
            ValueError: the domains are no partition of 0, 1, 2, …; or a link is none.
        """
        given = _checked_domains(domains)
        flags = [multicast] * len(given) if isinstance(multicast, bool) else list(multicast)
        if len(flags) != len(given):
            raise ValueError(f"multicast has {len(flags)} entries for {len(given)} domains")
        order = sorted(range(len(given)), key=lambda index: given[index])
        self.domains = tuple(given[index] for index in order)
        self.multicast = tuple(bool(flags[index]) for index in order)
        self.inside, self.between = as_link(inside), as_link(between)
        self.source = source
        self.notes = tuple(notes)
        self._domain_of = {
            rank: number for number, ranks in enumerate(self.domains) for rank in ranks
        }
        self._links = _checked_links(links or {}, self.world_size)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._domain_of)

    def domain_of(self, rank: int) -> int:
        """The number of the domain that ``rank`` is in."""
        if rank not in self._domain_of:
            raise ValueError(f"there is no rank {rank} among the {self.world_size} of the topology")
        return self._domain_of[rank]

    def local_rank(self, rank: int) -> int:
        """Which of its domain's ranks ``rank`` is."""
        return self.domains[self.domain_of(rank)].index(rank)

    @property
    def uniform(self) -> bool:
        """Whether all domains have the same number of ranks, as hierarchical algorithms need it."""
        return len({len(ranks) for ranks in self.domains}) == 1

    def link(self, a: int, b: int) -> Link:
        """The link between two different ranks."""
        inside = self.domain_of(a) == self.domain_of(b)
        if a == b:
            raise ValueError(f"rank {a} has no link to itself")
        found = self._links.get((min(a, b), max(a, b)))
        return found or (self.inside if inside else self.between)

    @cached_property
    def slowest_inside(self) -> Link | None:
        """The narrowest link within a domain, which paces its collectives; None without one."""
        pairs = [
            self.link(a, b)
            for ranks in self.domains
            for position, a in enumerate(ranks)
            for b in ranks[position + 1 :]
        ]
        return min(pairs, key=speed) if pairs else None

    @cached_property
    def slowest_between(self) -> Link | None:
        """The narrowest link between ranks of different domains; None with one domain."""
        if len(self.domains) == 1:
            return None
        crossing = [
            link for (a, b), link in self._links.items() if self.domain_of(a) != self.domain_of(b)
        ]
        total = self.world_size * (self.world_size - 1) // 2
        within = sum(len(ranks) * (len(ranks) - 1) // 2 for ranks in self.domains)
        usual = [self.between] if len(crossing) < total - within else []
        return min([*crossing, *usual], key=speed)

    def restricted(self, ranks: Sequence[int]) -> Topology:
        """The topology of some of the ranks, numbered anew in the order given."""
        number = {rank: position for position, rank in enumerate(ranks)}
        if len(number) != len(ranks):
            raise ValueError(f"a rank stands twice in {list(ranks)}")
        kept: dict[int, list[int]] = {}
        for rank in ranks:
            kept.setdefault(self.domain_of(rank), []).append(number[rank])
        links = {
            (number[a], number[b]): link
            for (a, b), link in self._links.items()
            if a in number and b in number
        }
        return Topology(
            list(kept.values()),
            links=links,
            inside=self.inside,
            between=self.between,
            multicast=[self.multicast[domain] for domain in kept],
            source=self.source,
            notes=self.notes,
        )

    def with_links(self, measured: Mapping[str, Link]) -> Topology:
        """The same with the links of these kinds replaced, by measured ones say."""
        return Topology(
            self.domains,
            links={pair: measured.get(link.kind, link) for pair, link in self._links.items()},
            inside=measured.get(self.inside.kind, self.inside),
            between=measured.get(self.between.kind, self.between),
            multicast=self.multicast,
            source=self.source,
            notes=self.notes,
        )

    def describe(self) -> list[str]:
        """Lines for people: every domain with its links, what lies between, and the notes."""
        lines = []
        for number, ranks in enumerate(self.domains):
            kinds = {str(self.link(a, b)) for a in ranks for b in ranks if a < b}
            how = " and ".join(sorted(kinds)) or "one rank alone"
            extra = ", multicast" if self.multicast[number] else ""
            lines.append(f"domain {number}: ranks {_ranges(ranks)}: {how}{extra}")
        if self.slowest_between is not None:
            lines.append(f"between domains: {self.slowest_between}")
        return [*lines, *self.notes]

    def text(self) -> str:
        """All of it in one line; equal for equal topologies."""
        return repr(self._key())

    def _key(self) -> tuple[Any, ...]:
        links = tuple(sorted(self._links.items(), key=lambda item: item[0]))
        return self.domains, links, self.inside, self.between, self.multicast

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        shown = [list(ranks) for ranks in self.domains]
        return f"Topology(domains={shown}, source={self.source!r})"


def parse_domains(text: str) -> list[list[int]]:
    """Domains as the environment variable ``FUSEDCOMM_DOMAINS`` writes them.

    >>> parse_domains("0-3; 4,5,6,7")
    [[0, 1, 2, 3], [4, 5, 6, 7]]

    Raises:
        ValueError: the text is none.
    """
    domains = []
    for part in text.split(";"):
        ranks: list[int] = []
        for item in part.split(","):
            first, dash, last = item.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError(
                    "domains are ranks with commas, or ranges, and semicolons between domains, as "
                    f"in 0-3;4,5,6,7; cannot read {item.strip()!r} in {text!r}"
                )
            ranks += range(int(first), int(last or first) + 1)
        domains.append(ranks)
    return domains


def _checked_domains(domains: Any) -> list[tuple[int, ...]]:
    if isinstance(domains, str) or not isinstance(domains, Sequence) or not domains:
        raise ValueError(
            f"domains must be a list of lists of ranks, as in [[0, 1], [2, 3]]; got {domains!r}"
        )
    seen: dict[int, int] = {}
    found = []
    for number, ranks in enumerate(domains):
        if isinstance(ranks, str) or not isinstance(ranks, Sequence):
            raise ValueError(f"domain {number} must be a list of ranks; got {ranks!r}")
        if not ranks:
            raise ValueError(f"domain {number} is empty: leave it out")
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise ValueError(f"a rank is an int from 0 on; domain {number} has {rank!r}")
            if rank in seen:
                raise ValueError(f"rank {rank} stands in domain {seen[rank]} and in {number}")
            seen[rank] = number
        found.append(tuple(sorted(ranks)))
    missing = sorted(set(range(len(seen))) - seen.keys())
    if missing:
        raise ValueError(
            f"{len(seen)} ranks are in domains, so they must be 0 to {len(seen) - 1}; "
            f"missing: {_ranges(missing)}"
        )
    return found


def _checked_links(links: Mapping[Pair, Link | str], world_size: int) -> dict[Pair, Link]:
    found: dict[Pair, Link] = {}
    for pair, value in links.items():
        if (
            not isinstance(pair, tuple)
            or len(pair) != 2
            or pair[0] == pair[1]
            or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in pair)
        ):
            raise ValueError(
                f"links are given for pairs of different ranks 0 to {world_size - 1}; got {pair!r}"
            )
        key, link = (min(pair), max(pair)), as_link(value)
        if found.setdefault(key, link) != link:
            raise ValueError(f"ranks {key[0]} and {key[1]} are given two links")
    return found


def _ranges(ranks: Sequence[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
