"""A transport that moves nothing and counts: steps, messages and bytes of every rank.

It executes the very programs that the engines do, message by message, and holds what a rank's
vector stands for: how often each rank's input is contained in it. So it also shows that a program
is right, for any number of ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from fusedcomm.programs.steps import Program, Receive


class Counts(NamedTuple):
    """What executing all ranks' programs took.

    Attributes:
        steps: the longest chain of messages each of which waited for the one before.
        messages, sent: of each rank, how many messages and elements it sent.
        pairs: (sender, receiver) -> elements.
        result: of each rank and element, how often each rank's input is contained in it.
    """

    steps: int
    messages: list[int]
    sent: list[int]
    pairs: Counter[tuple[int, int]]
    result: list[list[Counter[int]]]


def record(programs: Sequence[Program], size: int) -> Counts:
    """Execute linked programs on vectors of ``size`` elements, of which only names are kept.

    Raises:
        ValueError: the programs wait for each other, or a range that is marked as complete (or is
            not) has not (or has) every rank's contribution.
    """
    n = len(programs)
    vectors = [[Counter({rank: 1}) for _ in range(size)] for rank in range(n)]
    inboxes: dict[tuple[int, int], deque[tuple[list[Counter[int]], int]]] = {
        (a, b): deque() for a in range(n) for b in range(n)
    }
    messages, sent, pairs = [0] * n, [0] * n, Counter[tuple[int, int]]()
    depth = [0] * n  # of each rank, the longest chain that ends in what it has received
    deepest = 0
    position = [0] * n
    while any(position[rank] < len(programs[rank]) for rank in range(n)):
        moved = False
        for rank in range(n):
            while position[rank] < len(programs[rank]):
                step = programs[rank][position[rank]]
                span = slice(step.start, step.stop)
                if isinstance(step, Receive):
                    peers = [source for source in step.sources if source != rank]
                    if not all(inboxes[peer, rank] for peer in peers):
                        break
                    arrived = {peer: inboxes[peer, rank].popleft() for peer in peers}
                    depth[rank] = max([depth[rank], *(d for _, d in arrived.values())])
                    parts = [
                        vectors[rank][span] if source == rank else arrived[source][0]
                        for source in step.sources
                    ]
                    total: list[Counter[int]] = [
                        sum(column, Counter()) for column in zip(*parts, strict=True)
                    ]
                    whole = all(len(entry) == n for entry in total)
                    if len(parts) > 1 and total and whole != step.complete:
                        raise ValueError(f"rank {rank}: {step} is not marked as it should be")
                    vectors[rank][span] = total
                else:
                    inboxes[rank, step.peer].append((vectors[rank][span], depth[rank] + 1))
                    deepest = max(deepest, depth[rank] + 1)
                    messages[rank] += 1
                    sent[rank] += step.stop - step.start
                    pairs[rank, step.peer] += step.stop - step.start
                position[rank] += 1
                moved = True
        if not moved:
            raise ValueError(f"the programs wait for each other, at steps {position}")
    return Counts(deepest, messages, sent, pairs, vectors)
