"""Flags on the device: the only place with a barrier, a fence or an ``if`` on how Triton runs.

A rank's workspace is one block of memory; ``bases`` holds the address of every rank's, ``[W]``
int64. Flags are int32 words of it, ``FLAG_WORDS`` apart; the host passes the index of the first
word of the slot's epoch, of ``ready[slot][0][0]`` and of ``consumed[slot][0]``
(``fusedcomm.protocol.Workspace`` has the layout).

An operation is a sequence of launches on one stream: ``begin``, the work, ``end``.

=========== =============================================== ====================================
launch      raises                                          awaits
=========== =============================================== ====================================
begin       –                                               consumed[s][reader] >= e - 1, all
the work    ready[s][me][chunk] = e on the reader           ready[s][source][chunk] >= e
end         consumed[s][me] = e on every source             –
=========== =============================================== ====================================

A wait that finds no flag within ``limit`` looks writes a record, ``[failed, kind, source, chunk,
wanted, seen, op, –]`` int32 in this rank's memory, and the rest of the queue does nothing: no
result is stored and no flag raised on data that never came. ``end`` hands the record on to memory
of the host. A copy engine cannot look at a record: it writes into a slot that its reader may still
need. So whoever begins a call after a failure first says so on every peer (``failed``), and ``end``
takes that over into the peer's own record.

Worked example: W = 2, slot 0 used for the third time. ``begin`` on rank 0 makes epoch[0] = 3 and
awaits consumed[0][1] >= 2 in its own memory; the work awaits ready[0][1][c] >= 3; ``end`` sets
consumed[0][0] = 3 in rank 1's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import triton
import triton.language as tl

#: int32 words between two flags (128 bytes).
FLAG_WORDS = tl.constexpr(32)
#: Arguments that say where things are, and how many: no kernel is compiled anew for their values.
#: (Triton would, for 1 and for multiples of 16: so for many a number of tokens.)
PLACES = [
    *("rank", "world_size", "epoch_word", "ready_word", "chunks", "data_offset"),
    *("shard_rows", "piece_rows", "pieces", "total_rows", "rows", "M"),
]
#: What a record's ``kind`` says was awaited.
CONSUMED, READY, FAILED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: Nothing: rows were routed to ``source`` that has no room; ``wanted`` is that room, ``seen`` they.
CAPACITY = tl.constexpr(4)
#: int32 words of a record.
RECORD_WORDS = 8

#: Whether ``triton.jit`` runs kernels in the interpreter; Triton decides it at import as well.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Called between two looks at a flag in the interpreter; the engine sets it to give up the core
#: and to raise when the flag can no longer come.
relax: Callable[[], None] = lambda: None  # noqa: E731


def _relax() -> None:
    relax()


if INTERPRETED:

    @triton.jit
    def _looks(flag, wanted, limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen - wanted < 0:
            _relax()
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        return seen

else:

    @triton.jit
    def _looks(flag, wanted, limit):
        # An atomic add of 0 compiles to a plain acquire load; a tl.load would be hoisted.
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks = 0
        while (seen - wanted < 0) & (looks < limit):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
        return seen


@triton.jit
def words(bases, rank):
    """The int32 words of a rank's workspace."""
    return tl.load(bases + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def memory(bases, rank, offset, writer, region_bytes, DTYPE: tl.constexpr):
    """A pointer to ``DTYPE``: the region of ``writer`` in a rank's workspace.

    The regions lie ``region_bytes`` apart, the first one ``offset`` bytes (a multiple of 16) from
    the workspace's beginning.
    """
    address = tl.load(bases + rank) + offset + tl.cast(writer, tl.int64) * region_bytes
    # Without the hint a pointer out of a table is taken to be unaligned: 2-byte stores.
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def wait_at_least(flag, wanted, limit, record, kind, source, chunk):
    """Await ``flag - wanted >= 0`` (int32, wrapping); whether it came. Acquires at system scope."""
    seen = _looks(flag, wanted, limit)
    came = seen - wanted >= 0
    if not came:
        report(record, kind, source, chunk, wanted, seen)
    return came


@triton.jit
def report(record, kind, source, chunk, wanted, seen):
    """Write a record; of several that are written at once, the host sees one or a mixture."""
    tl.store(record + 1, kind)
    tl.store(record + 2, source)
    tl.store(record + 3, chunk)
    tl.store(record + 4, wanted)
    tl.store(record + 5, seen)
    tl.debug_barrier()
    tl.atomic_xchg(record, 1, sem="release", scope="sys")


@triton.jit
def signal(flag, epoch):
    """Set a flag behind everything that this program's threads have stored."""
    # Up to Triton 3.8 a release atomic orders its own thread's stores only.
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def count_in(counter, total):
    """Count this program into a local counter; whether it was the last, which then clears it."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == total - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


_BOUNDS = ["rank", "world_size", "epoch_word", "consumed_word", "failed_word", "op"]


@triton.jit(do_not_specialize=_BOUNDS)
def begin(bases, rank, world_size, epoch_word, consumed_word, failed_word, limit, record):
    """One program: advance the slot's epoch, then await the readers of its last use."""
    own = words(bases, rank)
    ok = tl.load(record) == 0
    if ok:
        epoch = tl.load(own + epoch_word) + 1
        tl.store(own + epoch_word, epoch)
        for step in range(1, world_size):
            reader = (rank + step) % world_size
            flag = own + consumed_word + reader * FLAG_WORDS
            ok = wait_at_least(flag, epoch - 1, limit, record, CONSUMED, reader, -1) & ok
    if not ok:
        for step in range(1, world_size):
            # Matched by the look in the peer's end.
            signal(words(bases, (rank + step) % world_size) + failed_word, 1)


@triton.jit(do_not_specialize=_BOUNDS)
def end(
    bases, rank, world_size, epoch_word, consumed_word, failed_word, op, record, host_record
):  # fmt: skip
    """One program: tell every source that what it wrote for this rank has been read.

    ``host_record`` int32 ``[RECORD_WORDS]``, zero until a call has failed.
    """
    own = words(bases, rank)
    ok = tl.load(record) == 0
    if ok:
        epoch = tl.load(own + epoch_word)
        for step in range(1, world_size):
            source = (rank + step) % world_size
            signal(words(bases, source) + consumed_word + rank * FLAG_WORDS, epoch)
        told = tl.atomic_add(own + failed_word, 0, sem="acquire", scope="sys")
        ok = told == 0
        if not ok:
            report(record, FAILED, -1, -1, 1, told)
    if not ok:
        tl.debug_barrier()  # the record may be of this program's other threads
        if tl.load(host_record) == 0:
            for word in range(1, 6):
                tl.store(host_record + word, tl.load(record + word))
            tl.store(host_record + 6, op)
            tl.debug_barrier()
            tl.atomic_xchg(host_record, 1, sem="release", scope="sys")
