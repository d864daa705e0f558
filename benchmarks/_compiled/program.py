"""Machine code as a graph: instructions, basic blocks, loops.

A ``Program`` is what both assemblers' texts are read into (``sass.py``, ``gcn.py``); the checks ask
it for paths and loops and know nothing of syntax. Its nodes are basic blocks, its edges what
control may do next; loops are natural loops, found by dominators.

Worked example: the instructions ``a; L: b; if p go to L; c`` are the blocks [a], [b, if], [c], with
edges 0 → 1, 1 → 1, 1 → 2. The edge 1 → 1 is the one back edge (its target dominates its source),
so the one loop has header 1 and body {1}; the shortest cycle through b has two instructions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property


class ParseError(ValueError):
    """The text is not what the reader of its kind knows."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        name: the mnemonic with all its modifiers, as ``LDG.E.STRONG.SYS``.
        operands: the rest of the line.
        guard: the predicate that may suppress it, as ``!P0``; empty if there is none.
        targets: labels that it may continue at.
        falls_through: whether it may continue at the next instruction.
        line: where it stands in the text, from 1.
    """

    name: str
    operands: str = ""
    guard: str = ""
    targets: tuple[str, ...] = ()
    falls_through: bool = True
    line: int = 0

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.name} {self.operands}".rstrip()


#: Chooses instructions.
Wanted = Callable[[Instruction], bool]


@dataclass(frozen=True)
class Loop:
    """A natural loop: every way into ``body`` (block numbers) leads through ``header``."""

    header: int
    body: frozenset[int]


@dataclass
class Program:
    """The code of one kernel.

    Attributes:
        instructions: in the order of the text.
        labels: the number of the instruction that each label stands before.

    Raises:
        ParseError: an instruction goes to a label that is not there, or past the end.
    """

    instructions: Sequence[Instruction]
    labels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for instruction in self.instructions:
            for target in instruction.targets:
                if self.labels.get(target, len(self.instructions)) >= len(self.instructions):
                    raise ParseError(f"line {instruction.line}: no instruction at label {target}")
        if not self.instructions or self.instructions[-1].falls_through:
            raise ParseError("the last instruction does not end the program")

    # ---- blocks and edges

    @cached_property
    def blocks(self) -> list[range]:
        """The basic blocks as ranges of instruction numbers, the entry first."""
        starts = {0}
        for number, instruction in enumerate(self.instructions):
            starts |= {self.labels[target] for target in instruction.targets}
            if instruction.targets or not instruction.falls_through:
                starts.add(number + 1)
        bounds = sorted(start for start in starts if start < len(self.instructions))
        return [
            range(start, stop)
            for start, stop in zip(bounds, [*bounds[1:], len(self.instructions)], strict=True)
        ]

    @cached_property
    def block_of(self) -> list[int]:
        """The block of each instruction."""
        return [number for number, block in enumerate(self.blocks) for _ in block]

    @cached_property
    def successors(self) -> list[list[int]]:
        """For each block the blocks that may follow it."""
        following = []
        for number, block in enumerate(self.blocks):
            last = self.instructions[block[-1]]
            nexts = {self.block_of[self.labels[target]] for target in last.targets}
            if last.falls_through:
                nexts.add(number + 1)
            following.append(sorted(nexts))
        return following

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """For each block the blocks that it may follow."""
        before: list[list[int]] = [[] for _ in self.blocks]
        for number, nexts in enumerate(self.successors):
            for following in nexts:
                before[following].append(number)
        return before

    # ---- instructions

    def where(self, wanted: Wanted) -> list[int]:
        """The numbers of the instructions that ``wanted`` holds of and that can be reached."""
        reached = self.dominators
        return [
            number
            for number, instruction in enumerate(self.instructions)
            if self.block_of[number] in reached and wanted(instruction)
        ]

    def reached(
        self,
        starts: Iterable[int],
        *,
        until: Sequence[Wanted] = (),
        forwards_only: bool = False,
    ) -> set[int]:
        """The instructions that control may come to after one of ``starts``.

        Args:
            until: a path ends once it has passed such instructions, in this order (others may lie
                between). A guarded instruction may be suppressed and ends no path.
            forwards_only: without the back edges of loops, so within one iteration.
        """
        found: set[int] = set()
        queue = [(self.block_of[start], start + 1, 0) for start in starts]
        entered: set[tuple[int, int]] = set()
        while queue:
            block, first, passed = queue.pop()
            for number in range(first, self.blocks[block].stop):
                found.add(number)
                instruction = self.instructions[number]
                if passed < len(until) and until[passed](instruction) and not instruction.guard:
                    passed += 1
                    if passed == len(until):
                        break
            else:
                for following in self.successors[block]:
                    if forwards_only and (block, following) in self.back_edges:
                        continue
                    if (following, passed) not in entered:
                        entered.add((following, passed))
                        queue.append((following, self.blocks[following].start, passed))
        return found

    # ---- loops

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """For each block that can be reached the blocks that every way to it passes, and itself."""
        order = list(self._reverse_postorder())
        everything = set(order)
        found = {block: everything for block in order}
        found[0] = {0}
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                ways = [found[before] for before in self.predecessors[block] if before in found]
                new = set.intersection(*ways) | {block}
                changed |= new != found[block]
                found[block] = new
        return found

    def _reverse_postorder(self) -> Iterator[int]:
        done: list[int] = []
        seen = {0}
        stack = [(0, iter(self.successors[0]))]
        while stack:
            block, nexts = stack[-1]
            following = next((n for n in nexts if n not in seen), None)
            if following is None:
                done.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        return reversed(done)

    @cached_property
    def back_edges(self) -> set[tuple[int, int]]:
        """Edges to a block that dominates their source: each closes a loop."""
        return {
            (block, following)
            for block, above in self.dominators.items()
            for following in self.successors[block]
            if following in above
        }

    @cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, one for each header."""
        bodies: dict[int, set[int]] = {}
        for source, header in self.back_edges:
            body = bodies.setdefault(header, {header})
            queue = [source]
            while queue:
                block = queue.pop()
                if block not in body:
                    body.add(block)
                    queue += [b for b in self.predecessors[block] if b in self.dominators]
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    def inner_loops(self, wanted: Wanted) -> list[Loop]:
        """The innermost loops that have such an instruction."""
        blocks = {self.block_of[number] for number in self.where(wanted)}
        holding = [loop for loop in self.loops if loop.body & blocks]
        return [
            loop for loop in holding if not any(other.body < loop.body for other in holding)
        ]

    def instructions_of(self, blocks: Iterable[int]) -> list[Instruction]:
        """What the blocks consist of."""
        return [self.instructions[number] for block in blocks for number in self.blocks[block]]

    def shortest_cycle(self, loop: Loop, wanted: Wanted) -> list[int]:
        """The blocks of the shortest way round ``loop`` through all its ``wanted`` instructions.

        The length is counted in instructions. The header comes first. This is the hot path of a
        loop whose other blocks are waits that rarely happen.
        """
        musts = sorted(
            {self.block_of[n] for n in self.where(wanted) if self.block_of[n] in loop.body}
        )
        bit = {block: 1 << place for place, block in enumerate(musts)}
        every = (1 << len(musts)) - 1
        start, end = (loop.header, bit.get(loop.header, 0)), (-1, every)
        best = {start: 0}
        came_from: dict[tuple[int, int], tuple[int, int]] = {}
        queue = [(0, start)]
        while queue:
            length, state = heapq.heappop(queue)
            if state == end:
                path = [came_from[end]]
                while path[-1] in came_from:
                    path.append(came_from[path[-1]])
                return [block for block, _ in reversed(path)]
            if length > best[state]:
                continue
            block, seen = state
            length += len(self.blocks[block])
            for following in self.successors[block]:
                if following != loop.header:
                    if following not in loop.body:
                        continue
                    target = (following, seen | bit.get(following, 0))
                elif seen == every:
                    target = end
                else:
                    continue
                if length < best.get(target, length + 1):
                    best[target] = length
                    came_from[target] = state
                    heapq.heappush(queue, (length, target))
        raise ValueError("no way round the loop passes all of the instructions")
