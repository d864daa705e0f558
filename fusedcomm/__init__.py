"""Tensor-parallel and expert-parallel layers whose communication hides behind their GEMMs."""

import importlib
from typing import TYPE_CHECKING, Any

from fusedcomm import errors, nn, parallel, topology
from fusedcomm.communicator import Communicator
from fusedcomm.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    FusedcommError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    SharedMemoryError,
)
from fusedcomm.ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from fusedcomm.ops.moe import Dispatched, combine, dispatch, moe_ffn
from fusedcomm.ops.point_to_point import batch_send_recv, irecv, isend, recv, send
from fusedcomm.ops.tensor_parallel import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)
from fusedcomm.ops.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
from fusedcomm.parallel import parallelize
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import trace

if TYPE_CHECKING:
    from fusedcomm.integrations.dtensor import (
        FusedColwiseParallel,
        FusedGatherParallel,
        FusedRowwiseParallel,
        FusedSequenceParallel,
        ReplicateParallel,
        parallelize_module,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "AbortedError",
    "CapacityError",
    "ClosedError",
    "Communicator",
    "Dispatched",
    "FusedColwiseParallel",
    "FusedGatherParallel",
    "FusedRowwiseParallel",
    "FusedSequenceParallel",
    "FusedcommError",
    "MismatchError",
    "PeerLostError",
    "PeerTimeoutError",
    "ReplicateParallel",
    "SharedMemoryError",
    "SymmetricTensor",
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_to_all",
    "batch_send_recv",
    "broadcast",
    "combine",
    "dispatch",
    "errors",
    "irecv",
    "isend",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "moe_ffn",
    "nn",
    "parallel",
    "parallelize_module",
    "parallelize",
    "recv",
    "reduce_scatter",
    "replicated_linear",
    "send",
    "topology",
    "trace",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]


#: Names that are imported when they are first used: DTensors take long, and most do without.
_LATER = {
    name: "fusedcomm.integrations.dtensor"
    for name in (
        "FusedColwiseParallel",
        "FusedGatherParallel",
        "FusedRowwiseParallel",
        "FusedSequenceParallel",
        "ReplicateParallel",
        "parallelize_module",
    )
}


def __getattr__(name: str) -> Any:
    """Parts that most programs do without are imported when they are first used."""
    if name in ("integrations", "testing"):
        return importlib.import_module(f"fusedcomm.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fusedcomm' has no attribute {name!r}")
