"""Tensors on their way into and out of the products: DTensors or local, in any layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.communicator import Communicator
from fusedcomm.ops.layouts import gather_features, split_features


class Layouts(NamedTuple):
    """How a module meets the modules around it.

    Attributes:
        comm: the ranks.
        input: how an input lies that is no DTensor.
        output: how the output shall lie.
        local_output: whether it shall be a local tensor, not a DTensor.
        engine: as in :func:`fusedcomm.all_gather_linear`.
    """

    comm: Communicator
    input: Placement
    output: Placement
    local_output: bool
    engine: str


class Entered(NamedTuple):
    """A local input, and where and out of how much it was cut; None where it is whole."""

    x: Tensor
    dim: int | None
    size: int | None


def check_placement(name: str, placement: Placement) -> Placement:
    """``placement`` if a style can have it.

    Raises:
        ValueError: it is neither ``Shard`` nor ``Replicate``.
    """
    if type(placement) is not Shard and not isinstance(placement, Replicate):
        raise ValueError(
            f"{name} must be Shard(dim) or Replicate() of torch.distributed.tensor; got "
            f"{placement!r}"
        )
    return placement


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` if it is one-dimensional.

    Raises:
        ValueError: it is not.
    """
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        example = f"mesh[{names[-1]!r}]" if names else "init_device_mesh(…, mesh_dim_names=…)['tp']"
        raise ValueError(
            f"tensor parallelism runs over one dimension of a mesh, but this one has {mesh.ndim}"
            f"{f' ({names})' if names else ''}: choose it, as in {example}"
        )
    return mesh


def shard_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src: int | None
) -> None:
    """Replace a parameter by a DTensor of it.

    Args:
        src: the rank of the mesh whose values count; None: each rank's own.
    """
    whole = module._parameters.get(name)
    if whole is None:
        return
    cut = distribute_tensor(whole, mesh, [placement], src_data_rank=src)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def part_of(module: nn.Module, name: str, placement: Placement) -> Tensor | None:
    """This rank's part of a parameter, whose gradient becomes a DTensor with ``placement``.

    Raises:
        RuntimeError: it is no DTensor on a mesh of one dimension.
    """
    parameter = module._parameters[name]
    if parameter is None:
        return None
    if not isinstance(parameter, DTensor):
        raise RuntimeError(
            f"{name} of a parallelized {type(module).__name__} is no DTensor any more: load state "
            "dicts with torch.distributed.checkpoint, or distribute the tensor first"
        )
    if parameter.device_mesh.ndim != 1:
        raise RuntimeError(
            f"{name} is cut by FSDP at this moment (mesh {parameter.device_mesh}): call "
            "fully_shard on a module whose forward contains this use, and not on this one alone"
        )
    return parameter.to_local(grad_placements=[placement])


def enter_by_tokens(x: Tensor, layouts: Layouts, mesh: DeviceMesh) -> Entered:
    """An input of which all features are wanted: it may be cut by tokens, not by features."""
    if isinstance(x, DTensor):
        cut: DTensor = _on(x, mesh)
    elif isinstance(layouts.input, Replicate):
        return Entered(x, None, None)
    elif not _is_last(layouts.input, x.dim()):
        return Entered(x, dim_of(layouts.input, x.dim()), None)
    else:
        cut = DTensor.from_local(x, mesh, [layouts.input], run_check=False)
    (placement,) = cut.placements
    if not isinstance(placement, Replicate) and (
        type(placement) is not Shard or _is_last(placement, cut.dim())
    ):
        placement = Replicate()
        cut = cut.redistribute(placements=[placement])
    local = cut.to_local(grad_placements=[placement])
    if isinstance(placement, Replicate):
        return Entered(local, None, None)
    dim = dim_of(placement, cut.dim())
    return Entered(local, dim, cut.shape[dim])


def enter_by_features(x: Tensor, layouts: Layouts, mesh: DeviceMesh) -> Tensor:
    """An input of which all tokens are wanted, and this rank's features."""
    if isinstance(x, DTensor):
        cut: DTensor = _on(x, mesh)
    elif _is_last(layouts.input, x.dim()):
        return x
    elif isinstance(layouts.input, Replicate):
        return split_features(x, group=layouts.comm)
    else:
        cut = DTensor.from_local(x, mesh, [layouts.input], run_check=False)
    wanted = Shard(cut.dim() - 1)
    if not _is_last(cut.placements[0], cut.dim()):
        cut = cut.redistribute(placements=[wanted])
    return cut.to_local(grad_placements=[wanted])


def leave(
    y: Tensor, placement: Placement, shape: torch.Size | list[int], module: nn.Linear
) -> Tensor:
    """An output as the module's layouts want it.

    Args:
        y: this rank's part.
        placement: how it was cut.
        shape: of the whole.
    """
    layouts: Layouts = module.layouts  # type: ignore[assignment]
    wanted = from_left(layouts.output, len(shape))
    if isinstance(wanted, Replicate) and _is_last(placement, len(shape)):
        y = gather_features(y, group=layouts.comm, gathered_size=shape[-1])
        placement = wanted
    if layouts.local_output and wanted == placement:
        return y
    mesh = module.weight.device_mesh  # type: ignore[attr-defined]  # a DTensor
    whole = as_whole(y, mesh, placement, shape)
    if wanted != placement:
        whole = whole.redistribute(placements=[wanted])
    return whole.to_local(grad_placements=[wanted]) if layouts.local_output else whole


def as_whole(
    y: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | list[int]
) -> DTensor:
    """This rank's part of a contiguous tensor of that shape, as a DTensor; shards of any sizes."""
    strides = [1]
    for extent in reversed(list(shape)[1:]):
        strides.insert(0, strides[0] * extent)
    return DTensor.from_local(
        y, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _on(x: DTensor, mesh: DeviceMesh) -> DTensor:
    if x.device_mesh != mesh:
        raise ValueError(
            f"the input is a DTensor on {x.device_mesh}, but the module was cut over {mesh}"
        )
    return x


def _is_last(placement: Placement, ndim: int) -> bool:
    return type(placement) is Shard and placement.dim in (-1, ndim - 1)


def from_left(placement: Placement, ndim: int) -> Placement:
    """The same placement, its dimension counted from the left."""
    return Shard(dim_of(placement, ndim)) if isinstance(placement, Shard) else placement


def dim_of(placement: Placement, ndim: int) -> int:
    """The dimension that a ``Shard`` cuts, counted from the left."""
    dim = placement.dim  # type: ignore[attr-defined]
    if not -ndim <= dim < ndim:
        raise ValueError(f"{placement} is none of the dimensions of a tensor that has {ndim}")
    return dim % ndim
