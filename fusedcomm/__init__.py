"""Tensor-parallel and expert-parallel layers whose communication hides behind their GEMMs."""

from fusedcomm import errors, nn, parallel
from fusedcomm.communicator import Communicator
from fusedcomm.errors import (
    AbortedError,
    ClosedError,
    FusedcommError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    SharedMemoryError,
)
from fusedcomm.ops.tensor_parallel import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.trace import trace

__version__ = "0.1.0.dev0"

__all__ = [
    "AbortedError",
    "ClosedError",
    "Communicator",
    "FusedcommError",
    "MismatchError",
    "PeerLostError",
    "PeerTimeoutError",
    "SharedMemoryError",
    "SymmetricTensor",
    "all_gather_linear",
    "errors",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "nn",
    "parallel",
    "replicated_linear",
    "trace",
]
