"""Hooks for kernels: every load, store and atomic that Triton's interpreter carries out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from fusedcomm.testing.races.addresses import merged
from fusedcomm.testing.races.recording import Recorder, replaced
from fusedcomm.waiting import reached


@contextlib.contextmanager
def interpreter_hooks(recorder: Recorder) -> Iterator[None]:
    """Have the accesses of interpreted kernels noted.

    A device function with arguments ``flag`` and ``wanted`` is a wait: the acquire loads of that
    flag in it are noted once, when one has found what is wanted.
    """
    from triton.runtime import interpreter

    from fusedcomm.engines.triton.interpreter import install

    install()  # now, since it would replace what is replaced here
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    function = interpreter.InterpretedFunction
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, enter = builder.create_atomic_rmw, builder.set_grid_idx
    launch, call = executor.__call__, function.__call__
    operations, semantics = interpreter._ir.ATOMIC_OP, interpreter._ir.MEM_SEMANTIC
    awaited: dict[int, int] = {}  # address of a flag -> what is wanted

    def note(kind: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data
        if mask is not None:
            chosen = np.asarray(mask.data, dtype=bool)
            if not chosen.all():
                addresses = addresses[np.broadcast_to(chosen, addresses.shape)]
        if addresses.size:
            recorder.add(kind, merged(addresses, _size(pointers)))

    def note_atomic(
        kind: str, pointers: Any, mask: Any, before: np.ndarray, after: np.ndarray | None
    ) -> None:
        """One event for each element; ``after`` is None where what was written is not known."""
        size, shape = _size(pointers), pointers.data.shape
        chosen = np.ones(shape, bool) if mask is None else np.broadcast_to(mask.data, shape)
        for index in np.ndindex(shape):
            if not chosen[index]:
                continue
            address, seen = int(pointers.data[index]), int(before[index])
            place = np.array([[address, address + size]])
            if kind != "acquire":
                value = None if after is None else int(after[index])
                recorder.add(kind, place, value=value, before=seen)
                continue
            wanted = awaited.get(address)
            if wanted is None or reached(seen, wanted):
                recorder.add("acquire", place, value=seen, wanted=wanted)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        note("read", pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    def watched_store(
        self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any
    ) -> Any:
        note("write", pointers, mask)
        return store(self, pointers, value, mask, *rest, **more)

    def watched_rmw(
        self: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, *rest: Any
    ) -> Any:
        result = rmw(self, op, pointers, value, mask, sem, *rest)
        before, after, kind = result.data, None, "relaxed"
        if op == operations.XCHG:
            after = np.broadcast_to(value.data, before.shape)
            # Of acq_rel the acquiring half would order by luck, as nobody waits for a value.
            kind = "release" if sem in (semantics.RELEASE, semantics.ACQUIRE_RELEASE) else kind
        elif op == operations.ADD and not np.any(value.data) and sem != semantics.RELAXED:
            kind = "acquire"
        elif op == operations.ADD:
            after = before + value.data
            kind = "count" if sem == semantics.ACQUIRE_RELEASE else kind
        note_atomic(kind, pointers, mask, before, after)
        return result

    def watched_cas(self: Any, pointers: Any, compare: Any, value: Any, *rest: Any) -> Any:
        raise NotImplementedError("the race checker knows no compare-and-swap; no kernel needs it")

    def watched_enter(self: Any, *index: int) -> None:
        recorder.program = index
        enter(self, *index)

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = inspect.getfullargspec(self.fn).args
        tensors = {**dict(zip(names, args, strict=False)), **kwargs}
        buffers = [
            (name, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for name, tensor in tensors.items()
            if hasattr(tensor, "data_ptr") and tensor.is_contiguous()
        ]
        recorder.enter_launch(self.fn.__name__, buffers)
        try:
            return launch(self, *args, **kwargs)
        finally:
            recorder.leave_launch()

    def watched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not {"flag", "wanted"} <= set(self.arg_names):
            return call(self, *args, **kwargs)
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        address = int(given["flag"].handle.data.item())
        outer = awaited.get(address)
        awaited[address] = _number(given["wanted"])
        try:
            return call(self, *args, **kwargs)
        finally:
            if outer is None:
                del awaited[address]

    more = {}
    if hasattr(builder, "create_atomic_load"):  # from Triton 3.9

        def watched_atomic_load(self: Any, pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
            result = load(self, pointers, mask, None, None, True)
            if sem == semantics.ACQUIRE:
                note_atomic("acquire", pointers, mask, result.data, None)
            return result

        def watched_atomic_store(
            self: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
        ) -> Any:
            before = load(self, pointers, mask, None, None, True).data
            after = np.broadcast_to(value.data, before.shape)
            kind = "release" if sem == semantics.RELEASE else "relaxed"
            note_atomic(kind, pointers, mask, before, after)
            return store(self, pointers, value, mask, None)

        more = {
            "create_atomic_load": watched_atomic_load,
            "create_atomic_store": watched_atomic_store,
        }
    with (
        replaced(
            builder,
            create_masked_load=watched_load,
            create_masked_store=watched_store,
            create_atomic_rmw=watched_rmw,
            create_atomic_cas=watched_cas,
            set_grid_idx=watched_enter,
            **more,
        ),
        replaced(executor, __call__=watched_launch),
        replaced(function, __call__=watched_call),
    ):
        yield


def _size(pointers: Any) -> int:
    """Bytes of the elements pointed to."""
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def _number(value: Any) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)
