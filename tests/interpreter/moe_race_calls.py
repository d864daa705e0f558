"""Calls of the mixture of experts on the Triton engine, for the race checker; planted faults.

Rank functions: they run on the ranks of a pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl

import fusedcomm as fc
from fusedcomm.engines.triton import activations, config, moe, rows
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.kernels import moe_rows
from fusedcomm.planning import routing
from fusedcomm.protocol import Workspace
from fusedcomm.testing.races.recording import replaced
from tests.interpreter.race_faults import _kernels

CALLS = 3
EXPERTS, HIDDEN, FFN = 4, 16, 16
FEW_ROWS = config.Tiles(2, 16, 0, group=1, warps=4, stages=1)


def calls(rank: int, world_size: int, op: str, same_slot: bool, most: int = 20) -> None:
    """``CALLS`` calls in a row, of other routings, with pieces of few rows and small tiles."""
    torch.manual_seed(rank)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(routing, PIECE_ROWS=2))
        stack.enter_context(replaced(moe_rows, PIECE_ROWS=tl.constexpr(2)))
        stack.enter_context(replaced(config, _INTERPRETED=16))
        stack.enter_context(replaced(rows, _ROWS=2))
        stack.enter_context(replaced(activations, activation_tiles=lambda device: FEW_ROWS))
        if same_slot:
            stack.enter_context(replaced(Workspace, take_slot=lambda self: 0))
        for number in range(CALLS):
            tokens = 0 if number == 1 and rank == 0 else most + number
            CALLED[op](rank, world_size, tokens)


def faulty_calls(rank: int, world_size: int, op: str, fault: str) -> None:
    if fault.startswith("counts"):
        counts_again(rank, world_size, fault)
        return
    with FAULTS[fault]():
        calls(rank, world_size, op, True)


def counts_again(rank: int, world_size: int, fault: str) -> None:
    """The same counts in every call, faulty from the second on: a table that is read too early is
    right all the same, and no rank is led astray."""
    for plant in (contextlib.nullcontext, FAULTS[fault], FAULTS[fault]):
        torch.manual_seed(rank)
        with plant():
            _dispatch(20)


def _pair(rank: int, world_size: int, tokens: int) -> None:
    d = _dispatch(tokens)
    fc.combine(d.x * 2.0, d).sum().backward()


def _dispatch(tokens: int) -> fc.Dispatched:
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    weights = torch.rand(tokens, 2, requires_grad=True)
    ids = torch.randint(-1, EXPERTS, (tokens, 2))
    return fc.dispatch(x, ids, weights, EXPERTS, align=2, engine="triton")


def _ffn(rank: int, world_size: int, tokens: int, input_gradient: bool = True) -> torch.Tensor:
    local = len(routing.place(EXPERTS, world_size).experts[rank])
    x = torch.randn(tokens, HIDDEN, requires_grad=input_gradient)
    w13 = torch.randn(local, 2 * FFN, HIDDEN, requires_grad=True)
    w2 = torch.randn(local, HIDDEN, FFN, requires_grad=True)
    b13 = torch.randn(local, 2 * FFN, requires_grad=True)
    b2 = torch.randn(local, HIDDEN, requires_grad=True)
    ids = torch.randint(-1, EXPERTS, (tokens, 2))
    weights = torch.rand(tokens, 2, requires_grad=True)
    y = fc.moe_ffn(x, ids, weights, w13, w2, b13=b13, b2=b2, num_experts=EXPERTS, engine="triton")
    return y.sum()


def _backward_twice(rank: int, world_size: int, tokens: int) -> None:
    """Two backward passes in a row, which exchange nothing but the rows' gradients."""
    losses = [_ffn(rank, world_size, tokens + n, input_gradient=False) for n in range(2)]
    for loss in losses:
        loss.backward()


CALLED: dict[str, Callable[[int, int, int], None]] = {
    "pair": _pair,
    "moe_ffn": lambda *args: _ffn(*args).backward(),
    "backward twice": _backward_twice,
}


@contextlib.contextmanager
def _gradients_behind_the_end() -> Iterator[None]:
    """The rows' memory is given back before the weights' gradients are made of them."""
    gradients = moe.experts_grads

    def late(launch: Launch, *args: Any) -> list[torch.Tensor | None]:
        before = len(launch._steps)
        found = gradients(launch, *args)
        steps, end = launch._steps[before:], launch.end
        del launch._steps[before:]

        def early() -> None:
            end()
            launch._steps.extend(steps)

        launch.end = early  # type: ignore[method-assign]
        return found

    with replaced(moe, experts_grads=late):
        yield


_WAIT = "ok = wait_at_least(flag, epoch, limit, record, READY, source, {})"
_COUNT = "if count_in(counters + segment * MAX_PIECES + piece, blocks):"
_RETURNED = "if count_in(counters + source, tl.load(tiles_W + source) * column_blocks):"

_COUNTS_SIGNAL = """        if peer != rank:
            # Matched by collect_kernel.
            signal(words(bases, peer) + ready_word + rank * chunks * FLAG_WORDS, epoch)
"""
_COUNTS_STORES = "        for first in range(0, columns, BLOCK):\n            column = first"

FAULTS = {
    "counts not awaited": _kernels("moe_route", (_WAIT.format("0"), "ok = ok")),
    "counts signalled before they are written": _kernels(
        "moe_route",
        (_COUNTS_SIGNAL, ""),
        (
            _COUNTS_STORES + " + tl.arange(0, BLOCK)\n            exists = column < columns\n"
            "            begin",
            _COUNTS_SIGNAL
            + _COUNTS_STORES
            + " + tl.arange(0, BLOCK)\n            exists = column < columns\n            begin",
        ),
    ),
    "rows not awaited": _kernels("grouped_linear", (_WAIT.format("chunk"), "ok = ok")),
    "one flag for all pieces": _kernels(
        "grouped_linear",
        ("chunk = expert * MAX_PIECES + tl.cast(piece, tl.int32)", "chunk = expert * MAX_PIECES"),
    ),
    "the end not awaited": _kernels("moe_rows", (_WAIT.format("closing"), "ok = ok")),
    "the first block signals": _kernels("moe_rows", (_COUNT, _COUNT.replace("blocks", "1"))),
    "the first tile signals": _kernels(
        "grouped_linear", (_RETURNED, "if count_in(counters + source, 1):")
    ),
    "gradients behind the end": _gradients_behind_the_end,
}
