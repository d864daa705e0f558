"""Parallelism around the layers."""

from fusedcomm.parallel.replicated import sync_replicated
from fusedcomm.parallel.sequence import parallelize

__all__ = ["parallelize", "sync_replicated"]
