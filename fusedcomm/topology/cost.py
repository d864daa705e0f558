"""What a collective costs on a topology, and which algorithm to take.

S is the bytes of the full tensor, n the ranks of a domain, a the latency of the slowest link that
an algorithm uses, B its bandwidth, R the rate at which contributions are added. A rank sends on one
link at a time.

================= ====================================== ==========================
all-reduce        messages and bytes                     bytes added
================= ====================================== ==========================
one_shot          a + (n-1) S/B                          (n-1) S
pairwise          (n-1) a + (n-1) S/B                    (n-1) S
parameter_server  2 (n a + n S/B)                        (n-1) S
ring              2 (n-1) a + 2 (n-1)/n S/B              (n-1)/n S
halving_doubling  2 log2(n) a + 2 (n-1)/n S/B, and       (n-1)/n S, and S
                  2 (a + S/B) if n is no power of two
two_shot          2 a + 2 (n-1)/n S/B                    (n-1)/n S
multimem          a + (1 + 1/n) S/B                      by the switch
hierarchical      RS_g(S) + AR_N(S/g) + AG_g(S)          theirs
================= ====================================== ==========================

RS_g and AG_g, a reduce-scatter and an all-gather among the g ranks of a domain, are half a two-shot
each; AR_N, among N domains, is 2 (N-1) a + 2 (N-1)/N of its bytes over the link between them. An
all-to-all is (n-1) a + (n-1)/n S/B.

The times are for ranking, not for promises. Ties go to the algorithm named first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from fusedcomm.topology.links import Link, speed
from fusedcomm.topology.model import Topology

#: op -> its algorithms, the preferred first where times are equal.
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        "one_shot",
        "two_shot",
        "multimem",
        "ring",
        "halving_doubling",
        "pairwise",
        "parameter_server",
        "hierarchical",
    ),
    "reduce_scatter": ("direct", "hierarchical"),
    "all_gather": ("direct", "hierarchical"),
    "all_to_all": ("direct", "two_level"),
    "broadcast": ("direct", "hierarchical"),
}
#: The algorithms that run over several domains; the others need ranks that address each other.
ACROSS = ("hierarchical", "two_level")


@dataclass(frozen=True)
class Choice:
    """The algorithm to take.

    Attributes:
        algorithm: the fastest by prediction.
        seconds: its predicted time.
        reason: a sentence for people.
        predictions: what was compared: algorithm -> seconds, the fastest first.
    """

    algorithm: str
    seconds: float
    reason: str
    predictions: dict[str, float]


@functools.lru_cache(maxsize=4096)
def choose(
    op: str,
    nbytes: int,
    world_size: int,
    topology: Topology,
    candidates: tuple[str, ...] | None = None,
) -> Choice:
    """The algorithm for one call, from facts that are equal on all ranks.

    Args:
        op: a key of ``ALGORITHMS``.
        nbytes: of the full tensor.
        world_size: of the group; for a reader's sake, it is the topology's.
        candidates: what may be taken; all of the op's that the topology can run by default.
            ``multimem`` counts only where a switch multicasts, whatever is asked for.

    Raises:
        ValueError: the op or a candidate is not known, or nothing can run on this topology.
    """
    if op not in ALGORITHMS:
        raise ValueError(f"op must be one of {', '.join(ALGORITHMS)}; got {op!r}")
    if world_size != topology.world_size:
        raise ValueError(f"the topology has {topology.world_size} ranks, not {world_size}")
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative; got {nbytes}")
    unknown = set(candidates or ()) - set(ALGORITHMS[op])
    if unknown:
        raise ValueError(f"{op} has no algorithm {', '.join(sorted(unknown))}")
    able = [name for name in candidates or ALGORITHMS[op] if can_run(name, topology)]
    if not able:
        raise ValueError(
            f"no algorithm for {op} runs on {topology!r}: domains of unequal size, or candidates "
            f"{candidates} that need another topology"
        )
    order = {name: position for position, name in enumerate(ALGORITHMS[op])}
    times = {name: predict(op, name, nbytes, topology) for name in able}
    ranked = sorted(times, key=lambda name: (times[name], order[name]))
    best, *others = ranked
    reason = f"{best} takes {_microseconds(times[best])} by prediction for {nbytes} bytes"
    if others:
        reason += f", {others[0]} {_microseconds(times[others[0]])}"
    predictions = {name: times[name] for name in ranked}
    return Choice(best, times[best], reason, predictions)


def can_run(algorithm: str, topology: Topology) -> bool:
    """Whether the topology has what the algorithm needs."""
    if algorithm in ACROSS:
        return len(topology.domains) > 1 and topology.uniform
    if algorithm == "multimem":
        return topology.multicast == (True,)
    return len(topology.domains) == 1


def predict(op: str, algorithm: str, nbytes: int, topology: Topology) -> float:
    """Predicted seconds of one call.

    Raises:
        ValueError: the op has no such algorithm.
    """
    if algorithm not in ALGORITHMS.get(op, ()):
        raise ValueError(f"{op} has no algorithm {algorithm!r}")
    if topology.world_size == 1:
        return 0.0
    size = float(nbytes)
    if algorithm in ACROSS:
        return _across(op, size, topology)
    n = topology.world_size
    if op == "all_reduce":
        link = _link_of(algorithm, topology)
        return _ALL_REDUCE[algorithm](size, n, link)
    return _direct(op, size, n, _slowest(topology))


def _direct(op: str, size: float, n: int, link: Link) -> float:
    """One domain's exchange in one step; ``size`` is that of the full tensor."""
    if n == 1:
        return 0.0
    part = (n - 1) / n * size
    if op == "reduce_scatter":
        return link.latency_s + part / link.bandwidth + _added(part, link)
    if op == "all_to_all":
        return (n - 1) * link.latency_s + part / link.bandwidth
    return link.latency_s + (part if op == "all_gather" else size) / link.bandwidth


