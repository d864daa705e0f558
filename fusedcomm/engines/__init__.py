"""How a schedule is carried out. Every engine has the same functions with the same arguments."""

from __future__ import annotations

import importlib
from types import ModuleType


def tensor_parallel_of(engine: str) -> ModuleType:
    """The tensor-parallel operations of "triton", "host" or "plain", imported when first used."""
    return importlib.import_module(f"fusedcomm.engines.{engine}.tensor_parallel")
