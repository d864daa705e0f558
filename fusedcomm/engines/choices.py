"""Sums over a token's choices, in float32 and in order of choice. For CPU engines.

``slot[t, j]`` is the row of choice j of token t, -1 for a choice of no expert. What lies behind
such a choice (its weight, too) is never read: it may be NaN.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

#: Elements of the float32 block in which rows are added: it stays in the second-level cache.
_BLOCK = 1 << 17


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
        y ``[T, hidden]``, and the rows by token and choice ``[T, k, hidden]``, zeros for a choice
        of no expert, or an empty tensor.
    """
    (tokens, k), hidden, dtype = slot.shape, rows.shape[1], rows.dtype
    wide = torch.promote_types(dtype, torch.float32)
    y = rows.new_empty(tokens, hidden)
    kept = rows.new_empty((tokens, k, hidden) if keep else (0,))
    missing = slot < 0
    some_missing = bool(missing.any())
    if not tokens or not k or not rows.shape[0]:
        return y.zero_(), kept.zero_()
    if weights is not None:
        weights = weights.to(wide)
        if some_missing:
            weights = weights.masked_fill(missing, 0.0)
    where = slot.clamp(min=0) if some_missing else slot
    block = min(tokens, max(1, _BLOCK // (k * hidden)))
    gathered = rows.new_empty(block * k, hidden)
    widened = rows.new_empty(block, k, hidden, dtype=wide)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        count = stop - start
        target = kept[start:stop].view(count * k, hidden) if keep else gathered[: count * k]
        torch.index_select(rows, 0, where[start:stop].reshape(-1), out=target)
        if some_missing:
            target[missing[start:stop].reshape(-1)] = 0.0
        terms = widened[:count].copy_(target.view(count, k, hidden))
        total = terms[:, 0]
        if weights is not None:
            scale = weights[start:stop].unsqueeze(2)
            total.mul_(scale[:, 0])
            for choice in range(1, k):
                total.addcmul_(terms[:, choice], scale[:, choice])
        else:
            for choice in range(1, k):
                total.add_(terms[:, choice])
        y[start:stop].copy_(total)
    return y, kept


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
    block = max(1, _BLOCK // max(1, k * hidden))
    for start in range(0, tokens, block):
        rows = kept[start : start + block].to(wide)
        result[start : start + block] = (rows @ dy[start : start + block, :, None].to(wide))[..., 0]
    return result.masked_fill_(slot < 0, 0.0).to(dtype)
