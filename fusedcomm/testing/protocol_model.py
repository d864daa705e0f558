"""The signalling protocol as a small model, whose every interleaving can be tried.

`check` lets a few ranks make a few calls, step by step as docs/protocol.md numbers them, in every
order the waits allow, and reports the first run in which a rank reads data that is not its call's
(torn, stale or overwritten), a flag goes back, or ranks wait for ever. `Mutation` names mistakes
that it is known to find. It is the protocol alone that is checked here; the race checker holds
the code to it.

Every shared buffer holds the number of the call that filled it. A rank's epochs need no memory:
only the rank itself reads them, and each is a function of how far the rank has come.

>>> check(Setting(ranks=2, calls=(Call(slot=0), Call(slot=0)))).fault is None
True
>>> mistake = Mutation.NO_READY_WAIT
>>> print(check(Setting(ranks=2, calls=(Call(slot=0),), mutation=mistake)).fault)
stale read
   1. rank 0, call 1 (slot 0, epoch 1): await consumed[slot 0][reader 1] >= 0, sees 0
   2. rank 0, call 1 (slot 0, epoch 1): begin to write chunk 0 of rank 0 in slot 0
   3. rank 0, call 1 (slot 0, epoch 1): end writing chunk 0 of rank 0 in slot 0
   4. rank 0, call 1 (slot 0, epoch 1): set ready[slot 0][source 0][chunk 0] = 1 on rank 1
   5. rank 0, call 1 (slot 0, epoch 1): read chunk 0 of rank 1 in slot 0, sees 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product

from fusedcomm.testing import interleavings as il
from fusedcomm.testing.interleavings import Fault, Program, Result, Step, System, int32

__all__ = ["SLOTS", "Call", "Fault", "Mutation", "Result", "Setting", "check", "slot_sequences"]

SLOTS = 2


class Mutation(Enum):
    """A mistake put into the protocol, for `check` to find."""

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
    BOARD_NOT_WITHDRAWN = "a board keeps its old number while it is rewritten"
    BOARD_LOOKED_AT_ONCE = "a board's number is not looked at again after the board was read"


@dataclass(frozen=True)
class Call:
    """One call, as every rank makes it.

    sources: the ranks that write (None: all, as in all-gather and reduce-scatter; one: broadcast).
    empty: pairs (source, chunk) that have no rows.
    in_place: the data is the caller's own symmetric tensor, which the caller overwrites as soon as
        the call has ended (pull only).
    """

    slot: int
    chunks: int = 1
    sources: tuple[int, ...] | None = None
    empty: tuple[tuple[int, int], ...] = ()
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is tried.

    pull: True: a writer has one buffer, which all the others read (all-gather); False: it has one
        for each reader, and waits for that reader alone (reduce-scatter, and all that is pushed).
    channels: operations in flight at once on each rank, each with a workspace of its own.
    programs: None: a rank is one thread, as in the host engine. (p, r): a call is a launch of
        programs that run in any order, p to make a chunk and r to read a peer, and when pulling
        one to read the rank's own data; a launch starts when the one before it has ended.
    epoch: value of all epochs and flags before the first call; they wrap in int32.
    release_last: a rank raises consumed when it has read from all (reductions do so), not source
        by source (without programs only).
    boards: ranks also write their board in each call, and compare their peers' before using data.
    """

    ranks: int
    calls: tuple[Call, ...]
    pull: bool = True
    channels: int = 1
    programs: tuple[int, int] | None = None
    epoch: int = 0
    release_last: bool = False
    boards: bool = False
    mutation: Mutation | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what has no meaning."""
        if self.programs and (self.release_last or self.boards):
            raise ValueError("release_last and boards are for ranks of one thread (programs=None)")
        if not self.pull and any(call.in_place for call in self.calls):
            raise ValueError("in_place needs pull=True: what is pushed lies with its reader")


def slot_sequences(longest: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of slots of 1 to `longest` calls: a captured graph may freeze any of them."""
    for length in range(1, longest + 1):
        yield from product(range(SLOTS), repeat=length)


def check(setting: Setting, *, reduce: bool = False) -> Result:
    """Try all interleavings of `setting`, up to the first fault.

    reduce: leave out orders that cannot matter (see `interleavings`); the answer is the same.
    """
    system = System()
    for rank, channel in product(range(setting.ranks), range(setting.channels)):
        _add_rank(system, setting, rank, channel)
    return system.explore(reduce=reduce)


