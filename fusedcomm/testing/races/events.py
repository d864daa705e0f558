"""What is recorded: accesses to memory that others can see, and how it is passed around."""

from __future__ import annotations

from typing import NamedTuple

#: Byte offsets, from and up to.
Range = tuple[int, int]

#: kind -> whether it writes, whether it is atomic. Two atomic accesses do not race.
KINDS = {
    "read": (False, False),
    "write": (True, False),
    "acquire": (False, True),  # a flag's wait, when it ended
    "release": (True, True),  # a flag's signal
    "count": (True, True),  # an acq_rel addition to a counter
    "relaxed": (True, True),  # an atomic write that orders nothing
}


class Launch(NamedTuple):
    """One launch of a kernel; numbered from 0 on each rank."""

    number: int
    kernel: str


class Event(NamedTuple):
    """One access of one program.

    Attributes:
        rank: the process's rank in the default group.
        launch, program: None on the host, which is one program for as long as it lives.
        kind: one of ``KINDS``.
        memory: names a piece of memory, equally on all ranks.
        ranges: the bytes of it that are accessed, without overlaps.
        value: of a flag or counter: what was written, or read by an acquire.
        before: what an atomic write found there.
        wanted: the least value that would have ended the wait; None if only ``value`` would.
        where: the line of code.
        buffer: the kernel's argument, for memory that only its rank can see.
        stream: "" on the call's own stream, else the name of one beside it.
    """

    rank: int
    launch: Launch | None
    program: tuple[int, ...] | None
    kind: str
    memory: str
    ranges: tuple[Range, ...]
    value: int | None = None
    before: int | None = None
    wanted: int | None = None
    where: str = ""
    buffer: str = ""
    stream: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}"
        if self.launch is not None:
            x, *others = self.program or (0,)
            program = f"program {(x, *others) if any(others) else x}"
            who += f", launch {self.launch.number} ({self.launch.kernel}), {program}"
        if self.stream:
            who += f", {self.stream} stream"
        value = "" if self.value is None else f" of value {self.value}"
        return f"{self.kind}{value} by {who}, at {self.where or 'an unknown line'}"


class Recording(NamedTuple):
    """What one rank did, in order. Programs of a launch come one after another, whole.

    Attributes:
        names: memory -> what people call it.
    """

    rank: int
    events: list[Event]
    names: dict[str, str]
