"""The cross entropy of logits that are cut over the vocabulary, as a torch custom op.

With z the logits of one token, t its target, ε the label smoothing and V the vocabulary::

    loss = log Σ_v exp z_v  -  (1 - ε) z_t  -  ε/V Σ_v z_v
    dz   = (softmax z  -  (1 - ε) onehot t  -  ε/V) · dloss

Every rank reduces its own logits to three or four numbers a token (maximum, sum of exponentials,
target's logit, sum), these are exchanged, and all ranks combine them in the order of ranks: the
loss is bitwise equal on all of them. The backward pass needs no communication. Logits are read a
few rows at a time in float32 (float64 for float64), so that no copy of them all is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.ops.library.collectives import fill_all_gather
from fusedcomm.ops.library.effects import communicates
from fusedcomm.schedule import shard_bounds
from fusedcomm.trace import span

#: Elements of the logits that are looked at together.
BLOCK = 1 << 20


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _finite(largest: Tensor) -> Tensor:
    """What to subtract: where all logits are -inf, differences must not become NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return  # Looking would wait for the device; the loss of such a target is NaN.
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if wrong.any():
        raise ValueError(
            f"targets holds {int(targets[wrong][0])}, but the vocabulary's ids are 0 to "
            f"{vocabulary - 1} and ignore_index is {ignore_index}"
        )


def _local_statistics(logits: Tensor, targets: Tensor, first: int, smoothed: bool) -> Tensor:
    """``[3 or 4, T]`` of this rank's logits: maximum, sum of exponentials, target's logit, sum.

    The sums are those of the logits less the maximum; the target's is 0 on ranks without it.
    """
    tokens, columns = logits.shape
    wide = _wide(logits.dtype)
    found = torch.zeros(4 if smoothed else 3, tokens, dtype=wide, device=logits.device)
    found[0] = -torch.inf
    if not columns:
        return found
    for rows in _blocks(tokens, columns):
        block = logits[rows].to(wide)
        largest = block.amax(1)
        shifted = block - _finite(largest)[:, None]
        found[0, rows] = largest
        place = targets[rows] - first
        own = (place >= 0) & (place < columns)
        value = block.gather(1, place.clamp(0, columns - 1)[:, None])[:, 0]
        found[2, rows] = torch.where(own, value, 0.0)
        if smoothed:
            found[3, rows] = shifted.sum(1)
        found[1, rows] = shifted.exp_().sum(1)
    return found


@communicates
@torch.library.custom_op("fusedcomm::vocab_parallel_cross_entropy", mutates_args=())
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    group: str,
    channel: str,
) -> tuple[Tensor, Tensor]:
    """``[T]`` losses, 0 where ignored, and ``[T]`` logarithms of the sums of exponentials."""
    _check_targets(targets, vocabulary, ignore_index)
    comm = Communicator.named(group, channel)
    with span("copy", "statistics of the logits", rank=comm.rank):
        own = _local_statistics(logits, targets, first, smoothing > 0)
    kinds, tokens = own.shape
    everyone = own.new_empty(comm.world_size, kinds, tokens)
    purpose = (
        f"vocab_parallel_cross_entropy of {vocabulary} {logits.dtype}",
        f"ignore_index {ignore_index}",
        f"label_smoothing {smoothing}",
    )
    fill_all_gather(comm, own[None], 0, comm.world_size, "auto", purpose)(own[None], everyone)
    # All is relative to the largest logit: small losses of large logits would be lost otherwise.
    shift = _finite(everyone[:, 0].amax(0))
    log_sum = (everyone[:, 1] * (everyone[:, 0] - shift).exp()).sum(0).log()
    loss = log_sum - (1.0 - smoothing) * (everyone[:, 2].sum(0) - shift)
    if smoothing > 0:
        columns = [stop - start for start, stop in shard_bounds(vocabulary, comm.world_size)]
        counts = everyone.new_tensor(columns)[:, None]
        sums = everyone[:, 3] + counts * (_finite(everyone[:, 0]) - shift)
        loss = loss - (smoothing / vocabulary) * sums.sum(0)
    known = (targets >= 0) & (targets < vocabulary)
    loss = torch.where(known, loss, torch.nan)
    return loss.masked_fill(targets == ignore_index, 0.0), log_sum + shift


@vocab_parallel_cross_entropy.register_fake
def _(logits, targets, first, vocabulary, ignore_index, smoothing, group, channel):
    wide = _wide(logits.dtype)
    tokens = logits.shape[0]
    return logits.new_empty(tokens, dtype=wide), logits.new_empty(tokens, dtype=wide)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.first, ctx.vocabulary, ctx.ignore_index, ctx.smoothing, *_ = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_loss: Tensor, _: Tensor | None) -> tuple:
    logits, targets, logsumexp = ctx.saved_tensors
    d_logits = cross_entropy_grad(
        logits,
        targets,
        logsumexp,
        d_loss.masked_fill(targets == ctx.ignore_index, 0.0),
        ctx.first,
        ctx.vocabulary,
        ctx.smoothing,
    )
    return d_logits, None, None, None, None, None, None, None


vocab_parallel_cross_entropy.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("fusedcomm::cross_entropy_grad", mutates_args=())
def cross_entropy_grad(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    d_loss: Tensor,
    first: int,
    vocabulary: int,
    smoothing: float,
) -> Tensor:
    """The gradient of this rank's logits."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    tokens, columns = logits.shape
    if not columns:
        return grad
    for rows in _blocks(tokens, columns):
        block = (logits[rows].to(d_loss.dtype) - logsumexp[rows, None]).exp_()
        if smoothing > 0:
            block -= smoothing / vocabulary
        place = targets[rows] - first
        own = (place >= 0) & (place < columns)
        hit = torch.where(own, 1.0 - smoothing, 0.0).to(block.dtype)
        block.scatter_add_(1, place.clamp(0, columns - 1)[:, None], -hit[:, None])
        # An ignored token has no gradient, whatever its logits are.
        scale = d_loss[rows, None]
        grad[rows] = torch.where(scale == 0, 0.0, block * scale).to(grad.dtype)
    return grad


@cross_entropy_grad.register_fake
def _(logits, targets, logsumexp, d_loss, first, vocabulary, smoothing):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
