"""Parallelism around the layers."""

from fusedcomm.parallel.replicated import sync_replicated

__all__ = ["sync_replicated"]
