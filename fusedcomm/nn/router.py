"""Routers: which experts a token goes to, and with which weights.

A router is any callable ``router(x) -> (logits, weights, ids)``; this one covers those in use:

============================ ======================================================================
model                        arguments
============================ ======================================================================
Mixtral                      ``renormalize=True``
Qwen3-MoE, OLMoE, Qwen2-MoE  ``renormalize=config.norm_topk_prob, weights_dtype="logits"``
gpt-oss                      ``score="topk_softmax", bias=True, weights_dtype="logits"``
Granite                      ``score="topk_softmax", weights_dtype="logits"``
DeepSeek-V2                  ``renormalize=False, scale=…, num_groups=…, topk_groups=…,
                             group_score="max", float32=True``
DeepSeek-V3, GLM-4, dots1    ``score="sigmoid", correction_bias=True, scale=…, num_groups=…,
                             topk_groups=…, eps=1e-20, float32=True``
MiniMax-M2                   ``score="sigmoid", correction_bias=True``
============================ ======================================================================

Parameters and buffers are named as in those models' routers, so that their state dicts load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SCORES = ("softmax", "topk_softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
WEIGHTS_DTYPES = ("scores", "logits")


class Routing(NamedTuple):
    """What a router found for T tokens; unpacks as ``logits, weights, ids``."""

    logits: Tensor  # [T, E], before any score function
    weights: Tensor  # [T, k], what each chosen expert's output counts
    ids: Tensor  # int64 [T, k], global expert ids


class Router(nn.Module):
    """A linear layer's logits, a score of each expert, the k best, their weights.

    Args:
        hidden: features of a token.
        num_experts: E, over all ranks.
        top_k: k, the experts that a token goes to.
        score: "softmax": over all experts, before the choice; "topk_softmax": over the chosen
            ones, after it; "sigmoid": each expert for itself; or a function from logits to scores,
            both float32 ``[T, E]``.
        renormalize: divide the chosen scores by their sum. "topk_softmax" has a sum of 1 anyway.
        eps: added to that sum.
        scale: the weights are multiplied by it, last.
        bias: add a trained bias to the logits.
        correction_bias: add the buffer ``e_score_correction_bias`` (float32 ``[E]``) to the scores
            for the choice, not for the weights. :meth:`update_correction_bias` moves it.
        num_groups: experts form this many groups of neighbours, equally large.
        topk_groups: only experts of this many groups, the best, can be chosen; all by default.
        group_score: "top2": the sum of the two best scores in a group; "max": the best.
        float32: compute the logits, too, in float32 whatever the dtypes of x and weight; scores
            always are. (float64 is not narrowed.)
        weights_dtype: "scores": that of the scores, or "logits": that of the logits.

    Raises:
        ValueError: an argument is out of range, or the chosen groups hold fewer than k experts.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: str | Callable[[Tensor], Tensor] = "softmax",
        renormalize: bool = True,
        eps: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
        correction_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int | None = None,
        group_score: str = "top2",
        float32: bool = False,
        weights_dtype: str = "scores",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        topk_groups = num_groups if topk_groups is None else topk_groups
        _check_one_of("group_score", group_score, GROUP_SCORES)
        _check_one_of("weights_dtype", weights_dtype, WEIGHTS_DTYPES)
        if not callable(score):
            _check_one_of("score", score, SCORES)
        _check_counts(num_experts, top_k, num_groups, topk_groups, group_score)
        if score == "topk_softmax" and (correction_bias or num_groups > 1):
            raise ValueError(
                "score='topk_softmax' has no scores before the choice: correction_bias and "
                "num_groups do not go with it"
            )
        self.hidden = hidden
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.renormalize = renormalize
        self.eps = eps
        self.scale = scale
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_score = group_score
        self.float32 = float32
        self.weights_dtype = weights_dtype
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, **factory))
        self.bias = nn.Parameter(torch.empty(num_experts, **factory)) if bias else None
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", zeros if correction_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does; the correction bias becomes 0."""
        with torch.no_grad():
            bound = 1 / math.sqrt(self.hidden) if self.hidden else 0.0
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)
            if self.e_score_correction_bias is not None:
                self.e_score_correction_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """``[…, hidden]`` to the routing of its tokens, k choices each, best first."""
        logits = self._logits(x.reshape(-1, x.shape[-1]))
        if self.score == "topk_softmax":
            best, ids = _widened(logits).topk(self.top_k, dim=-1)
            weights = best.softmax(-1)
        else:
            scores = self._scores(_widened(logits))
            ids = self._choice(scores)
            weights = scores.gather(1, ids)
            if self.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.weights_dtype == "logits":
            weights = weights.to(logits.dtype)
        return Routing(logits, weights, ids)

    def _logits(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not self.float32:
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(_widened(x), _widened(weight), None if bias is None else _widened(bias))

    def _scores(self, logits: Tensor) -> Tensor:
        if callable(self.score):
            return self.score(logits)
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def _choice(self, scores: Tensor) -> Tensor:
        """The ids of the k best experts, those of the best groups only."""
        scores = scores.detach()
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.topk_groups < self.num_groups:
            grouped = scores.unflatten(-1, (self.num_groups, -1))
            if self.group_score == "top2":
                of_group = grouped.topk(2, dim=-1).values.sum(-1)
            else:
                of_group = grouped.amax(-1)
            chosen = of_group.topk(self.topk_groups, dim=-1).indices
            barred = torch.ones_like(of_group, dtype=torch.bool).scatter(1, chosen, False)
            scores = grouped.masked_fill(barred.unsqueeze(-1), -math.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    @torch.no_grad()
    def update_correction_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """Balance without a loss: raise the bias of experts with too few tokens, lower the others'.

        ``bias += rate · sign(mean(counts) − counts)`` (DeepSeek-V3, section 2.1.2), after a step.

        Args:
            counts: ``[E]``, how many (token, choice) pairs went to each expert since the last
                update, on all ranks (:func:`expert_counts`), so that the bias stays equal on all.
            rate: by how much.

        Raises:
            ValueError: the router has no correction bias.
        """
        if self.e_score_correction_bias is None:
            raise ValueError(
                "this router has no correction bias: make it with correction_bias=True"
            )
        counts = counts.to(self.e_score_correction_bias)
        self.e_score_correction_bias += rate * (counts.mean() - counts).sign()

    def extra_repr(self) -> str:
        score = self.score if isinstance(self.score, str) else "function"
        return (
            f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score={score}"
        )


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_one_of(name: str, got: str, legal: tuple[str, ...]) -> None:
    if got not in legal:
        raise ValueError(f"{name} must be one of {', '.join(legal)}; got {got!r}")


def _check_counts(
    num_experts: int, top_k: int, num_groups: int, topk_groups: int, group_score: str
) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be 1 to num_experts={num_experts}; got {top_k}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not cut num_experts={num_experts} into equal groups"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be 1 to num_groups={num_groups}; got {topk_groups}")
    size = num_experts // num_groups
    if top_k > topk_groups * size:
        raise ValueError(
            f"top_k={top_k}, but topk_groups={topk_groups} groups of {size} experts hold fewer"
        )
    if topk_groups < num_groups and group_score == "top2" and size < 2:
        raise ValueError("group_score='top2' needs groups of at least two experts")
