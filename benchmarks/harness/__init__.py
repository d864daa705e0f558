"""What every benchmark shares: cases, the measuring loop, statistics, shapes, the machine."""

from fusedcomm.benchmarks.harness.case import (
    Case,
    CaseResult,
    MemoryUse,
    Options,
    Path,
    PathResult,
    Prepared,
    Ranks,
    Tensors,
    Verdict,
    relative_bound,
)
from fusedcomm.benchmarks.harness.shapes import SHAPES, ModelShape
from fusedcomm.benchmarks.harness.stats import Estimate, compare

__all__ = [
    "SHAPES",
    "Case",
    "CaseResult",
    "Estimate",
    "MemoryUse",
    "ModelShape",
    "Options",
    "Path",
    "PathResult",
    "Prepared",
    "Ranks",
    "Tensors",
    "Verdict",
    "compare",
    "relative_bound",
]
