"""Running code on several ranks of one machine, and disturbing it on purpose.

``run_ranks`` starts ranks for one call, a ``RankPool`` keeps them for many. ``straggler`` delays
one rank at a point of the protocol, ``disturb`` does anything else to it there.
"""

from __future__ import annotations

from fusedcomm.ranks import Outcome, RankError, RankPool, run_ranks
from fusedcomm.testing.disturb import disturb, straggler

__all__ = ["Outcome", "RankError", "RankPool", "disturb", "run_ranks", "straggler"]
