"""Ranks on this machine, each a process: for one call, or kept for many."""

from fusedcomm.ranks.once import launch, run_ranks
from fusedcomm.ranks.outcomes import Outcome, RankError
from fusedcomm.ranks.pool import RankPool
from fusedcomm.ranks.request import Emit

__all__ = ["Emit", "Outcome", "RankError", "RankPool", "launch", "run_ranks"]
