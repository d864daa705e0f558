"""Faults, planted in the kernels' source and in the host's calls, that the race checker must find.

The kernels are changed as text, so that the faults stay in step with the code; each text must be
found in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import fusedcomm as fc
from fusedcomm.protocol import Call
from fusedcomm.protocol.workspace import BANK_WORD
from fusedcomm.testing.races.recording import replaced

_Fault = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def _mutated(kernels: str, *changes: tuple[str, str]) -> Iterator[ModuleType]:
    """Kernels of one file, replaced by ones whose source text was changed."""
    real = importlib.import_module(f"fusedcomm.kernels.{kernels}")
    source = Path(real.__file__ or "").read_text()
    for old, new in changes:
        assert old in source, f"{kernels}.py has no longer:\n{old}"
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernels}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"fusedcomm.kernels.{kernels}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions = {
            name: value
            for name, value in vars(module).items()
            if hasattr(value, "arg_names") and value.fn.__module__ == real.__name__
        }
        if kernels == "signals":
            module._relax = real._relax  # through which the engine looks after long waits
        with replaced(real, **functions):
            yield module


def _kernels(kernels: str, *changes: tuple[str, str]) -> _Fault:
    return lambda: _mutated(kernels, *changes)


def _host(**methods: Callable[..., Any]) -> _Fault:
    return lambda: replaced(Call, **methods)


_wait, _write, _signal, _signal_all = Call.wait, Call.write, Call.signal, Call.signal_all


def _signal_before_writing(self: Call, owner: int, *place: Any, **more: Any) -> Any:
    chunk = place[3] if len(place) > 3 else 0
    readers = [owner] if owner != self.rank else range(fc.Communicator.of().world_size)
    for reader in readers:
        if reader != self.rank:
            self.signal(reader, chunk)
    return _write(self, owner, *place, **more)


def _bank_told_late(self: Call, readers: Sequence[int]) -> None:
    bank, self._bank = self._bank, None
    _signal_all(self, readers)
    self._bank = bank
    assert bank is not None
    for reader in readers:
        pair = self._pairs[reader]
        pair.there.words[pair.ready + BANK_WORD] = bank


def _consume_before_reading(self: Call, source: int, chunk: int = 0) -> None:
    _wait(self, source, chunk)
    self.consumed(source)


@contextlib.contextmanager
def _host_flags_of_another_workspace() -> Iterator[None]:
    """The second channel raises and awaits the flags of the first one's workspace."""
    shared = fc.Communicator.of(channel="one").memory.workspaces

    def borrowed(method: Callable[..., None]) -> Callable[..., None]:
        def call(self: Call, *args: int) -> None:
            own = self._pairs, self._here
            other = shared.get(self._workspace.kind, self._workspace)
            self._pairs, self._here = other.pairs[self._slot], other.segments[self.rank]
            try:
                method(self, *args)
            finally:
                self._pairs, self._here = own

        return call

    with replaced(Call, signal=borrowed(_signal), wait=borrowed(_wait)):
        yield


@contextlib.contextmanager
def _kernel_flags_of_another_workspace() -> Iterator[None]:
    """As on the host: kernels get both workspaces' pointers, the one of the flags behind."""
    import torch

    from fusedcomm.engines.triton.launch import Launch

    ranks = Launch.ranks

    def both(self: Launch) -> dict[str, Any]:
        shared = fc.Communicator.of(channel="one").memory.workspaces[self.workspace.kind]
        arguments = ranks.fget(self)  # type: ignore[attr-defined]
        bases = torch.cat([arguments["bases"], shared.pointers])
        return {**arguments, "bases": bases}

    changes = (
        ("signal(words(bases, owner) + flag", "signal(words(bases, world_size + owner) + flag"),
        ("flag = own + ready_word", "flag = words(bases, world_size + rank) + ready_word"),
    )
    with _mutated("linear_reduce_scatter", *changes), replaced(Launch, ranks=property(both)):
        yield


@contextlib.contextmanager
def _flags_before_copies() -> Iterator[None]:
    from fusedcomm.engines.triton.launch import Launch

    copy, raise_flag = Launch.copy, Launch._raise

    def flag_first(self: Launch, owner: int, offset: int, rows: Any, chunk: int) -> None:
        def early() -> None:
            side = self._side_stream()
            side.fork()
            with side.entered():
                raise_flag(self, owner, chunk)

        self._steps.append(early)
        copy(self, owner, offset, rows, chunk)

    with replaced(Launch, copy=flag_first, _raise=lambda self, owner, chunk: None):
        yield


@contextlib.contextmanager
def _without(step: str) -> Iterator[None]:
    """Streams do not fork, or do not join."""
    from fusedcomm.engines.triton.streams import SideStream

    with replaced(SideStream, **{step: lambda self: None}):
        yield


