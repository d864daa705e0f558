"""An exhaustive check of the signalling protocol on a small model of it.

`explore` runs every interleaving of a few ranks that make a few calls, and reports the first one
in which a rank reads data that is not its call's (torn, stale or overwritten), in which a flag goes
back, or in which ranks wait for ever. `Mutation` names the mistakes it is known to find. The model
is the protocol alone, as in `docs/protocol.md`; the race checker holds the code to it.

**State.** One tuple of integers: the position of every program, the flags `ready` and `consumed`,
and each shared buffer as the number of the call that filled it. A write is two steps, the buffer
being `TORN` in between. A read is one step, which is enough: if a read can overlap a write at
all, some interleaving has its one step between the two of the write. A rank's epochs need no
cell, for only the rank itself sees them and each is a function of its position. Steps take effect
in order, so memory order is not modelled: it is what release and acquire are for.

**Reduction.** With `reduce=True` a wait that is satisfied, and the raising of a flag that only one
program raises, are done at once in one fixed order instead of in all orders. That loses nothing.
Flags only grow (going back is itself reported), so a satisfied wait stays so and raising a flag
blocks nobody: such a step can be moved ahead of the other programs' steps in any run without
changing what they do or see. Adding one at the end of a run that has reached a fault leaves the
fault where it was; a deadlock has none to add. Nor can a step be put off for ever, since positions
only grow. Reads, writes and counters are still done in every order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

TORN = -1
SLOTS = 2


class Mutation(Enum):
    """A mistake put into the protocol, for `explore` to find."""

    NO_CONSUMED_WAIT = "the writer does not wait for the readers of the slot's last use"
    REUSE_ONE_EARLY = "the writer waits for consumed >= e - 2"
    SIGNAL_BEFORE_STORE = "ready is raised before the data is stored"
    NO_READY_WAIT = "the reader does not wait for ready"
    CONSUMED_BEFORE_READ = "consumed is raised before the data is read"
    COUNTED_FLAGS = "ready is incremented instead of set to the epoch"
    EMPTY_NOT_SIGNALLED = "a chunk with no rows is not signalled"
    UNREAD_NOT_CONSUMED = "consumed is not raised on a rank of which nothing was read"
    PLAIN_COMPARISON = "flag >= wanted instead of flag - wanted >= 0 in int32"
    SHARED_FLAG = "two workspaces share their ready flags"
    FIRST_PRODUCER_SIGNALS = "the first of a chunk's producers to be done raises ready"
    FIRST_READER_RELEASES = "the first of a source's readers to be done raises consumed"
    IN_PLACE_ENDS_EARLY = "a call on the caller's own tensor does not wait for its readers"
    BOARD_CHANGED_IN_PLACE = "a board's number is not withdrawn while the board is rewritten"
    BOARD_LOOKED_AT_ONCE = "a board's number is not looked at again after the board was read"


@dataclass(frozen=True)
class Call:
    """One call, as every rank makes it.

    sources: the ranks that write (None: all, as in all-gather and reduce-scatter; one: broadcast).
    empty: pairs (source, chunk) that have no rows. in_place: the data is the caller's own symmetric
    tensor, which the caller overwrites as soon as the call has ended (pull only).
    """

    slot: int
    chunks: int = 1
    in_place: bool = False
    sources: tuple[int, ...] | None = None
    empty: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is explored.

    pull: False: a writer has one buffer per reader and waits for that reader alone (reduce-scatter
        and everything pushed); True: it has one buffer, which all the others read (all-gather).
    channels: operations in flight at once on each rank, each with a workspace of its own.
    programs: None: a rank is one thread, as in the host engine. (p, r): a rank's call is a launch
        of programs that run in any order, p to make a chunk and r to read a source (its own
        included); a launch starts when the one before it has ended.
    epoch: value of all epochs and flags before the first call; they wrap in int32.
    boards: ranks also write their board in each call and compare the peers' before using data.
    """

    ranks: int
    calls: tuple[Call, ...]
    pull: bool = True
    channels: int = 1
    programs: tuple[int, int] | None = None
    epoch: int = 0
    boards: bool = False
    mutation: Mutation | None = None