def _add_rank(system: System, setting: Setting, rank: int, channel: int) -> None:
    """Lay out the calls of one rank on one channel as programs."""
    epochs = [setting.epoch] * SLOTS
    calls = []
    for number, call in enumerate(setting.calls, 1):
        epochs[call.slot] = int32(epochs[call.slot] + 1)
        calls.append(_CallSteps(system, setting, rank, channel, number, epochs[call.slot]).roles)
    if setting.programs is None:
        thread = [step for call in calls for part in call.values() for step in part]
        programs: dict[object, list[Step]] = {"thread": thread}
    else:
        programs = {role: [] for call in calls for role in call}
        positions = {role: system.cell("position", rank, channel, role) for role in programs}
        for number, roles in enumerate(calls, 1):
            for role, steps in roles.items():
                programs[role] += steps
            ends = {role: len(program) for role, program in programs.items()}
            for role, program in programs.items():
                others = tuple((positions[o], end) for o, end in ends.items() if o != role)
                text = f"rank {rank}: call {number}: its launch has ended"
                program.append(Step(il.JOIN, 0, 0, text, others=others))
    for role, program in programs.items():
        program.append(Step(il.END, 0, 0, ""))
        system.programs.append(Program(system.cell("position", rank, channel, role), program))


class _CallSteps:
    """The steps of one rank in one call, by program: `roles`.

    The roles are in the order in which the host engine, which is one thread, goes through them.
    """

    def __init__(
        self, system: System, setting: Setting, rank: int, channel: int, number: int, epoch: int
    ) -> None:
        self.system, self.setting, self.rank, self.channel = system, setting, rank, channel
        self.number, self.epoch, self.call = number, epoch, setting.calls[number - 1]
        ranks = range(setting.ranks)
        peers = [(rank + i) % setting.ranks for i in ranks[1:]]
        sources = ranks if self.call.sources is None else self.call.sources
        self.producers, self.readers = setting.programs or (1, 1)
        # One thread knows when its own data is ready; programs of one launch have to be told.
        own = [rank] if setting.programs and setting.pull else []
        self.roles: dict[object, list[Step]] = {}
        if setting.boards:
            self.roles["board"] = self._write_board()
        if rank in sources:
            for audience in [peers + own] if setting.pull else [[peer] for peer in peers]:
                self._write(audience)
        releases: list[Step] = []
        for source in peers + own:
            if source in sources:
                releases += self._read(source)
            elif not self._mistake(Mutation.UNREAD_NOT_CONSUMED):
                self.roles["read", source, 0] = [self._raise("consumed", source, rank)]
        if releases:
            self.roles["release"] = releases
        early = self._mistake(Mutation.IN_PLACE_ENDS_EARLY)
        if self.call.in_place and rank in sources and not early:
            self.roles["end"] = [self._wait("consumed", rank, q, wanted=epoch) for q in peers]

    def _write(self, audience: list[int]) -> None:
        """Steps 1 and 2, for one buffer and those who read it."""
        wanted = int32(self.epoch - (2 if self._mistake(Mutation.REUSE_ONE_EARLY) else 1))
        waits = [
            self._wait("consumed", self.rank, reader, wanted=wanted)
            for reader in audience
            if reader != self.rank  # launches of one rank are in order
        ]
        if self.call.in_place or self._mistake(Mutation.NO_CONSUMED_WAIT):
            waits = []
        for chunk, part in product(range(self.call.chunks), range(self.producers)):
            signals = [self._raise("ready", reader, self.rank, chunk) for reader in audience]
            write = []
            if (self.rank, chunk) not in self.call.empty:
                cell, name = self._data(self.rank, audience[0], chunk, part)
                write = [
                    self._step(il.STORE, cell, il.TORN, f"begin to write {name}"),
                    self._step(il.STORE, cell, self.number, f"end writing {name}"),
                ]
            elif self._mistake(Mutation.EMPTY_NOT_SIGNALLED):
                signals = []
            wanted = 1 if self._mistake(Mutation.FIRST_PRODUCER_SIGNALS) else self.producers
            signals = self._counted(("in", audience[0], chunk), wanted, self.producers, signals)
            late = self._mistake(Mutation.SIGNAL_BEFORE_STORE)
            steps = signals + write if late else write + signals
            self.roles["write", audience[0], chunk, part] = waits + steps
            if self.setting.programs is None:
                waits = []  # one thread has waited once and for all

    def _read(self, source: int) -> list[Step]:
        """Steps 3 and 4, for one source; returns what is to come when all sources are read."""
        own = source == self.rank
        for program in range(1 if own else self.readers):
            steps = []
            for chunk in range(self.call.chunks):
                if not self._mistake(Mutation.NO_READY_WAIT):
                    wait = self._wait("ready", self.rank, source, chunk, wanted=self.epoch)
                    steps.append(wait)
                if self.setting.boards:
                    steps += self._compare_board(source)
                if (source, chunk) in self.call.empty:
                    continue
                for part in range(self.producers):
                    cell, name = self._data(source, self.rank, chunk, part)
                    steps.append(self._step(il.READ, cell, self.number, f"read {name}"))
            reads = [i for i, step in enumerate(steps) if step.op == il.READ]
            unread = not reads and self._mistake(Mutation.UNREAD_NOT_CONSUMED)
            release = [] if own or unread else [self._raise("consumed", source, self.rank)]
            wanted = 1 if self._mistake(Mutation.FIRST_READER_RELEASES) else self.readers
            release = self._counted(("out", source), wanted, self.readers, release)
            early = reads and self._mistake(Mutation.CONSUMED_BEFORE_READ)
            at = reads[-1] if early else len(steps)
            if self.setting.release_last:
                self.roles["read", source, program] = steps
                return release
            self.roles["read", source, program] = steps[:at] + release + steps[at:]
        return []

    def _counted(
        self, counter: tuple[object, ...], wanted: int, programs: int, then: list[Step]
    ) -> list[Step]:
        """Of several programs, the one that completes the count clears the counter and goes on."""
        if programs == 1 or not then:
            return then
        cell = self.system.cell("counter", self.rank, self.channel, counter)
        count = self._step(il.COUNT, cell, wanted, f"count itself {counter[0]}, up to {wanted}")
        clear = self._step(il.STORE, cell, 0, "clear the counter")
        return [count._replace(skip=1 + len(then)), clear, *then]

    def _write_board(self) -> list[Step]:
        """The number is withdrawn first and comes back last, so a reader sees that it changed."""
        number, says = self._board(self.rank)
        withdraw = self._step(il.STORE, number, il.TORN, "withdraw the board's number")
        return [
            *([] if self._mistake(Mutation.BOARD_NOT_WITHDRAWN) else [withdraw]),
            self._step(il.STORE, says, self.number, "write the board"),
            self._step(il.STORE, number, self.number, "write the board's number"),
        ]

    def _compare_board(self, source: int) -> list[Step]:
        """Compare only what was read between two looks that both saw this call's number."""
        number, says = self._board(source)
        mine = self.system.cell("copy", self.rank, self.channel)
        look = self._step(il.LOOK, number, self.number, f"look whose board rank {source}'s is")
        again = [] if self._mistake(Mutation.BOARD_LOOKED_AT_ONCE) else [look._replace(skip=1)]
        return [
            look._replace(skip=2 + len(again)),
            self._step(il.COPY, mine, says, f"read the board of rank {source}"),
            *again,
            self._step(il.CHECK, mine, self.number, f"compare the board of rank {source}"),
        ]

    def _board(self, rank: int) -> tuple[int, int]:
        """The cells of a rank's board: its number, and what it says (the number once more)."""
        cell = self.system.cell
        return cell("number", rank, self.channel), cell("says", rank, self.channel)

    def _data(self, source: int, reader: int, chunk: int, part: int) -> tuple[int, str]:
        name = f"chunk {chunk}" + (f" part {part}" if self.producers > 1 else "")
        name += f" of rank {source}" + ("" if self.setting.pull else f" for rank {reader}")
        name += " in the caller's tensor" if self.call.in_place else f" in slot {self.call.slot}"
        return self.system.cell("data", self.channel, name), name

    def _flag(self, kind: str, holder: int, other: int, chunk: int | None) -> tuple[int, str]:
        shared = kind == "ready" and self._mistake(Mutation.SHARED_FLAG)
        workspace = "shared" if shared else self.channel
        name = (workspace, self.call.slot, kind, holder, other, chunk)
        text = f"{kind}[slot {self.call.slot}]"
        text += f"[reader {other}]" if chunk is None else f"[source {other}][chunk {chunk}]"
        return self.system.cell(*name, initial=self.setting.epoch), text

    def _wait(
        self, kind: str, holder: int, other: int, chunk: int | None = None, *, wanted: int
    ) -> Step:
        cell, name = self._flag(kind, holder, other, chunk)
        op = il.PLAIN_WAIT if self._mistake(Mutation.PLAIN_COMPARISON) else il.WAIT
        return self._step(op, cell, wanted, f"await {name} >= {wanted}")

    def _raise(self, kind: str, holder: int, other: int, chunk: int | None = None) -> Step:
        cell, name = self._flag(kind, holder, other, chunk)
        if kind == "ready" and self._mistake(Mutation.COUNTED_FLAGS):
            return self._step(il.ADD, cell, 1, f"add 1 to {name} on rank {holder}")
        return self._step(il.SET, cell, self.epoch, f"set {name} = {self.epoch} on rank {holder}")

    def _step(self, op: int, cell: int, value: int, text: str) -> Step:
        channel = f" channel {self.channel}" if self.setting.channels > 1 else ""
        where = f"call {self.number} (slot {self.call.slot}, epoch {self.epoch})"
        return Step(op, cell, value, f"rank {self.rank}{channel}, {where}: {text}")

    def _mistake(self, mutation: Mutation) -> bool:
        return self.setting.mutation is mutation
