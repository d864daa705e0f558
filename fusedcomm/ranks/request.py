"""A call on its way to a rank: a function by name, its arguments by value."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusedcomm.ranks.wire import dumps

#: Sends a value to ``on_event`` of the process that made the call.
Emit = Callable[[Any], None]


@dataclass(frozen=True)
class Event:
    """A value that a rank sent before its call ended."""

    value: Any


@dataclass(frozen=True)
class Request:
    """A call, as it is sent to a rank.

    call        (function, arguments), pickled
    emitting    whether the function also takes what sends values to the caller meanwhile
    path        the sender's ``sys.path``: what is importable there is importable on the rank
    main        the sender's main program, if ``call`` needs it: ("path" or "module", its name)
    """

    call: bytes
    emitting: bool
    path: list[str]
    main: tuple[str, str] | None

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], emitting: bool) -> Request:
        """Raises ``ValueError`` if ``fn`` has no name to be found by, or an argument no pickle."""
        try:
            call = dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"fn must be importable by name and its arguments picklable, got {fn!r}: {error}"
            ) from error
        return cls(call, emitting, sys.path, _main_program() if b"__main__" in call else None)

    def carry_out(self, rank: int, emit: Emit) -> Any:
        """Calls ``fn(rank, *args)`` or ``fn(rank, emit, *args)`` in this process."""
        sys.path[:] = self.path
        if self.main is not None:
            _adopt_main(*self.main)
        fn, args = pickle.loads(self.call)
        return fn(rank, emit, *args) if self.emitting else fn(rank, *args)


def _main_program() -> tuple[str, str]:
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return "module", main.__spec__.name
    path = getattr(main, "__file__", None)
    if path is None:
        raise ValueError("fn must be importable: put it into a file, an interactive one is not")
    return "path", os.path.abspath(path)


def _adopt_main(kind: str, name: str) -> None:
    """Makes the sender's main program importable here, without running its main part.

    As ``multiprocessing`` does it: the program runs under the name ``__mp_main__``, and is then
    found as ``__main__`` too.
    """
    if sys.modules["__main__"].__name__ == "__mp_main__":
        return  # at an earlier call
    run = runpy.run_path if kind == "path" else runpy.run_module
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(run(name, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def adopting_main() -> bool:
    """Whether this is a rank that runs the sender's main program, only for its functions."""
    return (
        "__mp_main__" in sys.modules and sys.modules["__main__"] is not sys.modules["__mp_main__"]
    )