@dataclass(frozen=True)
class Fault:
    """The first fault found: its kind, and the shortest interleaving that leads to it."""

    kind: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.kind, *(f"{i:4}. {s}" for i, s in enumerate(self.steps, 1))])


@dataclass(frozen=True)
class Result:
    """Number of different states reached, and the fault, if there is one."""

    states: int
    fault: Fault | None


def slot_sequences(longest: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of slots of 1 to `longest` calls: a captured graph may freeze any of them."""
    for length in range(1, longest + 1):
        yield from product(range(SLOTS), repeat=length)


def explore(setting: Setting, *, reduce: bool = False) -> Result:
    """Run all interleavings of `setting`, breadth first, up to the first fault."""
    model = _Model(setting)
    first = list(model.initial)
    if reduce:
        model.settle(first)
    queue = [tuple(first)]
    reached_from: dict[tuple[int, ...], tuple[tuple[int, ...], int] | None] = {queue[0]: None}
    threads = range(len(model.threads))

    def fault(kind: str, state: tuple[int, ...], last: list[str]) -> Result:
        moves, before = [], reached_from[state]
        while before is not None:
            moves.append(before[1])
            before = reached_from[before[0]]
        steps = model.replay(moves[::-1], reduce=reduce)
        return Result(len(reached_from), Fault(kind, (*steps, *last)))

    for state in queue:  # grows as it is walked
        stuck = True
        for thread in threads:
            after = list(state)
            try:
                if not model.advance(after, thread):
                    continue
            except _FaultFound as found:
                return fault(found.kind, state, [model.text(state, thread)])
            stuck = False
            if reduce:
                model.settle(after)
            reached = tuple(after)
            if reached not in reached_from:
                reached_from[reached] = state, thread
                queue.append(reached)
        if stuck:
            blocked = [model.text(state, t) for t in threads if not model.ended(state, t)]
            if blocked:
                return fault("deadlock", state, [f"{text} (for ever)" for text in blocked])
    return Result(len(reached_from), None)


class _FaultFound(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


# What a step does with its cell of the state and its value.
(
    WAIT,  # go on when the flag has reached the value
    JOIN,  # go on when the other programs of the launch have ended
    SET,  # raise a flag to the value
    ADD,  # the mistaken way of raising a flag
    STORE,  # write the cell
    READ,  # the cell must hold the value
    COUNT,  # add one; go on if that makes the value, else pass over `skip` steps
    LOOK,  # go on if the cell holds the value, else pass over `skip` steps
    COPY,  # write the cell; the value says from where
    CHECK,  # as READ, for a board
    END,
) = range(11)


class Step(NamedTuple):
    kind: int
    cell: int
    value: int
    text: str
    skip: int = 0
    others: tuple[tuple[int, int], ...] = ()  # JOIN: a program's position, and where it has ended


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


class _Model:
    """The programs of all ranks, and what a step does to a state."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cells: dict[tuple[object, ...], int] = {}
        self.initial: list[int] = []
        self.threads: list[tuple[int, list[Step]]] = []  # cell of the position, program
        for rank, channel in product(range(setting.ranks), range(setting.channels)):
            self._add_rank(rank, channel)
        raised: dict[int, set[int]] = {}
        for pc, program in self.threads:
            for step in program:
                if step.kind in (SET, ADD):
                    raised.setdefault(step.cell, set()).add(pc)
        self.plain = setting.mutation is Mutation.PLAIN_COMPARISON  # then waits can be undone
        self.eager = [
            [
                step.kind == JOIN
                or (step.kind == WAIT and not self.plain)
                or (step.kind in (SET, ADD) and len(raised[step.cell]) == 1)
                for step in program
            ]
            for _, program in self.threads
        ]

    def cell(self, *name: object, initial: int = 0) -> int:
        if name not in self.cells:
            self.cells[name] = len(self.initial)
            self.initial.append(initial)
        return self.cells[name]

    def _add_rank(self, rank: int, channel: int) -> None:
        """Lay out the calls of one rank on one channel as programs."""
        epochs = [self.setting.epoch] * SLOTS
        calls = []
        for number, call in enumerate(self.setting.calls, 1):
            epochs[call.slot] = _int32(epochs[call.slot] + 1)
            calls.append(_CallSteps(self, rank, channel, number, call, epochs[call.slot]).roles)
        programs: dict[object, list[Step]] = {role: [] for call in calls for role in call}
        if self.setting.programs is None:
            programs = {None: [step for call in calls for part in call.values() for step in part]}
        else:
            pcs = {role: self.cell("pc", rank, channel, role) for role in programs}
            for number, call in enumerate(calls, 1):
                for role, steps in call.items():
                    programs[role] += steps
                ends = {role: len(program) for role, program in programs.items()}
                for role, program in programs.items():
                    others = tuple((pcs[o], end) for o, end in ends.items() if o != role)
                    text = f"rank {rank}: call {number}: launch ends"
                    program.append(Step(JOIN, 0, 0, text, others=others))
        for role, program in programs.items():
            program.append(Step(END, 0, 0, ""))
            self.threads.append((self.cell("pc", rank, channel, role), program))

    def advance(self, state: list[int], thread: int) -> bool:
        """Do the next step of a thread, in place; False if it has to wait or has ended."""
        pc, program = self.threads[thread]
        kind, cell, value, _, skip, others = program[state[pc]]
        if kind == WAIT:
            flag = state[cell]
            if flag < value if self.plain else _int32(flag - value) < 0:
                return False
        elif kind == SET or kind == ADD:
            new = value if kind == SET else _int32(state[cell] + 1)
            if _int32(new - state[cell]) < 0:
                raise _FaultFound("flag goes back")
            state[cell] = new
        elif kind == STORE:
            state[cell] = value
        elif kind == READ:
            seen = state[cell]
            if seen != value:
                old_or_new = "stale read" if seen < value else "overwritten read"
                raise _FaultFound("torn read" if seen == TORN else old_or_new)
        elif kind == JOIN:
            if any(state[other] < end for other, end in others):
                return False
        elif kind == COUNT:
            state[cell] += 1
            if state[cell] != value:
                state[pc] += skip
        elif kind == LOOK:
            if state[cell] != value:
                state[pc] += skip
        elif kind == COPY:
            state[cell] = state[value]
        elif kind == CHECK:
            if state[cell] != value:
                raise _FaultFound("false mismatch")
        else:
            return False
        state[pc] += 1
        return True

    def settle(self, state: list[int], record: list[str] | None = None) -> None:
        """Do all steps whose order cannot matter, in place, until none is left."""
        moved = True
        while moved:
            moved = False
            for thread, (pc, _) in enumerate(self.threads):
                eager = self.eager[thread]
                while eager[state[pc]]:
                    text = self.text(state, thread) if record is not None else ""
                    if not self.advance(state, thread):
                        break
                    moved = True
                    if record is not None:
                        record.append(text)

    def ended(self, state: tuple[int, ...], thread: int) -> bool:
        pc, program = self.threads[thread]
        return program[state[pc]].kind == END

    def text(self, state: tuple[int, ...] | list[int], thread: int) -> str:
        """The next step of a thread in words, with what it sees."""
        pc, program = self.threads[thread]
        step = program[state[pc]]
        if step.kind in (WAIT, READ, CHECK):
            seen = state[step.cell]
            return f"{step.text}, sees {'data being written' if seen == TORN else seen}"
        return step.text

    def replay(self, moves: list[int], *, reduce: bool) -> list[str]:
        """The texts of all the steps of a run."""
        state, texts = list(self.initial), []
        if reduce:
            self.settle(state, texts)
        for thread in moves:
            texts.append(self.text(state, thread))
            self.advance(state, thread)
            if reduce:
                self.settle(state, texts)
        return texts


class _CallSteps:
    """The steps of one rank in one call, by program; the numbers are those of protocol.md.

    Roles are in the order in which the host engine, which has one thread, goes through them.
    """

    def __init__(
        self, model: _Model, rank: int, channel: int, number: int, call: Call, epoch: int
    ) -> None:
        self.model, self.rank, self.channel = model, rank, channel
        self.number, self.call, self.epoch = number, call, epoch
        self.setting = model.setting
        self.mutation = self.setting.mutation
        ranks = self.setting.ranks
        self.peers = [(rank + i) % ranks for i in range(1, ranks)]
        self.sources = range(ranks) if call.sources is None else call.sources
        self.producers, self.readers = self.setting.programs or (1, 1)
        # A thread need not read its own data through flags; programs of one launch must.
        self.myself = [rank] if self.setting.programs and self.setting.pull else []
        self.roles: dict[tuple[object, ...], list[Step]] = {}
        if self.setting.boards:
            self.roles["board",] = self._write_board()
        if rank in self.sources:
            audience = self.peers + self.myself
            for readers in [audience] if self.setting.pull else [[q] for q in audience]:
                self._write(readers)
        for source in self.peers + self.myself:
            self._read(source)
        if call.in_place and rank in self.sources and not self._is(Mutation.IN_PLACE_ENDS_EARLY):
            self.roles["end",] = [self._wait_consumed(q, epoch) for q in self.peers]

    def _is(self, *mutations: Mutation) -> bool:
        return self.mutation in mutations

    def _step(self, kind: int, cell: int, value: int, text: str, skip: int = 0) -> Step:
        channel = f" channel {self.channel}" if self.setting.channels > 1 else ""
        where = f"call {self.number} (slot {self.call.slot}, epoch {self.epoch})"
        return Step(kind, cell, value, f"rank {self.rank}{channel}: {where}: {text}", skip)

    def _data(self, source: int, reader: int, chunk: int, part: int) -> tuple[int, str]:
        place = "tensor" if self.call.in_place else f"slot {self.call.slot}"
        name = f"chunk {chunk}" + (f" part {part}" if self.producers > 1 else "")
        name += f" of rank {source} in its {place}"
        if not self.setting.pull:
            name += f" for rank {reader}"
        return self.model.cell("data", self.channel, name), name

    def _wait_consumed(self, reader: int, wanted: int) -> Step:
        cell = self._flag("consumed", self.rank, reader)
        return self._step(WAIT, cell, wanted, f"wait for consumed of rank {reader} >= {wanted}")

    def _flag(self, *name: object) -> int:
        shared = name[0] == "ready" and self._is(Mutation.SHARED_FLAG)
        workspace = "shared" if shared else self.channel
        return self.model.cell(workspace, self.call.slot, *name, initial=self.setting.epoch)

    def _has_rows(self, source: int, chunk: int) -> bool:
        return (source, chunk) not in self.call.empty

    def _last_of(self, count: int, *name: object, then: list[Step]) -> list[Step]:
        """Of `count` programs, the one that is done last clears the counter and goes on."""
        if count == 1:
            return then
        cell = self.model.cell("counter", self.rank, self.channel, *name)
        first = Mutation.FIRST_PRODUCER_SIGNALS if name[0] == "in" else Mutation.FIRST_READER_RELEASES
        last = 1 if self._is(first) else count
        return [
            self._step(COUNT, cell, last, f"count {name[0]}, wanted {last}", skip=1 + len(then)),
            self._step(STORE, cell, 0, "clear the counter"),
            *then,
        ]

    def _write(self, readers: list[int]) -> None:
        """Steps 1 and 2, for one buffer and those who read it."""
        wanted = _int32(self.epoch - (2 if self._is(Mutation.REUSE_ONE_EARLY) else 1))
        waits = [self._wait_consumed(q, wanted) for q in readers if q != self.rank]
        if self.call.in_place or self._is(Mutation.NO_CONSUMED_WAIT):
            waits = []
        for chunk, part in product(range(self.call.chunks), range(self.producers)):
            cell, name = self._data(self.rank, readers[0], chunk, part)
            write = [
                self._step(STORE, cell, TORN, f"begin to write {name}"),
                self._step(STORE, cell, self.number, f"end writing {name}"),
            ]
            kind = ADD if self._is(Mutation.COUNTED_FLAGS) else SET
            signals = [
                self._step(kind, self._flag("ready", q, self.rank, chunk), self.epoch,
                           f"raise ready of chunk {chunk} on rank {q}")
                for q in readers
            ]
            if not self._has_rows(self.rank, chunk):
                write = []
                signals = [] if self._is(Mutation.EMPTY_NOT_SIGNALLED) else signals
            signals = self._last_of(self.producers, "in", readers[0], chunk, then=signals)
            done = signals + write if self._is(Mutation.SIGNAL_BEFORE_STORE) else write + signals
            self.roles["write", readers[0], chunk, part] = waits + done
            if self.setting.programs is None:
                waits = []  # one thread has waited once and for all

    def _read(self, source: int) -> None:
        """Steps 3 and 4, for one source."""
        flag = self._flag("consumed", source, self.rank)
        release = [self._step(SET, flag, self.epoch, f"raise consumed on rank {source}")]
        if source == self.rank:
            release = []  # launches of one rank are ordered
        if source not in self.sources:
            unread = [] if self._is(Mutation.UNREAD_NOT_CONSUMED) else release
            self.roles["read", source, 0] = unread
            return
        for program in range(self.readers if source != self.rank else 1):
            steps = []
            for chunk in range(self.call.chunks):
                ready = self._flag("ready", self.rank, source, chunk)
                text = f"wait for ready of chunk {chunk} of rank {source} >= {self.epoch}"
                wait = self._step(WAIT, ready, self.epoch, text)
                steps += [] if self._is(Mutation.NO_READY_WAIT) else [wait]
                steps += self._compare_boards(source) if self.setting.boards else []
                for part in range(self.producers if self._has_rows(source, chunk) else 0):
                    cell, name = self._data(source, self.rank, chunk, part)
                    steps.append(self._step(READ, cell, self.number, f"read {name}"))
            reads = [i for i, step in enumerate(steps) if step.kind == READ]
            done = self._last_of(self.readers, "out", source, then=release) if release else []
            if not reads and self._is(Mutation.UNREAD_NOT_CONSUMED):
                done = []
            early = reads[-1] if reads and self._is(Mutation.CONSUMED_BEFORE_READ) else len(steps)
            self.roles["read", source, program] = steps[:early] + done + steps[early:]

    def _board(self, rank: int) -> tuple[int, int]:
        """The cells of a rank's board: its number, and what it says (here, the number again)."""
        cell = self.model.cell
        return cell("number", rank, self.channel), cell("says", rank, self.channel)

    def _write_board(self) -> list[Step]:
        number, says = self._board(self.rank)
        withdraw = self._step(STORE, number, TORN, "withdraw the board's number")
        return [
            *([] if self._is(Mutation.BOARD_CHANGED_IN_PLACE) else [withdraw]),
            self._step(STORE, says, self.number, "write the board"),
            self._step(STORE, number, self.number, "write the board's number"),
        ]

    def _compare_boards(self, source: int) -> list[Step]:
        number, says = self._board(source)
        mine = self.model.cell("copy", self.rank, self.channel)
        look = self._step(LOOK, number, self.number, f"look at the number of rank {source}'s board")
        again = [] if self._is(Mutation.BOARD_LOOKED_AT_ONCE) else [look._replace(skip=1)]
        return [
            look._replace(skip=2 + len(again)),
            self._step(COPY, mine, says, f"read rank {source}'s board"),
            *again,
            self._step(CHECK, mine, self.number, f"compare rank {source}'s board"),
        ]
