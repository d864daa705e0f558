"""The memory that calls take, for ``Communicator.reserve``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusedcomm.planning import collectives, exchanges, moe, tensor_parallel
from fusedcomm.protocol import Space

_CPU = torch.device("cpu")

_FAMILIES = (tensor_parallel, collectives, moe)


def spaces(
    op: str,
    shape: Sequence[int],
    world_size: int,
    dtype: torch.dtype,
    backward: bool,
    device: torch.device = _CPU,
) -> list[Space]:
    """The memory that calls of ``op`` on this global shape take in a group of one domain.

    Raises:
        ValueError: ``op`` is not known (for tensors on this device), or the shape is none.
    """
    for family in _FAMILIES:
        if op in family.OPS and device.type == "cpu":
            return family.spaces(op, shape, world_size, dtype, backward)
    if op in tensor_parallel.OPS:
        return tensor_parallel.gpu_spaces(op, shape, world_size, dtype)
    if op in collectives.OPS:
        return exchanges.spaces(op, shape, world_size, dtype, device)
    where = "" if device.type == "cpu" else f" with kernels for tensors on {device.type}"
    raise ValueError(f"reserve knows no operation {op!r}{where}")


def spaces_inside(
    op: str,
    shape: Sequence[int],
    domains: int,
    world_size: int,
    dtype: torch.dtype,
    backward: bool,
    device: torch.device = _CPU,
) -> list[Space]:
    """The same for each of several domains: what their calls on parts of the tensor take.

    Args:
        world_size: of every domain.

    Raises:
        ValueError: ``op`` is not known (for several domains), or the shape is none.
    """
    if op not in (*tensor_parallel.OPS, *collectives.OPS):
        raise ValueError(f"reserve knows no operation {op!r} of several domains")
    spaces(op, shape, world_size, dtype, backward, device)  # raises for a shape that is none
    ranks = domains * world_size

    def of(name: str, *extents: int) -> list[Space]:
        return spaces(name, extents, world_size, dtype, backward, device)

    if op in collectives.OPS:
        total = math.prod(shape)
        # All ranks' parts, as long as the longest, whichever dimension is cut.
        padded = max((-(-s // ranks) * ranks * (total // s) for s in shape if s), default=1)
        whole, part = (padded, padded // domains) if total else (0, 0)
        if op == "all_reduce":
            return [*of("reduce_scatter", whole), *of("all_gather", whole)]
        return of(op, whole if op in ("all_to_all", "broadcast") else part)
    *tokens, features = shape
    if op == "linear_all_reduce":  # It cuts the flattened rows.
        tokens = [math.prod(tokens)]
    rows = world_size * -(-tokens[0] // ranks)  # a domain's, each rank's as many as the most
    if op != "linear_all_reduce":
        return of(op, rows, *tokens[1:], features)
    scatter = of("linear_reduce_scatter", rows, features)
    if device.type == "cpu":
        return [*scatter, *of("all_gather_linear", rows, features)]
    return [*scatter, *of("all_gather", rows * features)]
