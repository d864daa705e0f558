"""State dicts of the unsharded model, in and out of modules that hold shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusedcomm.communicator import Communicator
from fusedcomm.engines.plain.collectives import all_gather_rows
from fusedcomm.nn.sharded import ShardedModule, as_dtensor, is_dtensor


def _owners(module: nn.Module) -> dict[str, tuple[ShardedModule, str]]:
    """Full parameter name -> the module that holds a shard of it, and its name there."""
    return {
        f"{prefix}.{name}" if prefix else name: (layer, name)
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, ShardedModule)
        for name in layer.shard_dims
        if getattr(layer, name, None) is not None
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
    held = module.state_dict()
    parts: dict[str, Tensor] = {}
    for name, full in state.items():
        parts[name] = full
        like = held.get(name)
        cut = like is not None and is_dtensor(like)
        if name in owners:
            layer, short = owners[name]
            expected = layer.full_shape(short)
            if list(full.shape) != expected:
                raise ValueError(
                    f"{name} has shape {list(full.shape)}, but the whole layer's is {expected}"
                )
            if not cut or layer.is_of_part(like):
                parts[name] = layer.own_part(short, full)
        if cut:
            parts[name] = as_dtensor(parts[name], like)
    module.load_state_dict(parts, strict=strict)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The unsharded model's state dict, complete on every rank; collective.

    Every rank of the groups involved must call it. The tensors are copies, without gradient.
    """
    owners = _owners(module)
    full: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        of_part = name in owners
        if is_dtensor(value):
            of_part = of_part and owners[name][0].is_of_part(value)
            value = value.full_tensor()
        value = value.detach()
        full[name] = _unshard(*owners[name], value) if of_part else value.clone()
    return full


def _unshard(layer: ShardedModule, name: str, shard: Tensor) -> Tensor:
    """Gather a parameter's shards, which may be of different sizes."""
    dim, comm = layer.shard_dims[name], layer.comm
    if comm.world_size == 1:
        return shard.clone()
    shape = layer.full_shape(name)
    bounds = layer.shards(shape[dim])
    front = shard.movedim(dim, 0)
    rows, rest = front.reshape(front.shape[0], front.shape[1:].numel()), front.shape[1:]
    order = layer.order
    text = f"full_state_dict {name} {shape}" + ("" if order is None else f" {bounds} of {order}")
    with comm.collective(text):
        if order is None:
            gathered = all_gather_rows(comm, "full_state_dict", rows, bounds)
        else:
            gathered = _in_order(comm, rows, bounds, order)
    return gathered.reshape(shape[dim], *rest).movedim(0, dim).contiguous()


def _in_order(
    comm: Communicator, rows: Tensor, bounds: list[tuple[int, int]], order: Sequence[int]
) -> Tensor:
    """Gather rows of which each rank has any number, in any order."""
    most = max(stop - start for start, stop in bounds)
    padded = rows.new_zeros(most, rows.shape[1])
    padded[: rows.shape[0]] = rows
    equal = [(rank * most, (rank + 1) * most) for rank in range(comm.world_size)]
    gathered = all_gather_rows(comm, "full_state_dict", padded, equal)
    place = torch.empty(len(order), dtype=torch.int64)
    for (start, stop), (first, _) in zip(bounds, equal, strict=True):
        place[list(order[start:stop])] = torch.arange(first, first + stop - start)
    return gathered.index_select(0, place.to(gathered.device))
