"""Which engine and which chunking an operation uses, and why; one file per family of operations.

Decided only from facts that are equal on all ranks: global shape, dtype, world size, device kind,
whether the group shares memory. So every rank comes to the same answer without asking.
"""

from __future__ import annotations

from fusedcomm.planning.engine import ENGINES
from fusedcomm.planning.memory import spaces, spaces_inside

__all__ = ["ENGINES", "spaces", "spaces_inside"]
