"""What a program is made of.

Every rank holds a vector, at first its own input. A ``Send`` makes a range of it, as it now is,
available to a peer; a ``Receive`` puts into a range what peers sent: a copy, or the reduction of
several messages (and of the own values, where this rank is among the sources). Messages of one
ordered pair of ranks are numbered in the order of their sends, and received in that order.

Where the vector lies is the transport's affair. What a transport needs to know to save copies is
worked out once for all ranks, by ``link``:

- a message is **fresh** if it still is the sender's input, so that it may be read there;
- a received range is **kept** if this rank sends (a part of) it on, so that peers must see it;
- it is **final** if nothing is received into it later: then it is a part of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """Make ``[start, stop)`` available to ``peer``, as this pair's message number ``message``."""

    peer: int
    start: int
    stop: int
    message: int = 0
    fresh: bool = False


class Receive(NamedTuple):
    """Fill ``[start, stop)`` from messages of ``sources``, in whose order they are reduced.

    Attributes:
        sources: ranks; this rank among them stands for the range's present values.
        messages: for each source the number of its message; -1 for this rank.
        complete: whether the result has every rank's contribution (an average divides then).
        fresh: for each source whether the values are still that rank's input.
    """

    sources: tuple[int, ...]
    start: int
    stop: int
    complete: bool = False
    messages: tuple[int, ...] = ()
    fresh: tuple[bool, ...] = ()
    kept: bool = False
    final: bool = False


Step = Send | Receive
Program = list[Step]


def link(programs: Sequence[Program]) -> list[Program]:
    """Number the messages of all ranks' programs and mark what is fresh, kept and final.

    Raises:
        ValueError: a message is received that was not sent, or not as it was sent; or a range is
            sent or overwritten of which only a part was received.
    """
    sends: dict[tuple[int, int], list[Send]] = defaultdict(list)
    linked: list[Program] = []
    for rank, program in enumerate(programs):
        received: list[Receive] = []
        steps: Program = []
        for step in program:
            if isinstance(step, Receive):
                received.append(step)
            else:
                pair = sends[rank, step.peer]
                fresh = not _covered(step, received)
                step = step._replace(message=len(pair), fresh=fresh)
                pair.append(step)
            steps.append(step)
        linked.append(steps)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    for rank, steps in enumerate(linked):
        received = []
        for i, step in enumerate(steps):
            if isinstance(step, Send):
                continue
            messages: list[int] = []
            untouched: list[bool] = []
            for source in step.sources:
                if source == rank:
                    messages.append(-1)
                    untouched.append(not _covered(step, received))
                    continue
                number = taken[source, rank]
                taken[source, rank] += 1
                if number >= len(sends[source, rank]):
                    raise ValueError(f"rank {rank} receives more than rank {source} sends it")
                sent = sends[source, rank][number]
                if (sent.start, sent.stop) != (step.start, step.stop):
                    raise ValueError(f"rank {source} sends {sent}, rank {rank} receives {step}")
                messages.append(number)
                untouched.append(sent.fresh)
            later = steps[i + 1 :]
            kept = any(isinstance(s, Send) and _overlap(s, step) for s in later)
            overwritten = _covered(step, [s for s in later if isinstance(s, Receive)])
            steps[i] = step._replace(
                messages=tuple(messages), fresh=tuple(untouched), kept=kept, final=not overwritten
            )
            received.append(step)
    for (sender, receiver), found in sends.items():
        if taken[sender, receiver] != len(found):
            raise ValueError(f"rank {receiver} receives less than rank {sender} sends it")
    return linked


def messages_per_pair(programs: Sequence[Program]) -> int:
    """The most messages that one rank sends to another; at least 1."""
    numbers = [s.message + 1 for steps in programs for s in steps if isinstance(s, Send)]
    return max(numbers, default=1)


def _overlap(a: Step, b: Step) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _covered(step: Step, others: Sequence[Step]) -> bool:
    """Whether the step's range lies within those of ``others``; it must do so wholly or not."""
    ranges = sorted((s.start, s.stop) for s in others if _overlap(s, step))
    if not ranges:
        return False
    reached = step.start
    for start, stop in ranges:
        if start > reached:
            break
        reached = max(reached, stop)
    if reached < step.stop or ranges[0][0] > step.start:
        raise ValueError(f"only a part of {step} was received, or is overwritten")
    return True