def _across(op: str, size: float, topology: Topology) -> float:
    between = topology.slowest_between
    assert between is not None
    n, g = len(topology.domains), len(topology.domains[0])
    inside = _slowest(topology)
    steps = (n - 1) * between.latency_s
    crossing = (n - 1) / n * size / g / between.bandwidth
    if op == "all_reduce":
        scatter = _direct("reduce_scatter", size, g, inside)
        return scatter + 2 * (steps + crossing) + _direct("all_gather", size, g, inside)
    if op == "all_to_all":
        # Inside first, to the rank whose counterpart is the receiver's, then across.
        return _direct("all_to_all", size, g, inside) + steps + crossing * g
    if op == "broadcast":
        return between.latency_s + size / between.bandwidth + _direct(op, size, g, inside)
    return steps + crossing + _direct(op, size, g, inside)


def _one_shot(s: float, n: int, link: Link) -> float:
    return link.latency_s + (n - 1) * s / link.bandwidth + _added((n - 1) * s, link)


def _pairwise(s: float, n: int, link: Link) -> float:
    return (n - 1) * (link.latency_s + s / link.bandwidth) + _added((n - 1) * s, link)


def _parameter_server(s: float, n: int, link: Link) -> float:
    return 2 * n * (link.latency_s + s / link.bandwidth) + _added((n - 1) * s, link)


def _ring(s: float, n: int, link: Link) -> float:
    part = (n - 1) / n * s
    return 2 * (n - 1) * link.latency_s + 2 * part / link.bandwidth + _added(part, link)


def _halving_doubling(s: float, n: int, link: Link) -> float:
    part, power = (n - 1) / n * s, math.floor(math.log2(n))
    time = 2 * power * link.latency_s + 2 * part / link.bandwidth + _added(part, link)
    if n != 1 << power:
        time += 2 * (link.latency_s + s / link.bandwidth) + _added(s, link)
    return time


def _two_shot(s: float, n: int, link: Link) -> float:
    part = (n - 1) / n * s
    return 2 * link.latency_s + 2 * part / link.bandwidth + _added(part, link)


def _multimem(s: float, n: int, link: Link) -> float:
    return link.latency_s + (1 + 1 / n) * s / link.bandwidth


_ALL_REDUCE: dict[str, Callable[[float, int, Link], float]] = {
    "one_shot": _one_shot,
    "pairwise": _pairwise,
    "parameter_server": _parameter_server,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "two_shot": _two_shot,
    "multimem": _multimem,
}


def _added(nbytes: float, link: Link) -> float:
    return 0.0 if link.reduce_rate is None else nbytes / link.reduce_rate


def _slowest(topology: Topology) -> Link:
    """The slowest link inside domains; where each has one rank, one that is never used."""
    return topology.slowest_inside or topology.inside


@functools.lru_cache(maxsize=1024)
def _link_of(algorithm: str, topology: Topology) -> Link:
    """The slowest link among those that an algorithm uses: a ring needs only its neighbours'."""
    n = topology.world_size
    if algorithm == "ring":
        pairs = [(rank, (rank + 1) % n) for rank in range(n)]
    elif algorithm == "parameter_server":
        pairs = [(0, rank) for rank in range(1, n)]
    elif algorithm == "halving_doubling":
        power = 1 << (n.bit_length() - 1)
        pairs = [(rank, rank + power) for rank in range(n - power)]
        pairs += [(a, a ^ 1 << bit) for a in range(power) for bit in range(power.bit_length() - 1)]
    else:
        return _slowest(topology)
    return min((topology.link(a, b) for a, b in pairs), key=speed)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs"
