"""Topologies that a user declares: an argument, or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusedcomm.topology.links import TCP
from fusedcomm.topology.model import Topology, parse_domains

#: Domains as ``0,1;2,3``, in ranks of the default group.
VARIABLE = "FUSEDCOMM_DOMAINS"

Declared = Topology | Sequence[Sequence[int]] | None


def declared_topology(given: Declared, members: Sequence[int]) -> Topology | None:
    """What is declared for a group, if anything; the argument goes before the environment.

    Args:
        given: a topology of the group's ranks, or only its domains.
        members: the group's ranks in the default group, for the environment names those.

    Raises:
        ValueError: it is no topology, or not of these ranks.
    """
    if given is not None:
        topology = given if isinstance(given, Topology) else Topology(given, between=TCP)
        if topology.world_size != len(members):
            raise ValueError(
                f"topology has {topology.world_size} ranks, the group {len(members)}: every rank "
                "of the group is in one domain, by its number in the group"
            )
        return topology
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    number = {member: rank for rank, member in enumerate(members)}
    domains: list[list[int]] = []
    for domain in parse_domains(text):
        ranks = [number[member] for member in domain if member in number]
        if ranks:
            domains.append(ranks)
    named = sorted(rank for ranks in domains for rank in ranks)
    if named != list(range(len(members))):
        raise ValueError(
            f"{VARIABLE}={text} must name every rank of the default group once; the group has "
            f"ranks {list(members)}"
        )
    return Topology(domains, between=TCP, source=VARIABLE)
