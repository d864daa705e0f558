"""Tensors that every rank of a communicator can address."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedcomm.symmetric.cuda import CudaSegment
from fusedcomm.symmetric.shm import Segment


class SymmetricTensor:
    """A tensor allocated with the same shape by every rank, addressable by all of them.

    Attributes:
        local: this rank's tensor.
        peers: every rank's tensor, this rank's included, by rank.
        pointers: int64 ``[world_size]``, the addresses of ``peers`` as this rank's kernels see
            them; on the device of ``local``.
        number: names the allocation, equally on all ranks of its communicator.
        address, nbytes: where ``local`` lies in this process.
        multicast: address through which a switch writes to all ranks at once; None on CPU, and
            where there is no such switch.
    """

    def __init__(
        self,
        segments: Sequence[Segment | CudaSegment],
        rank: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        number: int,
    ) -> None:
        self.segments = segments
        self.number = number
        self.peers = [segment.tensor(0, shape, dtype) for segment in segments]
        self.local = self.peers[rank]
        addresses = [peer.data_ptr() for peer in self.peers]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=self.local.device)
        self.address = segments[rank].address
        self.nbytes = self.local.numel() * dtype.itemsize
        self.multicast = segments[rank].multicast

    def __repr__(self) -> str:
        return (
            f"SymmetricTensor(shape={tuple(self.local.shape)}, dtype={self.local.dtype}, "
            f"ranks={len(self.peers)})"
        )
