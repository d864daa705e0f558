"""Running code on several ranks of one machine, and disturbing it on purpose.

``run_ranks`` starts ranks for one call; a ``RankPool`` keeps them for many. ``straggler`` delays one
rank at a named point of the protocol.
"""

from __future__ import annotations

from fusedcomm.testing.outcomes import Outcome, RankError
from fusedcomm.testing.ranks import RankPool, run_ranks
from fusedcomm.testing.straggler import straggler

__all__ = ["Outcome", "RankError", "RankPool", "run_ranks", "straggler"]
