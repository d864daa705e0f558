"""The ranks whose GPU memory torch pairs up, under the name by which it knows them."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName


class TorchGroup:
    """A process group, or some of its ranks, as torch's symmetric memory asks for them.

    For some of the ranks torch is given, at the first use, a group without a backend: it exchanges
    addresses through the store alone.

    Attributes:
        rank, world_size: this rank's number among them, and how many they are.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, store: dist.Store | None = None
    ) -> None:
        """
        Args:
            name: that of a process group; or, with a store, one that no other has in this process.
            store: in which only these ranks meet, and only for this.
        """
        self.rank, self.world_size = rank, world_size
        self._name, self._store = GroupName(name), store
        self._made: dist.ProcessGroup | None = None

    @property
    def name(self) -> GroupName:
        """For torch, which knows the group by it from now on."""
        if self._store is not None and self._made is None:
            self._made = dist.ProcessGroup(self._store, self.rank, self.world_size)
            _register_process_group(self._name, self._made)
        return self._name

    def close(self) -> None:
        """Have torch forget it; what it has paired stays."""
        if self._made is not None:
            _unregister_process_group(self._name)
            self._made = None
