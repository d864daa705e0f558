"""Point-to-point transfers on shared memory; see ``fusedcomm.pairs``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.circles import RECV, SEND
from fusedcomm.communicator import Communicator
from fusedcomm.pairs import Transfer


def begin(comm: Communicator, sends: bool, x: Tensor, peer: int) -> Transfer:
    """Begin to send the contiguous ``x`` to ``peer``, or to receive into it."""
    with comm.pairwise() as pairs:
        # A single element may have any stride, which a view as bytes does not take.
        data = x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
        text = f"{x.dtype} {list(x.shape)}"
        return pairs.begin(SEND if sends else RECV, peer, data, text)


def finish(comm: Communicator, transfers: list[Transfer]) -> None:
    """Wait for all of them; each goes on while another one is waited for."""
    with comm.pairwise():
        for transfer in transfers:
            transfer.wait()


def is_done(comm: Communicator, transfer: Transfer) -> bool:
    """Whether it is over; lets all transfers go on."""
    with comm.pairwise():
        return transfer.done
