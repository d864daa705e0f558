"""A communicator's memory: the workspaces of its operations, and the tensors users asked for."""

from __future__ import annotations

import weakref

import torch

from fusedcomm.gpu import is_capturing, refuse_growth
from fusedcomm.protocol import Call, Space, Workspace
from fusedcomm.symmetric.exchange import allocate
from fusedcomm.symmetric.groups import TorchGroup
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.waiting import Watch

_CPU = torch.device("cpu")


class Memory:
    """All memory that the ranks of a communicator can address.

    Attributes:
        first_epoch: where the counters of new memory start; tests set it near the wrap-around.
        workspaces: by kind, and place if it is not the CPU.
        outgrown: workspaces of captured graphs, which keep theirs until the communicator is closed.
    """

    def __init__(self, watch: Watch, group: TorchGroup) -> None:
        self.first_epoch = 0
        self.workspaces: dict[str, Workspace] = {}
        self.outgrown: list[Workspace] = []
        self._watch, self._group = watch, group
        self._tensors: dict[int, weakref.ref[SymmetricTensor]] = {}

    def take(self, op: str, space: Space) -> Call:
        """Within a call: a slot of a workspace, which is grown if it must be.

        Args:
            op: the operation's public name, for messages.
            space: what the call needs; the same on every rank.
        """
        found = self.workspaces.get(space.kind)
        if found is None or not found.fits(space):
            found = self.workspace(space)
        return Call(self._watch, found, op)

    def workspace(self, space: Space, device: torch.device = _CPU) -> Workspace:
        """Within a call: the workspace of a kind, grown if ``space`` does not fit."""
        key = _key(space, device)
        old = self.workspaces.get(key)
        if old is not None and old.fits(space):
            return old
        if old is not None:
            space = old.joined(space)
            # Readers keep their own mappings of the old memory; it goes when the last is done.
            del self.workspaces[key]
            if old.captured:
                self.outgrown.append(old)
        workspace = Workspace(self._watch, self._group, space, device, self.first_epoch)
        self.workspaces[key] = workspace
        return workspace

    def require_room(self, space: Space, device: torch.device) -> None:
        """Before a call: raise if memory would have to grow while a graph is captured.

        Raises:
            ValueError: it would.
        """
        old = self.workspaces.get(_key(space, device))
        if (old is None or not old.fits(space)) and is_capturing():
            refuse_growth(space)

    def fence(self) -> None:
        """Order the host's memory accesses before against those after."""
        self._watch.fence()

    def tensor(
        self, label: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> SymmetricTensor:
        """Within a call, whose text is ``label``: a new symmetric tensor."""
        size = torch.Size(shape).numel() * dtype.itemsize
        segments = allocate(self._watch, self._group, "tensor", label, size, device)
        number = self._watch.number
        made = SymmetricTensor(segments, self._watch.rank, shape, dtype, number)
        registry = self._tensors
        registry[number] = weakref.ref(made, lambda _: registry.pop(number, None))
        return made

    def tensors(self) -> list[SymmetricTensor]:
        """The symmetric tensors that are in use."""
        return [tensor for held in list(self._tensors.values()) if (tensor := held()) is not None]

    def find_symmetric(
        self, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[SymmetricTensor, int] | None:
        """The symmetric tensor in which the contiguous ``x`` lies, and its offset in bytes.

        None where x is also ``out``: peers may still read x when this rank's result is written.
        """
        if not self._tensors or not x.is_contiguous():
            return None
        if out is not None and out.data_ptr() == x.data_ptr():
            return None
        address = x.untyped_storage().data_ptr()
        for tensor in self.tensors():
            if address == tensor.address:
                return tensor, int(x.storage_offset()) * x.dtype.itemsize
        return None

    def sizes(self) -> dict[str, dict[str, int]]:
        """Kind of workspace -> bytes of data and of flags."""
        return {
            kind: {"data": workspace.data_bytes, "flags": workspace.flag_bytes}
            for kind, workspace in self.workspaces.items()
        }

    def close(self) -> None:
        """Let go of the workspaces; symmetric tensors live on for as long as they are held."""
        self.workspaces.clear()
        self.outgrown.clear()
        self._group.close()


def _key(space: Space, device: torch.device) -> str:
    return space.kind if device.type == "cpu" else f"{space.kind} on the GPU"
