"""The classical all-reduce algorithms, each a program per rank.

``n`` is the number of ranks, S the bytes of the vector:

================= ====================== ========================= ================================
algorithm         steps                  messages a rank sends     bytes a rank sends
================= ====================== ========================= ================================
pairwise          1                      n - 1                     (n - 1) S
parameter_server  2                      1 (server n - 1)          S (server (n - 1) S)
ring              2 (n - 1)              2 (n - 1)                 2 (n - 1) / n S
halving_doubling  2 log2 n, or with      2 log2 n; a rank that     2 (n - 1) / n S; a rank that
                  extra ranks 2 more     stands for another 1      stands for another S more;
                  for log2 rounded down  more; an extra rank 1     an extra rank S
one_shot          1                      n - 1                     (n - 1) S
two_shot          2                      2 (n - 1)                 2 (n - 1) / n S
hierarchical      two_shot's, inside     sum of its parts          sum of its parts; across domains
                  and across: 4                                    2 (N - 1) / N S / g
================= ====================== ========================= ================================

Steps are the length of the longest chain of messages in which each could only be sent when the one
before had come. ``recording`` counts all three on the programs. Ranges follow ``torch.chunk``'s
rule, so that "S / n" is uneven where n does not divide; a message of an empty range counts as one.

``one_shot``, ``pairwise``, ``two_shot`` and ``parameter_server`` reduce all contributions at once
in the order of ranks; ``ring``, ``halving_doubling`` and ``hierarchical`` pass partial results on,
which a transport rounds to the vector's dtype. All are bitwise equal on all ranks, since every
range is reduced on one rank (or, in the one-shot forms, in one order on all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from fusedcomm.programs.steps import Program, Receive, Send, link
from fusedcomm.schedule import shard_bounds, successors

Domains = tuple[tuple[int, ...], ...]


def pairwise(size: int, n: int) -> list[Program]:
    """Everyone sends everything to everyone. (Where peers read it in place, that is one-shot.)"""
    everyone = tuple(range(n))
    return [
        [
            *(Send(peer, 0, size) for peer in successors(rank, n)),
            Receive(everyone, 0, size, complete=True),
        ]
        for rank in range(n)
    ]


def parameter_server(size: int, n: int) -> list[Program]:
    """Everyone sends everything to rank 0, which reduces it and sends the result back."""
    others = range(1, n)
    server: Program = [Receive(tuple(range(n)), 0, size, complete=True)]
    server += [Send(peer, 0, size) for peer in others]
    clients: list[Program] = [[Send(0, 0, size), Receive((0,), 0, size)] for _ in others]
    return [server, *clients]


def ring(size: int, n: int) -> list[Program]:
    """Partial results of each chunk go round once, then the results do.

    In step k of the first round, rank r sends chunk r - k, to which it has added its own values; at
    its end rank r has the whole of chunk r + 1.
    """
    bounds = shard_bounds(size, n)
    programs: list[Program] = []
    for rank in range(n):
        after, before = (rank + 1) % n, (rank - 1) % n
        steps: Program = []
        for k in range(n - 1):
            steps.append(Send(after, *bounds[(rank - k) % n]))
            steps.append(Receive((before, rank), *bounds[(rank - k - 1) % n], complete=k == n - 2))
        for k in range(n - 1):
            steps.append(Send(after, *bounds[(rank + 1 - k) % n]))
            steps.append(Receive((before,), *bounds[(rank - k) % n]))
        programs.append(steps)
    return programs


def halving_doubling(size: int, n: int) -> list[Program]:
    """Exchange halves with partners ever nearer, then the results with the same ones backwards.

    With p the largest power of two up to n, each of the n - p extra ranks hands everything to a
    partner before and gets the result from it afterwards.
    """
    p = 1 << (n.bit_length() - 1)
    extra = n - p
    programs: list[Program] = []
    for rank in range(p):
        steps: Program = []
        if rank < extra:
            steps.append(Receive((rank, p + rank), 0, size, complete=p == 1))
        mine = [(0, size)]  # after every halving, what this rank goes on with
        distance = p // 2
        while distance:
            peer = rank ^ distance
            start, stop = mine[-1]
            middle = shard_bounds(stop - start, 2)[0][1] + start
            low, high = (start, middle), (middle, stop)
            own, theirs = (low, high) if rank < peer else (high, low)
            steps.append(Send(peer, *theirs))
            pair = (min(rank, peer), max(rank, peer))
            steps.append(Receive(pair, *own, complete=distance == 1))
            mine.append(own)
            distance //= 2
        for level in range(len(mine) - 1, 0, -1):
            peer = rank ^ (p >> level)
            (start, stop), own = mine[level - 1], mine[level]
            theirs = (own[1], stop) if own[0] == start else (start, own[0])
            steps.append(Send(peer, *own))
            steps.append(Receive((peer,), *theirs))
        if rank < extra:
            steps.append(Send(p + rank, 0, size))
        programs.append(steps)
    for rank in range(extra):
        programs.append([Send(rank, 0, size), Receive((rank,), 0, size)])
    return programs


def two_shot(size: int, n: int) -> list[Program]:
    """Every rank reduces its chunk of everyone's, then everyone takes all chunks."""
    return hierarchical(size, n, (tuple(range(n)),))


