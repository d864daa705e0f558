"""How a schedule is carried out. Every engine has the same functions with the same arguments."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def operations_of(engine: str, family: str) -> ModuleType:
    """A family of operations on one engine, imported when it is first used.

    Args:
        engine: "triton", "host" or "plain"; or "across", of whichever engine, over several domains.
        family: a file name in ``ops``: "tensor_parallel".
    """
    return importlib.import_module(f"fusedcomm.engines.{engine}.{family}")
