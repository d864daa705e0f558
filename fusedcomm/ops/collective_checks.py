"""Argument checks of the collectives: a clear error on this rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.ops.checks import check_int

REDUCTIONS = ("sum", "avg", "max", "min")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check_tensor(x: Tensor, name: str = "x") -> None:
    """Check that x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.layout != torch.strided or x.is_quantized:
        raise ValueError(f"{name} must be a dense tensor; its layout is {x.layout}")


def check_reduction(x: Tensor, op: str) -> None:
    """Check that x's dtype can be reduced by ``op``."""
    if op not in REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}; got {op!r}")
    if x.dtype in _FLOATS:
        return
    if x.dtype in _INTEGERS:
        if op == "avg":
            raise ValueError(f"op='avg' needs a floating dtype; x is {x.dtype}")
        return
    if x.dtype == torch.bool and op in ("max", "min"):
        return
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in (*_FLOATS, *_INTEGERS))
    hint = " (bool: 'max' is or, 'min' is and)" if x.dtype == torch.bool else ""
    raise ValueError(f"op={op!r} reduces {known}; x is {x.dtype}{hint}")


def check_dim(x: Tensor, dim: int) -> int:
    """Check a dimension of x; returns it counted from the left."""
    check_int("dim", dim)
    left = dim + x.dim() if dim < 0 else dim
    if not 0 <= left < x.dim():
        raise ValueError(
            f"dim={dim} is no dimension of x, which has shape {list(x.shape)}"
            + ("" if x.dim() else " (a scalar: unsqueeze it)")
        )
    return left


def check_rank(name: str, rank: int, world_size: int) -> None:
    """Check a rank of the group."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"{name} must be a rank of the group, 0 to {world_size - 1}; got {rank!r}")


def check_counts(
    x: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    rank: int,
    world_size: int,
) -> None:
    """Check what an all-to-all is cut into."""
    if x.dim() < 1:
        raise ValueError("x must have a dimension of rows to be cut along; got a scalar")
    rows = x.shape[0]
    if send_counts is None and recv_counts is None:
        if rows % world_size:
            raise ValueError(
                f"x has {rows} rows, which {world_size} ranks cannot share equally: give "
                "send_counts and recv_counts"
            )
        return
    if send_counts is None or recv_counts is None:
        given = "send_counts" if recv_counts is None else "recv_counts"
        raise ValueError(f"send_counts and recv_counts come together; only {given} is given")
    for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if len(counts) != world_size or min(counts) < 0:
            raise ValueError(
                f"{name} must be {world_size} numbers of rows, one per rank; got {counts}"
            )
    if sum(send_counts) != rows:
        raise ValueError(f"send_counts add up to {sum(send_counts)}, but x has {rows} rows")
    if send_counts[rank] != recv_counts[rank]:
        raise ValueError(
            f"send_counts[{rank}] = {send_counts[rank]} and recv_counts[{rank}] = "
            f"{recv_counts[rank]} both are what this rank keeps, and must be equal"
        )


def whole_numbers(name: str, counts: Sequence[int] | None) -> list[int] | None:
    """``counts`` as a list, where they are given: of a sequence or a tensor of integers."""
    if counts is None:
        return None
    try:
        whole = [int(count) for count in counts]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be whole numbers of rows; got {counts!r}") from error
    if any(given != count for given, count in zip(counts, whole, strict=True)):
        raise ValueError(f"{name} must be whole numbers of rows; got {counts!r}")
    return whole


def may_be_written(x: Tensor) -> bool:
    """Whether torch lets x be written to here: a tensor of inference mode only in that mode."""
    if torch.compiler.is_compiling():
        return True  # It cannot be asked, and nothing is written to: the result is made apart.
    return not x.is_inference() or torch.is_inference_mode_enabled()


def check_fillable(x: Tensor, name: str) -> None:
    """Check a tensor that is to be filled."""
    if not may_be_written(x):
        raise ValueError(
            f"{name} was made under torch.inference_mode(), and is not to be changed outside of it"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} is expanded, so that its elements share memory; clone() it")


def check_out(x: Tensor, out: Tensor, shape: Sequence[int], *, in_place: bool) -> None:
    """Check that a result of ``shape`` can be put into ``out``.

    Args:
        in_place: whether out may be x itself.
    """
    check_tensor(out, "out")
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must be {list(shape)} {x.dtype} on {x.device}; got {list(out.shape)} "
            f"{out.dtype} on {out.device}"
        )
    check_fillable(out, "out")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            "out= has no derivative: leave it out, or work under torch.no_grad() or on x.detach()"
        )
    if torch.compiler.is_compiling():
        return  # The result is made apart and copied, so that it does not matter where it goes.
    same = (
        in_place
        and out.data_ptr() == x.data_ptr()
        and out.stride() == x.stride()
        and x.is_contiguous()
    )
    if not same and _overlap(x, out):
        raise ValueError(
            "out shares memory with x"
            + (" without being the same contiguous tensor" if in_place else "")
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    return max(a_first, b_first) < min(a_end, b_end)


def _extent(x: Tensor) -> tuple[int, int]:
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
