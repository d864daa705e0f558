"""Which rows cross between domains, and who passes them on: pure functions of integers.

A group may have several domains of g ranks each; a rank has a **place** in its domain, 0 to g - 1.
A token crosses into another domain once, however many of its experts are there: to the rank in its
own rank's place, which **carries** it on to the experts, and brings their rows' sum back. So inside
a domain each rank carries the rows of N sources, one of every domain: its own and N - 1 others'.

All words and axes besides are those of ``planning.routing``. N domains.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fusedcomm.planning.routing import Array, Layout, Placement, place

Domains = tuple[tuple[int, ...], ...]


class Carriers(NamedTuple):
    """Which rank sends the rows of every source, among ranks that share memory.

    Attributes:
        ranks: of every source, the rank among them.
        numbers: of every source, which of that rank's sources it is.
        most: how many sources each rank has.
        own: the number of each rank's own rows.
    """

    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    most: int
    own: int


@functools.lru_cache(maxsize=64)
def each_its_own(world_size: int) -> Carriers:
    """Every rank sends its own rows and no others."""
    return Carriers(tuple(range(world_size)), (0,) * world_size, 1, 0)


@functools.lru_cache(maxsize=64)
def carriers_in(domains: Domains, mine: int) -> Carriers:
    """Inside domain ``mine``: the rank in a source's place has it.

    >>> carriers_in(((0, 2), (1, 3)), 1)
    Carriers(ranks=(0, 0, 1, 1), numbers=(0, 1, 0, 1), most=2, own=1)
    """
    size = sum(map(len, domains))
    places, numbers = [0] * size, [0] * size
    for number, ranks in enumerate(domains):
        for place_, rank in enumerate(ranks):
            places[rank], numbers[rank] = place_, number
    return Carriers(tuple(places), tuple(numbers), len(domains), mine)


class Parted(NamedTuple):
    """A placement, cut at the domains.

    Attributes:
        placements: of every domain, its experts on its ranks.
        columns: of every domain, the columns of the whole table that its own columns are.
        domain_of: ``[E + 1]``, the domain of every column; N for "no expert".
        place_of: ``[E + 1]``, which of its domain's columns it is; 0 for "no expert".
    """

    placements: tuple[Placement, ...]
    columns: tuple[Array, ...]
    domain_of: Array
    place_of: Array


@functools.lru_cache(maxsize=64)
def part(num_experts: int, world_size: int, owners: tuple[int, ...], domains: Domains) -> Parted:
    """Cut a placement, of which the first arguments are as in ``place``.

    >>> parted = part(6, 4, (), ((0, 2), (1, 3)))  # two experts on each rank but the last
    >>> [columns.tolist() for columns in parted.columns]
    [[0, 1, 4, 5], [2, 3]]
    >>> parted.domain_of.tolist(), parted.place_of.tolist()
    ([0, 0, 1, 1, 0, 0, 2], [0, 1, 0, 1, 2, 3, 0])
    >>> parted.placements[1].experts
    ((2, 3), ())
    """
    whole = place(num_experts, world_size, owners)
    domain_of = np.full(num_experts + 1, len(domains), dtype=np.int64)
    place_of = np.zeros(num_experts + 1, dtype=np.int64)
    placements, columns = [], []
    for number, ranks in enumerate(domains):
        own = np.array([c for rank in ranks for c in whole.columns(rank)], dtype=np.int64)
        domain_of[own], place_of[own] = number, np.arange(len(own))
        experts = tuple(whole.experts[rank] for rank in ranks)
        starts = tuple(np.cumsum([0, *map(len, experts)]).tolist())
        column_of = np.full(num_experts + 1, len(own), dtype=np.int64)
        column_of[[e for each in experts for e in each]] = np.arange(len(own))
        placements.append(Placement(starts, column_of, experts))
        columns.append(own)
    for array in (domain_of, place_of, *columns):
        array.setflags(write=False)  # they are shared by all callers
    return Parted(tuple(placements), tuple(columns), domain_of, place_of)


def columns_of_slots(slot: Array, counts_E: Array) -> Array:  # noqa: N803
    """The column of every choice, from its row among those sent, as ``sort_choices`` has it.

    >>> columns_of_slots(np.array([[1, 0], [-1, 2]]), np.array([1, 0, 2])).tolist()
    [[2, 0], [3, 2]]
    """
    behind = np.repeat(np.arange(len(counts_E)), counts_E)
    return np.append(behind, len(counts_E))[slot]


class Outgoing(NamedTuple):
    """What a rank's tokens have to do with one domain.

    Attributes:
        tokens: those that have an expert there, in order.
        choices: the flat numbers (token * k + choice) of their choices there, in order.
    """

    tokens: Array
    choices: Array


def outgoing(columns: Array, parted: Parted) -> list[Outgoing]:
    """What crosses into each domain (or stays in the own one).

    Args:
        columns: ``[T, k]``, E for "no expert".

    >>> parted = part(6, 4, (), ((0, 2), (1, 3)))
    >>> for each in outgoing(np.array([[0, 4, 2], [6, 3, 3]]), parted):
    ...     print(each.tokens.tolist(), each.choices.tolist())
    [0] [0, 1]
    [0, 1] [2, 4, 5]
    """
    domains = parted.domain_of[columns]
    found = []
    for number in range(len(parted.columns)):
        there = domains == number
        found.append(Outgoing(np.flatnonzero(there.any(1)), np.flatnonzero(there)))
    return found


def write_choices(columns: Array, choices: Array, parted: Parted) -> Array:
    """A list of choices as it crosses: 4 bytes each.

    A number is the column in the domain, inverted (-1 - column) where another token begins:

    >>> parted = part(6, 4, (), ((0, 2), (1, 3)))
    >>> columns = np.array([[0, 4, 2], [6, 3, 3]])
    >>> write_choices(columns, np.array([2, 4, 5]), parted).tolist()
    [-1, -2, 1]
    """
    places = parted.place_of[columns.reshape(-1)[choices]]
    tokens = choices // columns.shape[1]
    begins = np.ones(len(tokens), dtype=bool)
    begins[1:] = tokens[1:] != tokens[:-1]
    return np.where(begins, ~places, places).astype(np.int32)


def read_choices(message: Array, top_k: int, none: int) -> tuple[Array, Array]:
    """The columns ``[tokens, k]`` of a list that has crossed, and where each choice stands there.

    A token's choices come first, in their order; the rest of its row is ``none``.

    >>> columns, places = read_choices(np.array([-1, -2, 1]), 3, none=4)
    >>> columns.tolist(), places.tolist()
    ([[0, 4, 4], [1, 1, 4]], [0, 3, 4])
    """
    begins = np.flatnonzero(message < 0)
    lengths = np.diff(np.append(begins, len(message)))
    tokens = np.repeat(np.arange(len(begins)), lengths)
    places = tokens * top_k + np.arange(len(message)) - np.repeat(begins, lengths)
    columns = np.full(len(begins) * top_k, none, dtype=np.int64)
    columns[places] = np.where(message < 0, ~message, message)
    return columns.reshape(len(begins), top_k), places


def slots_by_domain(found: Sequence[Outgoing], tokens: int, mine: int) -> Array:
    """``[T, N]``: a token's row among all sums, domain after domain; -1 where it has none.

    Other domains have rows for the tokens that have experts there, the own one for all.

    >>> both = [Outgoing(np.array([1]), None), Outgoing(np.array([0, 2]), None)]
    >>> slots_by_domain(both, 3, mine=0).tolist()
    [[-1, 3], [1, -1], [-1, 4]]
    """
    slots = np.full((tokens, len(found)), -1, dtype=np.int64)
    before = 0
    for number, each in enumerate(found):
        own = number == mine
        slots[each.tokens, number] = before + (each.tokens if own else np.arange(len(each.tokens)))
        before += tokens if own else len(each.tokens)
    return slots


def places_from(layout: Layout, rank: int, sources: Sequence[Sequence[int]]) -> Array:
    """Which of the rows that a rank receives are those of some sources, in another order.

    Args:
        layout: of all sources' rows; there they are ordered by (expert, source, token, choice).
        sources: of every carrier in turn, whose rows it brings: the order is (expert, carrier, this
            list, token, choice).

    Rank 0 has two experts. Of the sources 0 to 3 those two of another domain are 1 and 3, carried
    by the ranks 0 and 1:

    >>> layout = Layout(np.array([[1, 1], [2, 0], [1, 1], [1, 2]]), place(2, 1), align=4)
    >>> places_from(layout, 0, [[1], [3]]).tolist()
    [1, 2, 4, 10, 11]
    >>> places_from(layout, 0, [[0], [2]]).tolist()
    [0, 3, 8, 9]
    """
    own = layout.placement.columns(rank)
    every = [source for theirs in sources for source in theirs]
    first, counts = (
        array[every, own.start : own.stop].T.reshape(-1)
        for array in (layout.first_row_WE, layout.counts_WE)
    )
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())
