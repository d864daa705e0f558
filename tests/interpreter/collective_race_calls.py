"""Calls of every collective on the Triton engine, for the race checker; and faults planted in them.

Rank functions: they run on the ranks of a pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import fusedcomm as fc
from fusedcomm.engines.triton import launch as engine
from fusedcomm.protocol import Workspace
from fusedcomm.testing.races.recording import replaced
from tests.interpreter.race_faults import _kernels

CALLS = 3


def calls(rank: int, world_size: int, op: str, size: int, same_slot: bool) -> None:
    """``CALLS`` calls in a row, on slot 0 alone if ``same_slot``, as a captured graph's are."""
    with contextlib.ExitStack() as stack:
        if same_slot:
            stack.enter_context(replaced(Workspace, take_slot=lambda self: 0))
        for _ in range(CALLS):
            _call(rank, world_size, op, size)


def faulty_calls(rank: int, world_size: int, op: str, size: int, fault: str) -> None:
    with FAULTS[fault]():
        calls(rank, world_size, op, size, True)


def _call(rank: int, world_size: int, op: str, size: int) -> None:
    kind, _, algorithm = op.partition(" ")
    x = torch.randn(size)
    if kind == "all_reduce":
        name = algorithm.removesuffix(" in place")
        out = x if algorithm != name else None
        fc.all_reduce(x, algorithm=name, engine="triton", out=out)
    elif kind == "all_gather":
        rows = -(-size // world_size)
        mine = x[min(rank * rows, size) : (rank + 1) * rows]
        fc.all_gather(mine, gathered_size=size, engine="triton")
    elif kind == "reduce_scatter":
        fc.reduce_scatter(x, engine="triton")
    elif kind == "all_to_all":
        sent = [(rank + peer) % 3 * size for peer in range(world_size)]
        fc.all_to_all(torch.randn(sum(sent)), send_counts=sent, recv_counts=sent, engine="triton")
    else:
        fc.broadcast(x, size % world_size, engine="triton", out=x)


@contextlib.contextmanager
def _one_launch_in_place() -> Iterator[None]:
    """One-shot in place in a single launch: what is pushed late is the result already."""
    real = engine.Launch.run

    def run(self, kernel, programs, kind, name, **arguments):
        if arguments.get("skip"):
            return
        if "skip" in arguments:
            programs += arguments["pieces"]
        real(self, kernel, programs, kind, name, **arguments)

    with replaced(engine.Launch, run=run):
        yield


_PUSH = (
    "    copy_piece(tl.multiple_of(x + first, ALIGN), target, piece, piece_size, count, BLOCK)\n"
)
_SAY = "    signal(words(bases, peer) + flag, epoch)\n"
_AWAIT = "return wait_at_least(flag, epoch, limit, record, READY, source, chunk)"
_RING_SAY = "signal(flags + ((half + chunk) * pieces + piece) * FLAG_WORDS, epoch)"

_NEXT_RESULT = "            ok = await_piece(own, before, number,"
_LOOP = "for step in range(1, world_size{}):\n        if ok:"
_BEFORE_ADDING = (
    "        if ok:\n            at, count = part_of(chunk, size, size, total, total, False)\n"
)
_RING_ADDS = _BEFORE_ADDING + "            x_here"
_EARLY = "half = tl.where(step == world_size - 1, world_size, 0)\n            " + _RING_SAY

FAULTS = {
    "no wait": _kernels("collectives", (_AWAIT, "return epoch == epoch")),
    "signal before store": _kernels(
        "collectives",
        (_PUSH, "    flag = ready_word + (rank * chunks + piece) * FLAG_WORDS\n" + _SAY + _PUSH),
    ),
    "no wait for the last source": _kernels(
        "collectives", (_LOOP.format(""), _LOOP.format(" - 1"))
    ),
    "no wait for the result": _kernels(
        "collectives", ("if await_piece(own, owner, chunk,", "if await_piece(own, owner, piece,")
    ),
    "one launch in place": _one_launch_in_place,
    "ring: no wait": _kernels("ring_all_reduce", ("if ok & (step > 0):", "if ok & (step > 1):")),
    "ring: no wait for the result": _kernels(
        "ring_all_reduce",
        ("        if ok:\n" + _NEXT_RESULT, "        if step < 0:\n" + _NEXT_RESULT),
    ),
    "ring: signals one step early": _kernels(
        "ring_all_reduce",
        (_RING_ADDS, _RING_ADDS.replace("if ok:\n", f"if ok:\n            {_EARLY}\n")),
    ),
}
