"""Machine code as instructions and basic blocks: what precedes what, and which loops there are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: with its suffixes, without operands.
        text: the whole of it, for messages.
        tags: what it does, in the words of both ``sass`` and ``gcn``: matrix, copy, commit, load,
            store, atomic, strong, acquire, release, fence, barrier, bulk-store, spill, pending.
        size: bytes a thread loads or stores.
        scope: of an atomic, a strong access or a fence: "cta", "gpu", "sys", or "".
        number: of a wait for copies, the groups that may be left under way.
        targets: labels that it may jump to.
        ends: control never goes on to the next instruction.
        place: (file, line) of the source, the innermost of inlined calls.
    """

    opcode: str
    text: str
    tags: frozenset[str] = frozenset()
    size: int = 0
    scope: str = ""
    number: int = 0
    targets: tuple[str, ...] = ()
    ends: bool = False
    place: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        file, line = self.place
        return f"{self.text} ({file}:{line})" if file else self.text


@dataclass
class Block:
    """Instructions ``first`` to ``last`` (exclusive), entered at the top, left at the end."""

    first: int
    last: int
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop without a loop of the same kind in it: block numbers, the header first."""

    header: int
    blocks: frozenset[int]


class Program:
    """A kernel's instructions with the flow of control between them."""

    def __init__(self, instructions: list[Instruction], labels: dict[str, int]) -> None:
        self.instructions = instructions
        self.labels = labels

    @cached_property
    def blocks(self) -> list[Block]:
        code = self.instructions
        leaders = {0, *(place for place in self.labels.values() if place < len(code))}
        for index, instruction in enumerate(code):
            if (instruction.targets or instruction.ends) and index + 1 < len(code):
                leaders.add(index + 1)
        starts = sorted(leaders)
        blocks = [
            Block(first, last) for first, last in zip(starts, [*starts[1:], len(code)], strict=True)
        ]
        number = {block.first: at for at, block in enumerate(blocks)}
        for at, block in enumerate(blocks):
            last = code[block.last - 1]
            follows = [self.labels[target] for target in last.targets if target in self.labels]
            if not last.ends:
                follows.append(block.last)
            for place in dict.fromkeys(follows):
                if place in number:
                    block.successors.append(number[place])
                    blocks[number[place]].predecessors.append(at)
        return blocks

    @cached_property
    def reachable(self) -> frozenset[int]:
        """Blocks that control can come to (after the end there is often an endless jump)."""
        seen, waiting = {0}, [0]
        while waiting:
            for follower in self.blocks[waiting.pop()].successors:
                if follower not in seen:
                    seen.add(follower)
                    waiting.append(follower)
        return frozenset(seen)

    def of(self, blocks: frozenset[int]) -> Iterator[Instruction]:
        """The instructions of some blocks, in their order in memory."""
        for at in sorted(blocks):
            yield from self.instructions[self.blocks[at].first : self.blocks[at].last]

    def tagged(self, *tags: str) -> list[int]:
        """Indices of the reachable instructions that have all these tags."""
        wanted = frozenset(tags)
        return [
            index
            for at in sorted(self.reachable)
            for index in range(self.blocks[at].first, self.blocks[at].last)
            if wanted <= self.instructions[index].tags
        ]

    def before(
        self, index: int, stop: Callable[[Instruction], bool], find: Callable[[Instruction], bool]
    ) -> list[int]:
        """What ``find`` finds going backwards from ``index`` on every path, up to ``stop``."""
        return self._walk(index, stop, find, forward=False)[0]

    def nearest_before(self, index: int, what: Callable[[Instruction], bool]) -> list[int]:
        """The last instruction of a kind before ``index``, on every path that has one."""
        return self._walk(index, what, lambda _: False, forward=False)[1]

    def after(
        self, index: int, stop: Callable[[Instruction], bool], find: Callable[[Instruction], bool]
    ) -> list[int]:
        """What ``find`` finds going on from ``index`` on every path, up to ``stop``."""
        return self._walk(index, stop, find, forward=True)[0]

    def _walk(
        self,
        index: int,
        stop: Callable[[Instruction], bool],
        find: Callable[[Instruction], bool],
        forward: bool,
    ) -> tuple[list[int], list[int]]:
        """What was found, and where the walk was stopped."""
        home = next(at for at, block in enumerate(self.blocks) if block.first <= index < block.last)
        found: set[int] = set()
        stopped: set[int] = set()

        def passes(indices: range) -> bool:
            """Look at instructions in turn; whether none of them stopped the walk."""
            for at in indices:
                if stop(self.instructions[at]):
                    stopped.add(at)
                    return False
                if find(self.instructions[at]):
                    found.add(at)
            return True

        def inside(block: Block) -> range:
            ends = (block.first, block.last)
            return range(*ends) if forward else range(ends[1] - 1, ends[0] - 1, -1)

        block = self.blocks[home]
        rest = range(index + 1, block.last) if forward else range(index - 1, block.first - 1, -1)
        waiting = [home] if passes(rest) else []
        seen: set[int] = set()
        while waiting:
            block = self.blocks[waiting.pop()]
            for at in block.successors if forward else block.predecessors:
                if at in self.reachable and at not in seen:
                    seen.add(at)
                    if passes(inside(self.blocks[at])):
                        waiting.append(at)
        return sorted(found), sorted(stopped)

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """For every reachable block, the blocks that control must have passed to come to it."""
        everything = self.reachable
        result = {at: everything for at in everything}
        result[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for at in sorted(everything - {0}):
                above = [result[p] for p in self.blocks[at].predecessors if p in everything]
                new = frozenset.intersection(*above) | {at}
                if new != result[at]:
                    result[at], changed = new, True
        return result

    def loops(self) -> list[Loop]:
        """All natural loops, those with the same header as one."""
        bodies: dict[int, set[int]] = {}
        for at in self.reachable:
            for header in self.blocks[at].successors:
                if header in self.dominators[at]:
                    body = bodies.setdefault(header, {header})
                    waiting = [at]
                    while waiting:
                        block = waiting.pop()
                        if block not in body:
                            body.add(block)
                            waiting += [
                                p for p in self.blocks[block].predecessors if p in self.reachable
                            ]
        return [Loop(header, frozenset(bodies[header])) for header in sorted(bodies)]

    def innermost(self, tag: str) -> list[Loop]:
        """The loops that contain an instruction with ``tag`` and no smaller loop that does."""
        having = [loop for loop in self.loops() if any(tag in i.tags for i in self.of(loop.blocks))]
        return [loop for loop in having if not any(other.blocks < loop.blocks for other in having)]

    def hot_path(self, loop: Loop, tag: str) -> list[int]:
        """The shortest way once round a loop through all its blocks that have ``tag``: indices.

        Such blocks are passed in their order in memory. Detours (a spin, a thread's private
        branch without the tag) are left out.
        """
        stations = [
            at for at in sorted(loop.blocks) if any(tag in i.tags for i in self.of(frozenset({at})))
        ]
        if loop.header in stations:  # the way begins there
            stations.remove(loop.header)
        path: list[int] = [loop.header]
        for station in [*stations, loop.header]:
            path += self._shortest(path[-1], station, loop.blocks)
        path.pop()  # the header again
        return [
            index for at in path for index in range(self.blocks[at].first, self.blocks[at].last)
        ]

    def _shortest(self, start: int, goal: int, within: frozenset[int]) -> list[int]:
        """Block numbers after ``start`` up to ``goal`` with the fewest instructions."""
        queue: list[tuple[int, int, list[int]]] = [(0, start, [])]
        done: set[int] = set()
        while queue:
            length, at, path = heapq.heappop(queue)
            if path and at == goal:
                return path
            if at in done:
                continue
            if path:
                done.add(at)
            for follower in self.blocks[at].successors:
                if follower in within and follower not in done:
                    size = self.blocks[follower].last - self.blocks[follower].first
                    heapq.heappush(queue, (length + size, follower, [*path, follower]))
        raise ValueError(f"no way from block {start} to {goal}")
