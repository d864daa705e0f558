"""Every interleaving of a few small programs that share cells of memory.

A state is one tuple of integers: all cells, the position of each program among them. `explore` goes
through the states breadth first, so the first fault it meets has a shortest way to it. Steps take
effect in order and at once: memory order is not modelled, it is what release and acquire are for.

A write to shared data is two stores, the first of which leaves the cell `TORN`; a read is one step.
That is enough: if a read can overlap a write at all, some interleaving has the read's one step
between the write's two.

**Reduction.** With `reduce=True`, a wait that is satisfied and the raising of a flag that one
program alone raises are done at once, in one fixed order, instead of in every order. That loses
no fault. Flags only grow (going back is itself a fault), so what is satisfied stays so and raising
a flag blocks nobody: in any run such a step can be moved ahead of the other programs' steps, or be
added to a run that ends without it, and nobody does or sees anything else. It cannot put the other
steps off for ever, since positions only grow. Reads, writes and counters are done in every order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

TORN = -1

# What a step does with its cell and its value.
(
    WAIT,  # go on when the flag has reached the value, by the wrapped difference in int32
    PLAIN_WAIT,  # go on when flag >= value
    JOIN,  # go on when each program in `others` has reached the position given with it
    SET,  # raise the flag to the value
    ADD,  # add the value to the flag
    STORE,  # put the value into the cell
    READ,  # the cell must hold the value
    COUNT,  # add one; go on if that makes the value, else pass over `skip` steps
    LOOK,  # go on if the cell holds the value, else pass over `skip` steps
    COPY,  # put into the cell what the cell whose index is the value holds
    CHECK,  # the cell must hold the value: a comparison that must not fail
    END,
) = range(12)


class Step(NamedTuple):
    """One atomic step; `text` says it in words."""

    op: int
    cell: int
    value: int
    text: str
    skip: int = 0
    others: tuple[tuple[int, int], ...] = ()


class Program(NamedTuple):
    """Steps, done one after another; the last is END. `position` is the cell that counts them."""

    position: int
    steps: list[Step]


@dataclass(frozen=True)
class Fault:
    """What went wrong, and the interleaving that leads to it."""

    kind: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.kind, *(f"{i:4}. {s}" for i, s in enumerate(self.steps, 1))])


@dataclass(frozen=True)
class Result:
    """The number of different states reached, and the first fault, if there is one.

    A fault's kind is "torn read" (during a write), "stale read" (of an older value), "overwritten
    read" (of a newer one), "flag goes back", "false mismatch" (a CHECK failed) or "deadlock".
    """

    states: int
    fault: Fault | None


class _StepError(Exception):
    """Raised by the step that is at fault; its argument is the kind."""


def int32(value: int) -> int:
    """`value` wrapped into the range of int32."""
    return (value + 2**31) % 2**32 - 2**31


@dataclass
class System:
    """Programs and the cells they share. Cells have names and are made when first asked for."""

    programs: list[Program] = field(default_factory=list)
    initial: list[int] = field(default_factory=list)
    names: dict[tuple[object, ...], int] = field(default_factory=dict)

    def cell(self, *name: object, initial: int = 0) -> int:
        """The index of the cell of this name."""
        if name not in self.names:
            self.names[name] = len(self.initial)
            self.initial.append(initial)
        return self.names[name]

    def explore(self, *, reduce: bool = False) -> Result:
        """Go through all interleavings, up to the first fault."""
        eager = self._eager() if reduce else None
        first = tuple(self.initial)
        queue = [first]
        reached_from: dict[tuple[int, ...], tuple[tuple[int, ...], Program] | None] = {first: None}

        def way_to(state: tuple[int, ...]) -> list[Program]:
            moves = []
            while (before := reached_from[state]) is not None:
                state = before[0]
                moves.append(before[1])
            return moves[::-1]

        for state in queue:  # grows as it is walked
            stuck = True
            for program in self.programs:
                after = list(state)
                try:
                    if not _advance(after, program):
                        continue
                    if eager is not None:
                        _settle(after, eager)
                except _StepError as found:
                    texts = self._replay([*way_to(state), program], eager)
                    return Result(len(reached_from), Fault(found.args[0], tuple(texts)))
                stuck = False
                reached = tuple(after)
                if reached not in reached_from:
                    reached_from[reached] = state, program
                    queue.append(reached)
            if stuck:
                waits = [_text(state, p) for p in self.programs if _next(state, p).op != END]
                if waits:
                    texts = self._replay(way_to(state), eager)
                    texts += [f"{text}: for ever" for text in waits]
                    return Result(len(reached_from), Fault("deadlock", tuple(texts)))
        return Result(len(reached_from), None)

    def _eager(self) -> list[tuple[Program, list[bool]]]:
        """For each program, which of its steps may be done as soon as they can be."""
        raisers: dict[int, set[int]] = {}
        plain = set()
        for position, steps in self.programs:
            for step in steps:
                if step.op in (SET, ADD):
                    raisers.setdefault(step.cell, set()).add(position)
                elif step.op == PLAIN_WAIT:
                    plain.add(step.cell)

        def may(step: Step) -> bool:
            if step.op in (SET, ADD):
                return len(raisers[step.cell]) == 1 and step.cell not in plain
            return step.op in (WAIT, JOIN)

        return [(program, [may(step) for step in program.steps]) for program in self.programs]

    def _replay(
        self, moves: list[Program], eager: list[tuple[Program, list[bool]]] | None
    ) -> list[str]:
        """The texts of all the steps of a run, the one at fault included."""
        state, texts = list(self.initial), []
        try:
            for program in moves:
                texts.append(_text(state, program))
                _advance(state, program)
                if eager is not None:
                    _settle(state, eager, texts)
        except _StepError:
            pass  # the run that is told ends here
        return texts


def _next(state: list[int] | tuple[int, ...], program: Program) -> Step:
    return program.steps[state[program.position]]


def _text(state: list[int] | tuple[int, ...], program: Program) -> str:
    """A program's next step in words, with what it sees."""
    step = _next(state, program)
    if step.op in (WAIT, PLAIN_WAIT, READ, CHECK):
        seen = state[step.cell]
        return f"{step.text}, sees {'half of it' if seen == TORN else seen}"
    return step.text


