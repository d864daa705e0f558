"""What all modules share whose parameters are cut over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.ops.dispatch import communicator_of
from fusedcomm.schedule import scaled_bounds


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter: of a DTensor its shard, of another tensor all there is."""
    return parameter.to_local() if is_dtensor(parameter) else parameter  # type: ignore


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing them (0.7 s) where there are none."""
    loaded: Any = getattr(torch.distributed, "tensor", None)  # there once it was imported
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def as_dtensor(whole: Tensor, like: Any) -> Any:
    """A tensor that every rank has whole as a DTensor that is laid out as ``like``."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.detach().to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


class ShardedModule(nn.Module):
    """A module that holds this rank's shards of parameters.

    Attributes:
        comm: the ranks.
        shard_dims: parameter name -> the dimension it is cut along; one not named is replicated.
        unit: cut dimensions are divided in multiples of this (an attention head's size, say).
        order: the indices of a cut dimension in the order in which they lie on the ranks; None for
            their own.
    """

    shard_dims: Mapping[str, int] = {}
    order: Sequence[int] | None = None

    def __init__(self, group: Any = None, unit: int = 1) -> None:
        super().__init__()
        self.comm = communicator_of(group)
        self.unit = unit

    def full_shape(self, name: str) -> list[int]:
        """The shape of the whole parameter."""
        raise NotImplementedError

    def shards(self, total: int) -> list[tuple[int, int]]:
        """How the ranks divide a dimension, in its ``order``: (start, stop) of each."""
        if self.unit < 1 or total % self.unit:
            raise ValueError(
                f"{type(self).__name__} cannot cut {total} features in multiples of {self.unit}"
            )
        return scaled_bounds(total // self.unit, self.comm.world_size, self.unit)

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a whole parameter, a view (a copy where there is an ``order``)."""
        dim = self.shard_dims.get(name)
        if dim is None:
            return full
        start, stop = self.shards(full.shape[dim])[self.comm.rank]
        if self.order is None:
            return full.narrow(dim, start, stop - start)
        own = torch.tensor(self.order[start:stop], dtype=torch.int64, device=full.device)
        return full.index_select(dim, own)

    def own_shape(self, name: str) -> list[int]:
        """The shape of this rank's shard."""
        shape = self.full_shape(name)
        dim = self.shard_dims.get(name)
        if dim is not None:
            start, stop = self.shards(shape[dim])[self.comm.rank]
            shape[dim] = stop - start
        return shape

    def is_of_part(self, value: Any) -> bool:
        """Whether a DTensor is cut out of this rank's part alone (as FSDP does), not of the whole.

        Its mesh then has no other rank of this module's.
        """
        mesh = value.device_mesh.mesh.flatten().tolist()
        ranks = torch.distributed.get_process_group_ranks(self.comm.group)
        return len(ranks) > 1 and len(set(mesh).intersection(ranks)) == 1

    def load_part(self, name: str, full: Tensor) -> None:
        """Fill a parameter with this rank's shard of the whole one."""
        with torch.no_grad():
            local(getattr(self, name)).copy_(self.own_part(name, full))

    def adopt(self, whole: nn.Module) -> Any:
        """Take the parts of the module that this one stands for: shards, frozenness, mode."""
        with torch.no_grad():
            for name, parameter in whole.named_parameters(recurse=False):
                self.load_part(name, parameter)
                getattr(self, name).requires_grad_(parameter.requires_grad)
        return self.train(whole.training)
