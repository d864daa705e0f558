"""Collectives as explicit programs of steps: pure functions of integers, no torch, no memory.

A program is one rank's list of ``Send`` and ``Receive`` steps. An engine executes it on shared
memory; ``recording`` executes the same one on nothing, and counts.
"""

from fusedcomm.programs.all_reduce import ALGORITHMS, all_reduce_programs
from fusedcomm.programs.recording import Counts, record
from fusedcomm.programs.steps import Program, Receive, Send, Step

__all__ = [
    "ALGORITHMS",
    "Counts",
    "Program",
    "Receive",
    "Send",
    "Step",
    "all_reduce_programs",
    "record",
]