def hierarchical(size: int, n: int, domains: Domains) -> list[Program]:
    """Reduce-scatter inside every domain, all-reduce across for each chunk, all-gather inside.

    With g the size of the smallest domain, the first g ranks of each own a chunk each; the owners
    of one chunk, one a domain, reduce it among themselves by two-shot.
    """
    g = min(len(domain) for domain in domains)
    chunks = shard_bounds(size, g)
    several = len(domains) > 1
    programs: list[Program] = [[] for _ in range(n)]

    def exchange(ranks: Sequence[int], parts: list[tuple[int, int]], complete: bool) -> None:
        """Each of the first ``len(parts)`` ranks reduces its part of all ranks' values."""
        for i, rank in enumerate(ranks):
            later = [(i + step) % len(ranks) for step in range(1, len(ranks))]
            sends = (Send(ranks[j], *parts[j]) for j in later if j < len(parts))
            programs[rank] += sends
            if i < len(parts):
                programs[rank].append(Receive(tuple(sorted(ranks)), *parts[i], complete=complete))

    def spread(ranks: Sequence[int], parts: list[tuple[int, int]]) -> None:
        """Each of the first ``len(parts)`` ranks gives its part to all others."""
        for i, rank in enumerate(ranks):
            later = [(i + step) % len(ranks) for step in range(1, len(ranks))]
            if i < len(parts):
                programs[rank] += (Send(ranks[j], *parts[i]) for j in later)
            programs[rank] += (Receive((ranks[j],), *parts[j]) for j in later if j < len(parts))

    for domain in domains:
        exchange(domain, chunks, not several)
    if several:
        for i, (start, stop) in enumerate(chunks):
            owners = [domain[i] for domain in domains]
            cut = shard_bounds(stop - start, len(owners))
            parts = [(start + first, start + last) for first, last in cut]
            exchange(owners, parts, True)
            spread(owners, parts)
    for domain in domains:
        spread(domain, chunks)
    return programs


_FLAT: dict[str, Callable[[int, int], list[Program]]] = {
    "pairwise": pairwise,
    "parameter_server": parameter_server,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "one_shot": pairwise,
    "two_shot": two_shot,
}

#: The names by which an algorithm is chosen.
ALGORITHMS = (*_FLAT, "hierarchical")


@lru_cache(maxsize=256)
def all_reduce_programs(
    algorithm: str, size: int, n: int, domains: Domains | None = None
) -> list[Program]:
    """The linked programs of all n ranks for a vector of ``size`` elements; not to be changed.

    Args:
        algorithm: one of ``ALGORITHMS``.
        domains: for ``hierarchical``, the ranks of each domain; None for one domain.
    """
    if n == 1:
        return [[]]
    if algorithm == "hierarchical":
        return link(hierarchical(size, n, domains or (tuple(range(n)),)))
    return link(_FLAT[algorithm](size, n))
