"""Point-to-point transfers on torch.distributed; the functions are those of ``engines.host``.

What a pair's ranks send and receive is not compared: torch.distributed decides how a difference
shows.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from fusedcomm.communicator import Communicator


class Transfer(Work):
    """A transfer under way, ``is_completed`` when it is over.

    gloo completes its own objects only in ``wait``, where nobody would notice a dead peer: a thread
    of its own waits there.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        super().__init__()
        self._work = work
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if device.type == "cpu":
            self._thread = threading.Thread(target=self._await, daemon=True)
            self._thread.start()

    def _await(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error

    def is_completed(self) -> bool:
        if self._thread is None:
            return self._work.is_completed()
        return not self._thread.is_alive()

    def wait(self, timeout: object = None) -> bool:
        if self._thread is None:
            return self._work.wait()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True


def begin(comm: Communicator, sends: bool, x: Tensor, peer: int) -> Transfer:
    """Begin to send the contiguous ``x`` to ``peer``, or to receive into it."""
    with comm.pairwise():
        start = dist.isend if sends else dist.irecv
        data = x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
        try:
            work = start(data, dist.get_global_rank(comm.group, peer), group=comm.group)
        except RuntimeError as error:
            raise comm.torch.explained("point-to-point", error) from error
        assert work is not None
        return Transfer(work, x.device)


def finish(comm: Communicator, transfers: list[Transfer]) -> None:
    """Wait for all of them."""
    with comm.pairwise():
        for transfer in transfers:
            comm.torch.run("point-to-point", lambda work=transfer: work)  # type: ignore[misc]


def is_done(comm: Communicator, transfer: Transfer) -> bool:
    """Whether it is over."""
    return transfer.is_completed()
