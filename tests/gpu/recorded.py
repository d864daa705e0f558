"""What a CUDA graph does, on CPU ranks: calls are recorded once, and made again as recorded.

A recording is the sequence of torch's operations, of kernels and of flags that the calls came down
to, with the numbers, sizes and grids of that time. Made again, it works on the same tensors, with
what is in them by then; nothing of the host's program runs. So whatever the host had read out of a
tensor would stay as it was: it is an error to do so within a recording.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fusedcomm as fc
from fusedcomm.engines.triton import constants, launch, routing
from fusedcomm.kernels import signals

#: Operations whose result, or its shape, the host has to wait for.
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
#: Methods by which a program looks into a tensor, past the dispatcher.
_LOOKS = ("tolist", "numpy", "__array__", "__dlpack__", "cpu")


class Recording(TorchDispatchMode):
    """Records what is done while it is entered; ``replay`` does it again."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        self._hidden = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = OPDEFS.get(func._schema.name)
        if own is not None and func.namespace == "fusedcomm":
            with self:
                return own._init_fn(*args, **kwargs)
        if self._hidden:
            return func(*args, **kwargs)
        if _reads(func, args):
            raise AssertionError(f"{func} has the host wait for the device: no graph can hold it")
        found = func(*args, **kwargs)
        if not (func.is_view and _shares(found, args)):  # a reshape, say, may be a copy as well
            self._steps.append(lambda: _again(func, args, kwargs, found))
        return found

    def replay(self, comm: fc.Communicator) -> None:
        """Do everything once more; one call of ``comm``, lest the waits take a peer for lost."""
        before = signals.relax
        with comm.collective("a graph, replayed"), torch.no_grad():
            signals.relax = comm.calls.await_any("a graph, replayed")
            try:
                for step in self._steps:
                    step()
            finally:
                signals.relax = before

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Record kernels and flags as well, and let nobody look into a tensor."""
        from triton.runtime.interpreter import GridExecutor

        start, raise_flag = GridExecutor.__call__, launch.Launch._raise
        make = launch.Launch.__init__

        def made(call: launch.Launch, *args: Any, **kwargs: Any) -> None:
            make(call, *args, **kwargs)
            call.workspace.captured = True  # kept when eager calls outgrow it

        def started(executor: Any, *args: Any, **kwargs: Any) -> None:
            def run() -> None:
                start(executor, *args, **kwargs)

            with self._apart():
                run()
            self._steps.append(run)

        def raised(call: launch.Launch, owner: int, chunk: int) -> None:
            raise_flag(call, owner, chunk)
            self._steps.append(lambda: raise_flag(call, owner, chunk))

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(GridExecutor, "__call__", started))
            stack.enter_context(mock.patch.object(launch.Launch, "_raise", raised))
            stack.enter_context(mock.patch.object(launch.Launch, "__init__", made))
            for module in (constants, routing):
                stack.enter_context(mock.patch.object(module, "is_capturing", lambda: True))
            for name in _LOOKS:
                self._refuse(stack, name)
            yield

    def _refuse(self, stack: contextlib.ExitStack, name: str) -> None:
        method = getattr(Tensor, name)

        def look(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._hidden:
                return method(tensor, *args, **kwargs)
            raise AssertionError(f"Tensor.{name}: the host looks into a tensor while recording")

        stack.enter_context(mock.patch.object(Tensor, name, look))

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """The interpreter's own work is the device's, and recorded as a whole."""
        self._hidden = True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._hidden = False


def _reads(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host has to wait for what the operation finds in its tensors."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put):
        masks = (torch.bool, torch.uint8)  # whose number of elements is looked for
        return any(i is not None and i.dtype in masks for i in args[1])
    return any(tag in func.tags for tag in _READS)


def _shares(found: Any, args: tuple[Any, ...]) -> bool:
    """Whether results lie in the memory of arguments."""
    given = {each.untyped_storage().data_ptr() for each in _tensors(args)}
    return all(each.untyped_storage().data_ptr() in given for each in _tensors(found))


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    """Carry out an operation, its results where they were."""
    results = func(*args, **kwargs)
    if func._schema.is_mutable:
        return  # They are arguments.
    pairs = zip(_tensors(found), _tensors(results), strict=True)
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, Tensor)]


def record(
    comm: fc.Communicator, calls: Callable[[], list[Tensor]]
) -> tuple[Callable[[], None], list[Tensor]]:
    """What makes ``calls`` again as they are made now, and their results."""
    recording = Recording()
    with recording.hooks(), recording:
        found = calls()
    return lambda: recording.replay(comm), found
