"""The mixture of experts on the host engine is free of races, and planted faults are found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import fusedcomm as fc
from fusedcomm.engines.host import rows, units
from fusedcomm.engines.host.rows import Returns, Rows
from fusedcomm.planning import routing
from fusedcomm.protocol import Call, Workspace
from fusedcomm.testing import races
from fusedcomm.testing.races.recording import replaced

TWO_OF_TWO = "0,1;2,3"
CALLS = 3
EXPERTS, HIDDEN, FFN = 5, 8, 6


def pair(rank: int, world_size: int, tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    weights = torch.rand(tokens, 2, requires_grad=True)
    d = fc.dispatch(x, torch.randint(-1, EXPERTS, (tokens, 2)), weights, EXPERTS, align=2)
    fc.combine(d.x * 2.0, d).sum().backward()


def ffn(rank: int, world_size: int, tokens: int) -> None:
    local = len(routing.place(EXPERTS, world_size).experts[rank])
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    w13 = torch.randn(local, 2 * FFN, HIDDEN, requires_grad=True)
    w2 = torch.randn(local, HIDDEN, FFN, requires_grad=True)
    ids = torch.randint(-1, EXPERTS, (tokens, 2))
    weights = torch.rand(tokens, 2, requires_grad=True)
    fc.moe_ffn(x, ids, weights, w13, w2, num_experts=EXPERTS).sum().backward()
    # In two parts, with another call's between them.
    inner = fc.Communicator.of(channel="inner")
    options = {"num_experts": EXPERTS}
    y, other = fc.moe_ffn(
        x,
        ids,
        weights,
        w13,
        w2,
        **options,
        beside=lambda: fc.moe_ffn(x, ids, None, w13, w2, group=inner, **options),
    )
    (y + other).sum().backward()


def replays(rank: int, world_size: int, tokens: int) -> None:
    """One plan again and again: no counts hold a fast rank back."""
    x = torch.randn(tokens, HIDDEN)
    d = fc.dispatch(x, torch.randint(-1, EXPERTS, (tokens, 2)), None, EXPERTS)
    for _ in range(CALLS):
        h = fc.dispatch(x, plan=d).x
    for _ in range(CALLS):
        fc.combine(h, d)


def counts(rank: int, world_size: int, tokens: int) -> None:
    """All counts are 0, as they are in new memory: who does not wait for them is not found out."""
    comm = fc.Communicator.of(channel="counts")
    x, ids = torch.randn(tokens, HIDDEN), torch.full((tokens, 1), -1)
    fc.dispatch(x, ids, None, EXPERTS, group=comm)


OPS: dict[str, Callable[[int, int, int], None]] = {
    "pair": pair,
    "moe_ffn": ffn,
    "replays": replays,
    "counts": counts,
}


def calls(rank: int, world_size: int, ops: tuple[str, ...], same_slot: bool, tokens: int) -> None:
    """``CALLS`` rounds, with pieces and units of few rows."""
    torch.manual_seed(rank)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(routing, PIECE_ROWS=2))
        stack.enter_context(replaced(units, DIRECT_ROWS=3, UNIT_ROWS=4))
        if same_slot:
            stack.enter_context(replaced(Workspace, take_slot=lambda self: 0))
        for number in range(CALLS):
            for op in ops:
                # Rows come in other numbers, and none from a rank.
                OPS[op](rank, world_size, 0 if number == 1 and rank == 0 else tokens + number)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("same_slot", [True, False])
def test_every_operation_is_clean(pools, world_size, same_slot):
    pool = pools(world_size, TRITON_INTERPRET="1")
    arguments = (world_size, tuple(OPS), same_slot, 9)
    recordings = pool.run(races.recorded, calls, *arguments, timeout_s=120)
    assert races.check(recordings) == []
    for recording in recordings:
        kinds = {event.kind for event in recording.events}
        assert kinds == {"read", "write", "acquire", "release"}


@pytest.mark.parametrize("same_slot", [True, False])
def test_every_operation_is_clean_inside_domains(pools, same_slot):
    """Where a rank sends the rows of several sources."""
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    recordings = pool.run(races.recorded, calls, 4, tuple(OPS), same_slot, 9, timeout_s=120)
    assert races.check(recordings) == []
    names = {name for recording in recordings for name in recording.names.values()}
    assert any(name.startswith("workspace moe rows") for name in names), names


# Faults


_wait, _signal = Call.wait, Call.signal


@contextlib.contextmanager
def _signal_first() -> Iterator[None]:
    """Rows are flagged, and all of them said to be sent, before they are written."""
    send = Rows._send_to

    def early(self: Rows, peer: int, *arguments: Any) -> None:
        if peer != self.rank:
            for number in range(self._closing + 1):
                self.call.signal(peer, number)
        send(self, peer, *arguments)

    with replaced(Rows, _send_to=early):
        yield


def _early_returns(self: Returns, source: int) -> None:
    """A rank's rows are said to be back when the first of them are under way."""


