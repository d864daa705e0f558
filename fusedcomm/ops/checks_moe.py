"""Argument checks of the mixture of experts: a clear error, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.engines.experts import ACTIVATIONS, GATED, LAYOUTS
from fusedcomm.ops.checks import DTYPE_NAMES, DTYPES, check_like

INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
)


def check_rows(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.dim() < 2 or not x.shape[-1]:
        raise ValueError(f"{name} must be [tokens, hidden] or larger; got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be {DTYPE_NAMES}; got {x.dtype} (FP8 is not supported yet)")


def check_choices(x: Tensor, ids: Tensor, weights: Tensor | None) -> None:
    """Check that ids, and weights if there are any, are k for every token of x."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"topk_ids must be a tensor of integers; got {got}")
    if ids.dim() < 2 or ids.shape[:-1] != x.shape[:-1] or not ids.shape[-1]:
        raise ValueError(
            f"topk_ids must be {[*x.shape[:-1], 'k']}, k at least 1, for x of shape "
            f"{list(x.shape)}; got shape {list(ids.shape)}"
        )
    if ids.device != x.device:
        raise ValueError(f"topk_ids lies on {ids.device}, but x on {x.device}")
    if weights is None:
        return
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"topk_weights must be a tensor of floats, or None; got {got}")
    if weights.shape != ids.shape:
        raise ValueError(
            f"topk_weights must have the shape of topk_ids, {list(ids.shape)}; got "
            f"{list(weights.shape)}"
        )
    if weights.device != x.device:
        raise ValueError(f"topk_weights lies on {weights.device}, but x on {x.device}")


def check_num_tokens(x: Tensor, num_tokens: int | Tensor | None) -> None:
    """Check a number of tokens, as far as the host knows it."""
    tokens = x.shape[:-1].numel()
    if num_tokens is None:
        return
    if isinstance(num_tokens, Tensor):
        if num_tokens.dtype not in INTEGERS or num_tokens.numel() != 1:
            raise ValueError(
                "num_tokens must be one integer, or a tensor of one; got a tensor of "
                f"{num_tokens.dtype} with shape {list(num_tokens.shape)}"
            )
        if num_tokens.device not in (x.device, torch.device("cpu")):
            raise ValueError(f"num_tokens lies on {num_tokens.device}, but x on {x.device}")
    elif isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        got = type(num_tokens).__name__
        raise ValueError(f"num_tokens must be one integer, or a tensor of one; got {got}")
    elif not 0 <= num_tokens <= tokens:
        raise ValueError(f"num_tokens must be from 0 to the {tokens} of x; got {num_tokens}")


def check_terms(
    ids: Tensor,
    num_experts: int,
    world_size: int,
    align: int,
    capacity: int | None,
    max_tokens: int | None,
    overflow: str,
    placement: Sequence[int] | Tensor | None,
) -> tuple[int, ...]:
    """Check what all ranks must have alike; returns the rank of every expert, () for blocks."""
    whole = {"num_experts": num_experts, "align": align}
    limits = {"capacity": capacity, "max_tokens": max_tokens}
    whole |= {name: limit for name, limit in limits.items() if limit is not None}
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ValueError(f"{name} must be an integer; got {value!r}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be positive; got {num_experts}")
    if align < 1:
        raise ValueError(f"align must be positive; got {align}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity must not be negative; got {capacity}")
    if overflow not in ("error", "drop"):
        raise ValueError(f"overflow must be 'error' or 'drop'; got {overflow!r}")
    tokens = ids.shape[:-1].numel()
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"x has {tokens} tokens, but max_tokens is {max_tokens}")
    return check_placement(placement, num_experts, world_size)


def check_placement(
    placement: Sequence[int] | Tensor | None, num_experts: int, world_size: int
) -> tuple[int, ...]:
    """Check the rank of every expert; returns it, () for blocks."""
    if placement is None:
        return ()
    owners = placement.tolist() if isinstance(placement, Tensor) else placement
    owners = tuple(int(owner) for owner in owners)
    if len(owners) != num_experts or not all(0 <= owner < world_size for owner in owners):
        raise ValueError(
            f"placement must name a rank, 0 to {world_size - 1}, for each of {num_experts} "
            f"experts; got {list(owners)}"
        )
    return owners


def check_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    local: int,
    activation: str,
    layout: str,
    transposed: bool,
) -> None:
    """Check this rank's weights, of ``local`` experts."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"{name} must be a tensor of three dimensions; got {got}")
        if weight.shape[0] != local:
            raise ValueError(
                f"{name} has {weight.shape[0]} experts, but this rank has {local} of num_experts: "
                "ceil(E / W) each, the last ranks fewer, unless placement says otherwise"
            )
    hidden, ffn = x.shape[-1], w2.shape[1 if transposed else 2]
    width = 2 * ffn if activation in GATED else ffn
    shapes = {
        "w13": (w13, [local, hidden, width] if transposed else [local, width, hidden]),
        "w2": (w2, [local, ffn, hidden] if transposed else [local, hidden, ffn]),
        "b13": (b13, [local, width]),
        "b2": (b2, [local, hidden]),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or list(tensor.shape) != shape:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{name} must be {shape} for hidden {hidden}, ffn {ffn}, activation "
                f"{activation!r}, transposed={transposed}; got {got}"
            )
        check_like(name, tensor, x)


def check_beside(x: Tensor, beside: Any, dropped: Any) -> None:
    """Check what is called while rows are on their way, and where dropped choices are counted."""
    if beside is not None and not callable(beside):
        raise ValueError(f"beside must be a function; got {type(beside).__name__}")
    if dropped is None:
        return
    if not isinstance(dropped, Tensor) or dropped.dtype != torch.int64 or dropped.dim():
        got = (
            f"{dropped.dtype} {list(dropped.shape)}"
            if isinstance(dropped, Tensor)
            else type(dropped).__name__
        )
        raise ValueError(f"dropped must be a tensor, int64 of no dimension; got {got}")
    if dropped.device != x.device:
        raise ValueError(f"dropped lies on {dropped.device}, but x on {x.device}")
