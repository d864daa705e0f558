"""How data gets from one domain to another: by torch's backends, from wherever it lies.

============== ============================ ====================================================
tensors on     the group's backend for them what carries them
============== ============================ ====================================================
CPU            any                          gloo, which the host waits for
GPU            nccl                         NCCL, which the GPU waits for in the order of its stream
GPU            another, as gloo             gloo, from and to pinned memory of the host
============== ============================ ====================================================

Tensors are contiguous, and not to be used before the wait for what these functions return.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.waiting import Pending

#: The most multiprocessors that NCCL takes for a crossing. Kernels beside it leave them free.
CROSSING_PROGRAMS = 8


class Carrier:
    """A torch backend that takes tensors where they lie."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Pending:
        return self.begun(
            self.backend.alltoall_base(received, sent, list(received_rows), list(sent_rows))
        )

    def broadcast(self, tensor: Tensor, source: int, mine: bool) -> Pending:
        """``mine``: whether this rank is the source."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.begun(self.backend.broadcast([tensor], options))

    def begun(self, work: dist.Work) -> Pending:
        return work


class OnStream(Carrier):
    """A backend of GPUs: what it does is behind the work on the stream of the call."""

    def begun(self, work: dist.Work) -> Pending:
        return _OnStream(work)


class _OnStream:
    """The host has nothing to wait for; what is put on the stream after the wait comes later."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self._work.wait()


class Staged:
    """A backend of CPU ranks, and pinned memory for tensors of a GPU.

    A call begins when the GPU has made what it sends: the host waits for that.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Pending:
        landing = _pinned(received)
        work = self._carrier.all_to_all(landing, _on_host(sent), received_rows, sent_rows)
        return _Landing(work, landing, received)

    def broadcast(self, tensor: Tensor, source: int, mine: bool) -> Pending:
        landing = _on_host(tensor) if mine else _pinned(tensor)
        return _Landing(self._carrier.broadcast(landing, source, mine), landing, tensor)


class _Landing:
    """Data that comes to pinned memory, and goes on to the GPU in the wait."""

    def __init__(self, work: Pending, landing: Tensor, target: Tensor) -> None:
        self._work, self._landing, self._target = work, landing, target

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._landing, non_blocking=True)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _on_host(x: Tensor) -> Tensor:
    """A copy of x, complete."""
    copy = _pinned(x)
    copy.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return copy


def nccl(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> OnStream:
    """NCCL among ranks that meet in a store of their own; they connect in their first call."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = CROSSING_PROGRAMS
    return OnStream(dist.ProcessGroupNCCL(store, rank, world_size, options))
