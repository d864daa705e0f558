"""From who can address whom to domains."""

from __future__ import annotations

from collections.abc import Callable


def domains_of(count: int, addressable: Callable[[int, int], bool]) -> list[list[int]]:
    """Put ranks 0 to ``count`` - 1 into domains in which every two can address each other.

    In the order of ranks, each joins the first domain all of whose members it can address: so the
    answer is the same wherever it is computed.

    >>> domains_of(4, lambda a, b: a // 2 == b // 2)
    [[0, 1], [2, 3]]
    """
    domains: list[list[int]] = []
    for rank in range(count):
        for domain in domains:
            if all(addressable(rank, other) and addressable(other, rank) for other in domain):
                domain.append(rank)
                break
        else:
            domains.append([rank])
    return domains