def _advance(state: list[int], program: Program) -> bool:
    """Do a program's next step, in place; False if it has to wait or has ended."""
    position, steps = program
    op, cell, value, _, skip, others = steps[state[position]]
    if op == WAIT:
        if int32(state[cell] - value) < 0:
            return False
    elif op == SET or op == ADD:
        new = value if op == SET else int32(state[cell] + value)
        if int32(new - state[cell]) < 0:
            raise _StepError("flag goes back")
        state[cell] = new
    elif op == STORE:
        state[cell] = value
    elif op == READ:
        seen = state[cell]
        if seen != value:
            old_or_new = "stale read" if seen < value else "overwritten read"
            raise _StepError("torn read" if seen == TORN else old_or_new)
    elif op == JOIN:
        if any(state[other] < end for other, end in others):
            return False
    elif op == COUNT:
        state[cell] += 1
        if state[cell] != value:
            state[position] += skip
    elif op == LOOK:
        if state[cell] != value:
            state[position] += skip
    elif op == COPY:
        state[cell] = state[value]
    elif op == CHECK:
        if state[cell] != value:
            raise _StepError("false mismatch")
    elif op == PLAIN_WAIT:
        if state[cell] < value:
            return False
    else:
        return False
    state[position] += 1
    return True


def _settle(
    state: list[int], eager: list[tuple[Program, list[bool]]], texts: list[str] | None = None
) -> None:
    """Do all eager steps, in place, until none can be done; note their texts."""
    moved = True
    while moved:
        moved = False
        for program, may in eager:
            while may[state[program.position]]:
                text = _text(state, program) if texts is not None else ""
                if not _advance(state, program):
                    break
                moved = True
                if texts is not None:
                    texts.append(text)
