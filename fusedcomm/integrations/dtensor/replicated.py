"""``FusedSequenceParallel`` and ``ReplicateParallel``: modules whose parameters all ranks have."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.communicator import Communicator
from fusedcomm.integrations.dtensor.layouts import (
    as_whole,
    check_mesh,
    check_placement,
    from_left,
    shard_parameter,
)
from fusedcomm.parallel.partial import SummedGradients


class _Replicated(ParallelStyle):
    """Parameters become replicated DTensors; the module computes on local tensors."""

    _summed: bool

    def __init__(self, entering: Placement, leaving: Placement, use_local_output: bool) -> None:
        super().__init__()
        self._entering, self._leaving = entering, leaving
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = Communicator.of(check_mesh(device_mesh))
        for path, inner in module.named_modules():
            own = [name for name, value in inner._parameters.items() if value is not None]
            for name in own:
                if isinstance(inner._parameters[name], DTensor):
                    continue  # parallelized before, by a style for a part of this module
                shard_parameter(inner, name, device_mesh, Replicate(), self.src_data_rank)
            if own:
                label = ".".join(filter(None, (type(module).__name__, path)))
                SummedGradients(comm, label, summed=self._summed).install(inner)
        edges = _Edges(device_mesh, self._entering, self._leaving, self.use_local_output)
        module.register_forward_pre_hook(edges.enter)
        module.register_forward_hook(edges.leave)
        return module


class FusedSequenceParallel(_Replicated):
    """A norm (or another module that treats each token alone) on token shards.

    As torch's ``SequenceParallel``, but for three things: ranks need not have equal parameters
    before (rank 0's count, or see ``src_data_rank``), the module computes on plain tensors, and the
    parameters' gradients are summed over the ranks within the backward pass, under gradient
    accumulation, activation checkpointing and FSDP2 as well.

    Args:
        sequence_dim: the token dimension that is cut. A DTensor input that lies otherwise is
            redistributed; one that is no DTensor is this rank's shard, equal on all ranks.
        use_local_output: return a local tensor, not a DTensor.
    """

    _summed = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(Shard(sequence_dim), Shard(sequence_dim), use_local_output)

    def __repr__(self) -> str:
        return (
            f"FusedSequenceParallel(sequence_dim={self._entering.dim}, "  # type: ignore
            f"use_local_output={self.use_local_output})"
        )


class ReplicateParallel(_Replicated):
    """A module that every rank computes alike, on all tokens: nothing is exchanged.

    Its parameters become DTensors on the mesh of all others, which gradient-norm clipping,
    optimizers with ``foreach`` and FSDP2 need.

    Args:
        output_layouts: ``Replicate()`` (default), or ``Shard(dim)``: the output is cut, as at the
            entrance of a model that goes on with token shards. Its gradient is gathered there.
        use_local_output: return a local tensor, not a DTensor.
    """

    _summed = False

    def __init__(
        self, *, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        leaving = check_placement("output_layouts", output_layouts or Replicate())
        super().__init__(Replicate(), leaving, use_local_output)

    def __repr__(self) -> str:
        return (
            f"ReplicateParallel(output_layouts={self._leaving}, "
            f"use_local_output={self.use_local_output})"
        )


class _Edges:
    """The hooks that take DTensors off a module's input and put them on its output.

    Keyword arguments and further positional ones pass as they are.
    """

    def __init__(
        self, mesh: DeviceMesh, entering: Placement, leaving: Placement, local_output: bool
    ) -> None:
        self.mesh = mesh
        self.entering, self.leaving = entering, leaving
        self.local_output = local_output
        self._size: int | None = None  # of the cut dimension, of the whole input

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Before the module's forward."""
        self._size = None
        if not args or not isinstance(args[0], DTensor):
            return None
        x = args[0]
        placement = from_left(self.entering, x.dim())
        if x.placements != (placement,):
            x = x.redistribute(placements=[placement])
        if isinstance(placement, Shard):
            self._size = x.shape[placement.dim]
        return (x.to_local(grad_placements=[placement]), *args[1:])

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After it."""
        if not isinstance(output, Tensor):
            return None
        placement = from_left(self.entering, output.dim())
        wanted = from_left(self.leaving, output.dim())
        if self.local_output and placement == wanted:
            return None
        shape = list(output.shape)
        if isinstance(placement, Shard):
            size, dim = self._size, placement.dim
            shape[dim] = shape[dim] * self.mesh.size() if size is None else size
        whole = as_whole(output, self.mesh, placement, shape)
        if placement != wanted:
            whole = whole.redistribute(placements=[wanted])
        return whole.to_local(grad_placements=[wanted]) if self.local_output else whole