_PUSH_SIGNAL = """        if count_in(counters + step * pieces + piece, blocks):
            # Matched by the wait of the peer's segment (me, piece).
            flag = ready_word + (rank * chunks + piece) * FLAG_WORDS
            signal(words(bases, peer) + flag, epoch)
"""
_PUSH_STORES = "        for start in range(0, K, BK):\n            k = start"
_PRODUCE_SIGNAL = """        if ok & (owner != rank):
            if count_in(counters + segment, programs):
                # Matched by the owner's wait in reduce_kernel.
                flag = ready_word + (rank * chunks + piece) * FLAG_WORDS
                signal(words(bases, owner) + flag, epoch)
"""
_PRODUCE_TILES = "        row_blocks = tl.cdiv(rows, BM)\n"
_ONE_SHOT_STORES = """        for step in range(0, world_size):
            peer = (rank + step) % world_size
            target = memory(bases, peer, data_offset, rank, region_bytes, WIRE)
            tl.store(target + place_MN, total_MN.to(WIRE), mask=mask_MN)
"""
_ONE_SHOT_SIGNAL = """        if ok:
            for step in range(1, world_size):
                peer = (rank + step) % world_size
                flag = ready_word + (rank * chunks + tile) * FLAG_WORDS
                signal(words(bases, peer) + flag, epoch)
"""
_RESULT_STORES = """            for step in range(1, world_size):
                peer = (rank + step) % world_size
                result = memory(bases, peer, results, rank, region_bytes, dtype)
                tl.store(result + place_MN, result_MN, mask=mask_MN & ok)
"""
_RESULT_SIGNAL = """            if ok:
                for step in range(1, world_size):
                    peer = (rank + step) % world_size
                    flag = ready_word + (rank * chunks + tiles + tile) * FLAG_WORDS
                    signal(words(bases, peer) + flag, epoch)
"""
_AWAIT_READER = "ok = wait_at_least(flag, epoch - 1, limit, record, CONSUMED, reader, -1) & ok"
_AWAIT_SOURCE = "ok = wait_at_least(flag, epoch, limit, record, READY, source, "
_AWAIT_RESULT = "ok = wait_at_least(flag_here, epoch, limit, record, READY, owner, tiles + tile)"


def _swapped(first: str, second: str) -> tuple[tuple[str, str], ...]:
    return ((second, ""), (first, second + first))


_GATHER, _SCATTER, _REDUCE = "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"

#: name -> what plants it, for as long as it is entered.
FAULTS: dict[str, _Fault] = {
    "host: no wait": _host(wait=lambda self, source, chunk=0: None),
    "host: signal before write": _host(write=_signal_before_writing),
    "host: bank told late": _host(signal_all=_bank_told_late),
    "host: slot used early": _host(
        await_reader=lambda self, reader: self._await_consumed(reader, self._epoch - 2),
        await_readers=lambda self, readers: [
            self._await_consumed(reader, self._epoch - 2) for reader in readers
        ],
    ),
    "host: consumed before reading": _host(wait=_consume_before_reading),
    "host: one signal for two pieces": _host(
        wait=lambda self, source, chunk=0: _wait(self, source, 0)
    ),
    "host: left in place too early": _host(await_done=lambda self, readers: None),
    "host: shared flags": _host_flags_of_another_workspace,
    "begin: slot used early": _kernels("signals", ("(flag, epoch - 1,", "(flag, epoch - 2,")),
    "begin: no wait": _kernels("signals", (_AWAIT_READER, "pass")),
    "copies: flag before the data": _flags_before_copies,
    "copies: no fork": lambda: _without("fork"),
    "copies: no join": lambda: _without("join"),
    "gather: no wait": _kernels(_GATHER, (_AWAIT_SOURCE + "piece)", "pass")),
    "gather: signal before store": _kernels(_GATHER, *_swapped(_PUSH_STORES, _PUSH_SIGNAL)),
    "gather: no counter": _kernels(
        _GATHER,
        ("if count_in(counters + step * pieces + piece, blocks):", "if program % blocks == 0:"),
    ),
    "gather: counter one short": _kernels(_GATHER, ("piece, blocks):", "piece, blocks - 1):")),
    "scatter: no wait": _kernels(_SCATTER, (_AWAIT_SOURCE + "piece)", "pass")),
    "scatter: signal before store": _kernels(_SCATTER, *_swapped(_PRODUCE_TILES, _PRODUCE_SIGNAL)),
    "scatter: no counter": _kernels(
        _SCATTER, ("if count_in(counters + segment, programs):", "if program == programs - 1:")
    ),
    "scatter: every program signals": _kernels(
        _SCATTER, ("if count_in(counters + segment, programs):", "if program >= 0:")
    ),
    "scatter: relaxed signal": _kernels(
        _SCATTER,
        (
            "signal(words(bases, owner) + flag, epoch)",
            'tl.atomic_xchg(words(bases, owner) + flag, epoch, sem="relaxed", scope="sys")',
        ),
    ),
    "scatter: shared flags": _kernel_flags_of_another_workspace,
    "one shot: no wait": _kernels(_REDUCE, (_AWAIT_SOURCE + "tile)", "pass")),
    "one shot: signal before store": _kernels(
        _REDUCE, *_swapped(_ONE_SHOT_STORES, _ONE_SHOT_SIGNAL)
    ),
    "two shot: no wait for the result": _kernels(_REDUCE, (_AWAIT_RESULT, "pass")),
    "two shot: result signalled before its store": _kernels(
        _REDUCE, *_swapped(_RESULT_STORES, _RESULT_SIGNAL)
    ),
}