@contextlib.contextmanager
def _return_signalled_first() -> Iterator[None]:
    init = Returns.__init__

    def early(self: Returns, *arguments: Any) -> None:
        init(self, *arguments)
        for peer in self._peers:
            self.call.signal(peer, self._flags[peer])

    with replaced(Returns, __init__=early, signal=_early_returns):
        yield


@contextlib.contextmanager
def _consumed_first() -> Iterator[None]:
    send = Rows.send

    def early(self: Rows, *arguments: Any, **more: Any) -> None:
        send(self, *arguments, **more)
        self.done()

    done = Rows.done
    with replaced(Rows, send=early):
        assert done is Rows.done
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no wait": lambda: replaced(
        Rows, has=lambda self, piece: True, await_piece=lambda self, piece: None
    ),
    "no wait for the last": lambda: replaced(Returns, sum=_without(Returns.sum, Call, "wait")),
    "signal before write": _signal_first,
    "return signalled first": _return_signalled_first,
    "slot used early": lambda: replaced(
        Call, await_reader=lambda self, reader: self._await_consumed(reader, self._epoch - 2)
    ),
    "one signal for two pieces": lambda: replaced(
        Call,
        wait=lambda self, source, chunk=0: _wait(
            self, source, chunk if chunk % routing.MAX_PIECES == 0 else chunk - 1
        ),
    ),
    "counts not awaited": lambda: replaced(
        Call,
        wait=lambda self, source, chunk=0: (
            None if self._workspace.kind == "moe counts" else _wait(self, source, chunk)
        ),
    ),
    "consumed before reading": _consumed_first,
}


def _one_return(init: Callable[..., None]) -> Callable[..., None]:
    """All sources of a rank share the flag that says that their rows are back."""

    def shared(self: Returns, *arguments: Any) -> None:
        init(self, *arguments)
        self._flags = [max(self._flags)] * len(self._flags)

    return shared


RELAYING: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "one flag for all sources": lambda: replaced(
        rows, chunk=lambda expert, piece, number, most: routing.chunk(expert, piece, 0, most)
    ),
    "one flag for the way back": lambda: replaced(Returns, __init__=_one_return(Returns.__init__)),
}
FAULTS |= RELAYING


def _without(method: Callable[..., Any], owner: type, step: str) -> Callable[..., Any]:
    """``method`` in which a step does nothing."""

    def call(self: Any, *arguments: Any) -> Any:
        with replaced(owner, **{step: lambda *_: None}):
            return method(self, *arguments)

    return call


def faulty(rank: int, world_size: int, op: str, fault: str) -> None:
    with FAULTS[fault]():
        calls(rank, world_size, (op,), True, 9)


@pytest.mark.parametrize(
    ("fault", "op", "memory"),
    [
        ("no wait", "moe_ffn", "moe rows"),
        ("no wait", "pair", "moe rows"),
        ("no wait for the last", "pair", "moe returns"),
        ("no wait for the last", "moe_ffn", "moe returns"),
        ("signal before write", "moe_ffn", "moe rows"),
        ("signal before write", "replays", "moe rows"),
        ("return signalled first", "moe_ffn", "moe returns"),
        ("slot used early", "replays", "moe rows"),
        ("slot used early", "replays", "moe returns"),
        ("one signal for two pieces", "pair", "moe rows"),
        ("counts not awaited", "counts", "moe counts"),
        ("consumed before reading", "replays", "moe rows"),
    ],
)
def test_a_fault_is_found(pools, fault, op, memory):
    pool = pools(2, TRITON_INTERPRET="1")
    found = races.find(pool, faulty, 2, op, fault)
    assert any(race.memory.startswith(f"workspace {memory}") for race in found), list(
        map(str, found)
    )
    for race in found:
        assert "write" in {race.first.kind, race.second.kind}


@pytest.mark.parametrize(
    ("fault", "memory"),
    [("one flag for all sources", "moe rows"), ("one flag for the way back", "moe returns")],
)
def test_a_fault_inside_domains_is_found(pools, fault, memory):
    pool = pools(4, TRITON_INTERPRET="1", FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    found = races.find(pool, faulty, 4, "moe_ffn", fault)
    assert any(race.memory.startswith(f"workspace {memory}") for race in found), list(
        map(str, found)
    )
