"""Argument checks of the operations: a clear error on this rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.planning import ENGINES
from fusedcomm.schedule import shard_bounds

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPE_NAMES = "float32, float16, bfloat16 or float64"


def check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")


def check_int(name: str, value: object) -> None:
    """Check that an argument is a whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an int; got {value!r}")


def check_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Check that every ``x · weightᵀ + bias`` can be computed."""
    for name, value in (("x", x), ("weight", weights), ("bias", biases)):
        values = value if isinstance(value, (list, tuple)) else [value]
        for entry in values:
            if not isinstance(entry, Tensor) and not (name == "bias" and entry is None):
                raise ValueError(f"{name} must be a tensor; got {type(entry).__name__}")
    if x.dim() < 2:
        raise ValueError(f"x must be [tokens, features] or larger; got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be {DTYPE_NAMES}; got {x.dtype} (FP8 is not supported yet)")
    if not weights:
        raise ValueError("weight is an empty sequence; give at least one")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        name = "weight" if len(weights) == 1 else f"weight[{i}]"
        if weight.dim() != 2:
            raise ValueError(f"{name} must be [out, in]; got shape {list(weight.shape)}")
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name} is [{weight.shape[0]}, {weight.shape[1]}], but x has {x.shape[-1]} "
                f"features: {name} must be [out, {x.shape[-1]}], this rank's part of it"
            )
        check_like(name, weight, x)
        if bias is None:
            continue
        name = name.replace("weight", "bias")
        if list(bias.shape) != [weight.shape[0]]:
            raise ValueError(f"{name} must be [{weight.shape[0]}]; got shape {list(bias.shape)}")
        check_like(name, bias, x)


def check_shard(x: Tensor, dim: int, gathered_size: int | None, rank: int, world_size: int) -> int:
    """Check that x is this rank's shard; returns ``dim`` counted from the left."""
    left = _check_dim("gather_dim", x, dim)
    if gathered_size is None:
        return left
    check_int("gathered_size", gathered_size)
    if gathered_size < 0:
        raise ValueError(f"gathered_size must not be negative; got {gathered_size}")
    start, stop = shard_bounds(gathered_size, world_size)[rank]
    if x.shape[left] != stop - start:
        raise ValueError(
            f"x has {x.shape[left]} rows in dimension {left}, but of gathered_size={gathered_size} "
            f"rank {rank} of {world_size} has {stop - start} (torch.chunk's rule)"
        )
    return left


def check_scattered(x: Tensor, dim: int) -> int:
    """Check the dimension to scatter along; returns it counted from the left."""
    return _check_dim("scatter_dim", x, dim)


def check_wire_dtype(x: Tensor, wire_dtype: torch.dtype | None) -> None:
    if wire_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"wire_dtype must be x's dtype or float32; got {wire_dtype}")
    if wire_dtype == torch.float32 and x.dtype == torch.float64:
        raise ValueError("wire_dtype=float32 would narrow a float64 x; leave it out")


def _check_dim(name: str, x: Tensor, dim: int) -> int:
    check_int(name, dim)
    left = dim + x.dim() if dim < 0 else dim
    if not 0 <= left < x.dim() - 1:
        raise ValueError(
            f"{name}={dim} is none of the token dimensions of x, 0 to {x.dim() - 2} "
            f"(shape {list(x.shape)}; the last holds the features)"
        )
    return left


def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Check that a tensor has the dtype and the device of x."""
    if tensor.dtype != x.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but x is {x.dtype}; they must be equal")
    if tensor.device != x.device:
        raise ValueError(f"{name} lies on {tensor.device}, but x on {x.device}")
