"""Sums, averages, maxima and minima of tensors that lie in several ranks' memory, in one pass.

The work is cut into blocks that stay in a core's cache, so that every input is read once from
memory and every output written once, however many ranks there are. Half types are added in float32
and rounded once; other types in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedcomm.engines.blocks import rows_at_once

#: Bytes of the block in which contributions are added: it stays in the second-level cache.
BLOCK_BYTES = 1 << 19
#: Float32 elements of the block in which ``add_in_order`` does the same.
_BLOCK = 1 << 17
_HALVES = (torch.float16, torch.bfloat16)
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(parts: Sequence[Tensor], targets: Sequence[Tensor], op: str, divisor: int = 1) -> None:
    """Reduce ``parts``, in their order, into every one of ``targets``.

    Args:
        parts: tensors of one shape and dtype, at least one.
        targets: of the same shape and dtype; each may be one of the parts, or apart from all.
        op: "sum", "avg", "max" or "min".
        divisor: by which a sum is divided before it is rounded.
    """
    first = targets[0]
    size = first.numel()
    if not size:
        return
    if len(parts) == 1 and len(targets) == 1 and divisor == 1:
        first.copy_(parts[0])
        return
    function = _FUNCTIONS[op]
    halves = first.dtype in _HALVES
    if len(parts) == 2 and len(targets) == 1 and (divisor == 1 or not halves):
        # One pass as it is; half types are added in float32 and rounded once by torch itself.
        function(*parts, out=first)
        if divisor > 1:
            first.div_(divisor)
        return
    # Two halves are added in float32 by torch itself.
    widened = halves and op in ("sum", "avg") and (len(parts) > 2 or divisor > 1)
    wide = torch.float32 if widened else first.dtype
    if size * wide.itemsize > BLOCK_BYTES and first.shape[0] == 1 and first.dim() > 1:
        # Blocks are cut along rows.
        parts, targets = [part[0] for part in parts], [target[0] for target in targets]
        first = targets[0]
    rows = first.shape[0]
    step = rows_at_once(first.device, size // rows * wide.itemsize, BLOCK_BYTES)
    scratch = None
    if len(parts) > 2 or wide != first.dtype:
        scratch = first.new_empty((min(step, rows), *first.shape[1:]), dtype=wide)
    for start in range(0, rows, step):
        if step < rows:
            stop = min(start + step, rows)
            block = [part[start:stop] for part in parts]
            target, *others = (target[start:stop] for target in targets)
        else:
            block, (target, *others) = list(parts), targets
        _reduce_block(block, target, scratch, function, divisor)
        for other in others:
            other.copy_(target)


def _reduce_block(
    parts: list[Tensor],
    target: Tensor,
    scratch: Tensor | None,
    function: Callable[..., Tensor],
    divisor: int,
) -> None:
    """One block. The target is written last, since it may be one of the parts."""
    if scratch is None:
        if len(parts) == 1:
            target.copy_(parts[0])
        else:
            function(*parts, out=target)
    else:
        total = scratch[: target.shape[0]]
        if total.dtype == target.dtype:
            function(parts[0], parts[1], out=total)
            for part in parts[2:-1]:
                function(total, part, out=total)
            function(total, parts[-1], out=target)
        else:
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
            if divisor > 1:
                total.div_(divisor)
            target.copy_(total)
            return
    if divisor > 1:
        target.div_(divisor)


def add_in_order(
    parts: list[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The sum of ``parts`` and ``bias`` in float32, in their order, rounded once to ``dtype``.

    Args:
        parts: tensors of one shape ``[rows, features]`` and dtype; a single one may be returned.
        bias: ``[features]`` or None.
    """
    if bias is None and all(part.dtype == dtype for part in parts):
        if len(parts) == 1:
            return parts[0]
        if len(parts) == 2:
            return parts[0] + parts[1]  # float32 inside, rounded once
    rows, features = parts[0].shape
    result = parts[0].new_empty(rows, features, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    block_rows = rows_at_once(result.device, features, _BLOCK)
    block = result.new_empty(min(block_rows, rows), features, dtype=wide)
    for start in range(0, rows, block_rows):
        stop = min(start + block_rows, rows)
        total = block[: stop - start].copy_(parts[0][start:stop])
        for part in parts[1:]:
            total += part[start:stop]
        if bias is not None:
            total += bias
        result[start:stop].copy_(total)
    return result
