"""Process groups as users name them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def resolve_group(group: Any = None) -> dist.ProcessGroup:
    """The process group meant by a ``ProcessGroup``, a 1-D ``DeviceMesh`` or None (the default).

    Raises:
        ValueError: torch.distributed is not initialised, or the mesh has several dimensions.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group=None means torch.distributed's default group, which does not exist: call "
                "torch.distributed.init_process_group first (torchrun sets its environment)"
            )
        return distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, but an operation runs over "
                "one: choose it, as in mesh['tp']"
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is no member of the group: only its members make calls on it")
    raise ValueError(
        f"group must be a ProcessGroup, a 1-D DeviceMesh or None, not {type(group).__name__}"
    )


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of this rank of ``group`` lie."""
    if torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
