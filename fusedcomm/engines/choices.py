"""Sums over a token's choices, in float32 and in order of choice. For CPU engines.

``slot[t, j]`` is the row of choice j of token t, -1 for a choice of no expert. What lies behind
such a choice (its weight, too) is never read: it may be NaN.

The sum is torch's embedding bag: rows of a table, each times a factor, added in float32 and rounded
once, without a copy of them. Its factors have the dtype of the rows. A float32 weight is the sum of
three bfloat16 numbers, exactly, and a bfloat16 product is exact in float32, so bfloat16 rows are
taken three times, each time with a part of their weight: five times faster than widening them.
float16 lacks the exponents for that; its rows are widened in blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from fusedcomm.engines.blocks import rows_at_once

Tensor = torch.Tensor

#: Elements of a float32 block of rows on a CPU.
_BLOCK = 1 << 19


def sum_choices(
    rows: Tensor, slot: Tensor, weights: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """``y[t] = Σ_j weights[t, j] · rows[slot[t, j]]``, rounded once to the dtype of ``rows``.

    Args:
        rows: ``[C, hidden]``.
        slot: ``[T, k]``.
        weights: ``[T, k]`` of any floating dtype; None for ones.
        keep: whether to return the rows as well.

    Returns:
        y ``[T, hidden]``, and the rows by token and choice ``[T, k, hidden]`` (anything for a
        choice of no expert), or an empty tensor.
    """
    (tokens, k), hidden = slot.shape, rows.shape[1]
    kept = rows.new_empty((tokens, k, hidden) if keep else (0,))
    if not slot.numel() or not rows.shape[0]:
        return rows.new_zeros(tokens, hidden), kept.zero_()
    missing = slot < 0
    some_missing = bool(missing.any())
    if keep:
        flat = kept.view(tokens * k, hidden)
        torch.index_select(rows, 0, slot.clamp(min=0).reshape(-1), out=flat)
    if weights is not None:
        weights = weights.to(torch.promote_types(rows.dtype, torch.float32))
    if not some_missing:
        ends = torch.arange(k, tokens * k + 1, k, device=slot.device)
        return _sum_bags(rows, slot.reshape(-1), weights, ends), kept
    present = ~missing
    ends = present.sum(1).cumsum(0)
    weights = None if weights is None else weights[present]
    return _sum_bags(rows, slot[present], weights, ends), kept


def _sum_bags(rows: Tensor, index: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    """The sum of every bag of rows; bag t ends in front of ``ends[t]`` of ``index``."""
    weights = None if weights is None else weights.reshape(-1)
    if rows.dtype == torch.float16:
        return _sum_widened(rows, index, weights, ends)
    if weights is not None and rows.dtype == torch.bfloat16:
        parts = []
        for _ in range(3):
            parts.append(weights.to(rows.dtype))
            weights = weights - parts[-1]
        weights = torch.stack(parts, 1).view(-1)
        index, ends = index.repeat_interleave(3), ends * 3
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    return F.embedding_bag(index, rows, begins, mode="sum", per_sample_weights=weights)


def _sum_widened(rows: Tensor, index: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    y = rows.new_empty(len(ends), rows.shape[1])
    most = rows_at_once(rows.device, rows.shape[1], _BLOCK)  # a bag may be longer
    limits, bag, begin = ends.tolist(), 0, 0
    while bag < len(limits):
        last = bag + 1
        while last < len(limits) and limits[last] - begin <= most:
            last += 1
        part = slice(begin, limits[last - 1])
        wide = rows.index_select(0, index[part]).float()
        factors = None if weights is None else weights[part]
        bags = torch.tensor([begin, *limits[bag : last - 1]], device=rows.device) - begin
        local = torch.arange(len(wide), device=rows.device)
        y[bag:last] = F.embedding_bag(local, wide, bags, mode="sum", per_sample_weights=factors)
        bag, begin = last, limits[last - 1]
    return y


def dot_choices(kept: Tensor, slot: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the weights: ``⟨dy[t], kept[t, j]⟩``, 0 for a choice of no expert.

    Args:
        kept: ``[T, k, hidden]``, as ``sum_choices`` returns them.
        dy: ``[T, hidden]``.
        dtype: of the result ``[T, k]``; the products are added in float32 at least.
    """
    (tokens, k), hidden = slot.shape, dy.shape[1]
    wide = torch.promote_types(dy.dtype, torch.float32)
    result = dy.new_zeros(tokens, k, dtype=wide)
    block = rows_at_once(dy.device, k * hidden, _BLOCK)
    for start in range(0, tokens, block):
        rows = kept[start : start + block].to(wide)
        result[start : start + block] = (rows @ dy[start : start + block, :, None].to(wide))[..., 0]
    return result.masked_fill_(slot < 0, 0.0).to(dtype)


def dot_rows(rows: Tensor, tokens: Tensor, dy: Tensor) -> Tensor:
    """``⟨dy[tokens[n]], rows[n]⟩`` ``[C]``, added in float32 at least.

    Args:
        rows: ``[C, hidden]``, the finished rows in the order in which they came back.
        tokens: ``[C]``.
        dy: ``[T, hidden]``.
    """
    wide = torch.promote_types(dy.dtype, torch.float32)
    result = dy.new_empty(len(tokens), dtype=wide)
    block = rows_at_once(rows.device, rows.shape[1], _BLOCK)
    for start in range(0, len(tokens), block):
        part = slice(start, start + block)
        theirs = dy.index_select(0, tokens[part]).to(wide)
        result[part] = (rows[part, None, :].to(wide) @ theirs[:, :, None])[:, 0, 0]
    return result
