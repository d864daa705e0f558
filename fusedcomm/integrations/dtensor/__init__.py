"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``.

::

    plan = {
        "norm": fc.FusedSequenceParallel(),
        "attention": fc.FusedGatherParallel(("q_proj", "k_proj", "v_proj"), input_layouts=Shard(1)),
        "attention.o_proj": fc.FusedRowwiseParallel(output_layouts=Shard(1)),
    }
    fc.parallelize_module(block, mesh["tp"], plan)   # or torch's own, which skips unknown keys

===================== =============================== ==========================================
style                 stands for torch's              exchanges
===================== =============================== ==========================================
FusedColwiseParallel  ColwiseParallel of a Linear     beside the product: all-gather of the input
                                                      (if it is cut by tokens); in the backward
                                                      pass its reduce-scatter or all-reduce
FusedRowwiseParallel  RowwiseParallel of a Linear     beside the product: reduce-scatter or
                                                      all-reduce of the output
FusedGatherParallel   ColwiseParallel of several      those of FusedColwiseParallel, once for all
                      Linears with one input
FusedSequenceParallel SequenceParallel                sums the parameters' gradients
ReplicateParallel     (none)                          nothing
===================== =============================== ==========================================

Parameters become DTensors under their old names; modules stay where they are and change class, so
that ``deepcopy`` and pickling work. All gradients are complete DTensors with the placement of their
parameter, never partial sums. Layouts mean what they mean to torch's styles.
"""

from fusedcomm.integrations.dtensor.gather import FusedGatherParallel
from fusedcomm.integrations.dtensor.plan import parallelize_module
from fusedcomm.integrations.dtensor.replicated import FusedSequenceParallel, ReplicateParallel
from fusedcomm.integrations.dtensor.styles import FusedColwiseParallel, FusedRowwiseParallel

__all__ = [
    "FusedColwiseParallel",
    "FusedGatherParallel",
    "FusedRowwiseParallel",
    "FusedSequenceParallel",
    "ReplicateParallel",
    "parallelize_module",
]
