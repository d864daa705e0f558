"""State dicts of the unsharded model, in and out of modules that hold shards."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fusedcomm.engines.plain.collectives import all_gather_rows
from fusedcomm.nn.linear import _ParallelLinear
from fusedcomm.schedule import shard_bounds


def _owners(module: nn.Module) -> dict[str, tuple[_ParallelLinear, str]]:
    """Full parameter name -> the parallel layer that holds a shard of it, and its name there."""
    return {
        f"{prefix}.{name}" if prefix else name: (layer, name)
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _ParallelLinear)
        for name in layer.shard_dims
        if getattr(layer, name) is not None
    }


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Load the unsharded model's state dict: each parallel layer takes its shard.

    Args:
        module: holds parallel layers anywhere inside; other parameters are loaded whole.
        state: names and full shapes as in the unsharded model; not changed. Memory-mapped tensors
            are read only where this rank's shard lies.
        strict: as in ``nn.Module.load_state_dict``.

    Raises:
        ValueError: a tensor has not the full shape that the layer's sizes demand.
        RuntimeError: names are missing or unexpected (``strict``).
    """
    owners = _owners(module)
    local: dict[str, Tensor] = {}
    for name, full in state.items():
        local[name] = full
        if name not in owners:
            continue
        layer, short = owners[name]
        expected = [layer.out_features, layer.in_features][: getattr(layer, short).dim()]
        if list(full.shape) != expected:
            raise ValueError(
                f"{name} has shape {list(full.shape)}, but the whole layer's is {expected}"
            )
        dim = layer.shard_dims[short]
        start, stop = layer._bounds(full.shape[dim])
        local[name] = full.narrow(dim, start, stop - start)
    module.load_state_dict(local, strict=strict)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The unsharded model's state dict, complete on every rank; collective.

    Every rank of the groups involved must call it. The tensors are copies, without gradient.
    """
    owners = _owners(module)
    return {
        name: _unshard(*owners[name]) if name in owners else value.detach().clone()
        for name, value in module.state_dict().items()
    }


def _unshard(layer: _ParallelLinear, name: str) -> Tensor:
    """Gather a parameter's shards, which may be of different sizes."""
    shard, dim, comm = getattr(layer, name).detach(), layer.shard_dims[name], layer.comm
    if comm.world_size == 1:
        return shard.clone()
    total = [layer.out_features, layer.in_features][dim]
    front = shard.movedim(dim, 0)
    rows, rest = front.reshape(front.shape[0], front.shape[1:].numel()), front.shape[1:]
    with comm.collective(f"full_state_dict {name} {[layer.out_features, layer.in_features]}"):
        bounds = shard_bounds(total, comm.world_size)
        gathered = all_gather_rows(comm, "full_state_dict", rows, bounds)
    return gathered.reshape(total, *rest).movedim(0, dim).contiguous()
