"""What the checks on GPUs share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import fusedcomm as fc
from tests.gpu.recorded import record

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Seconds after which a wait that should end is given up.
LIMIT_S = 30.0


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def late() -> None:
    """Be late, by more than two calls take."""
    if DEVICE == "cuda":
        torch.cuda._sleep(2_000_000)  # clock cycles
    else:
        time.sleep(0.5)


def captured(
    comm: fc.Communicator, calls: Callable[[], list[torch.Tensor]]
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Capture ``calls`` in a graph: what replays it, and the results that a replay writes anew.

    On CPU ranks the calls are recorded and made again by a stand-in; see ``recorded``.
    """
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls()
        return graph.replay, found
    return record(comm, calls)


def comm_of(channel: str = "", timeout_s: float = LIMIT_S) -> fc.Communicator:
    return fc.Communicator.of(channel=channel, timeout_s=timeout_s)
