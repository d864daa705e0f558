"""How evenly a router spreads its tokens, and the losses that make it do so.

A token of no expert (all its ids below 0, or E and above) is padding: no count and no loss has a
part of it, and its logits may be anything. So it is with ``fc.nn.MoE``'s ``num_tokens``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedcomm.engines.plain.collectives import all_reduce_in_place
from fusedcomm.nn.router import Routing
from fusedcomm.ops.dispatch import communicator_of


def expert_counts(ids: Tensor, num_experts: int, *, group: Any = None) -> Tensor:
    """How many (token, choice) pairs went to each expert, summed over the group; collective.

    Args:
        ids: integers ``[T, k]``; those below 0 or from ``num_experts`` on choose no expert.
        group: the ranks over which tokens are cut; see ``fusedcomm.ops.tensor_parallel``.

    Returns:
        int64 ``[num_experts]``, equal on every rank.
    """
    counts = _local_counts(ids, num_experts)
    _sum_over(group, counts, "expert_counts")
    return counts


def load_balancing_loss(
    routing: Routing, *, group: Any = None, mask: Tensor | None = None
) -> Tensor:
    """Switch Transformer's loss over the tokens of all ranks: ``E · Σ_e f_e · P_e``; collective.

    f_e is the number of choices of expert e per token, P_e the mean over tokens of the softmax of
    the logits (equations 4 to 6 of arXiv 2101.03961). It is k where tokens are spread evenly. Each
    rank's loss holds P_e's part from its own tokens, so that **the mean over ranks is the loss of
    all tokens**, and gradients add up to its gradient: like a cross entropy that is averaged over
    each rank's tokens. With one rank it is Hugging Face's ``load_balancing_loss_func`` of a layer.

    Args:
        routing: what a router returned for this rank's tokens.
        group: the ranks over which tokens are cut; see ``fusedcomm.ops.tensor_parallel``.
        mask: bool ``[T]`` or of its shape, the tokens that count (not padding); by default those
            that have an expert.

    Returns:
        a float32 scalar; 0 where no token counts.
    """
    num_experts = routing.logits.shape[-1]
    counted = _counted(routing, mask)
    ids = routing.ids.long().where(counted, -1)
    totals = torch.cat([_local_counts(ids, num_experts), counted.sum().reshape(1)])
    world_size = _sum_over(group, totals, "load_balancing_loss")
    all_tokens = totals[-1].clamp(min=1).float()
    chosen = totals[:-1].float() / all_tokens
    # Before the softmax, too, whose gradient would be NaN where logits are.
    logits = routing.logits.float().where(counted, 0.0)
    probabilities = logits.softmax(-1).where(counted, 0.0)
    return num_experts * world_size * (chosen @ probabilities.sum(0)) / all_tokens


def router_z_loss(routing: Routing, *, mask: Tensor | None = None) -> Tensor:
    """Keeps logits small: the mean over this rank's tokens of ``logsumexp(logits)²``.

    Equation 5 of ST-MoE (arXiv 2202.08906).

    Args:
        routing: what a router returned.
        mask: as in :func:`load_balancing_loss`.

    Returns:
        a float32 scalar; 0 where no token counts.
    """
    counted = _counted(routing, mask)
    squares = routing.logits.float().where(counted, 0.0).logsumexp(-1, keepdim=True).square()
    return squares.where(counted, 0.0).sum() / counted.sum().clamp(min=1)


def _local_counts(ids: Tensor, num_experts: int) -> Tensor:
    legal = _legal(ids, num_experts)
    bins = ids.long().where(legal, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]


def _legal(ids: Tensor, num_experts: int) -> Tensor:
    return (ids >= 0) & (ids < num_experts)


def _counted(routing: Routing, mask: Tensor | None) -> Tensor:
    """The tokens that count, bool ``[T, 1]``."""
    tokens, num_experts = routing.logits.shape
    has_expert = _legal(routing.ids, num_experts).any(-1, keepdim=True)
    if mask is None:
        return has_expert
    if mask.numel() != tokens:
        raise ValueError(f"mask must have one entry per token, {tokens}; got {mask.numel()}")
    return has_expert & mask.reshape(-1, 1).bool()


def _sum_over(group: Any, totals: Tensor, op: str) -> int:
    """Replace ``totals`` by its sum over the ranks; returns how many they are."""
    comm = communicator_of(group)
    if comm.world_size > 1:
        with comm.collective(f"{op} {list(totals.shape)}"):
            all_reduce_in_place(comm, op, totals)
    return comm.world_size
