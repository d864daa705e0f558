"""Parallelism around the layers."""

from fusedcomm.parallel import data
from fusedcomm.parallel.replicated import sync_replicated
from fusedcomm.parallel.sequence import parallelize

__all__ = ["data", "parallelize", "sync_replicated"]
