"""fc.nn.Router against the routers of transformers, weights and choices and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fusedcomm.nn import Router

HIDDEN, EXPERTS, TOP_K, TOKENS = 24, 16, 4, 65

LOGITS: dict[str, Any] = {"weights_dtype": "logits"}
DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "correction_bias": True,
    "eps": 1e-20,
    "float32": True,
}


class MiniMax(MiniMaxM2TopKRouter):
    """Its block holds the correction bias and hands it over."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__(config)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(self.num_experts))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, self.e_score_correction_bias)


def local(config: Any, **options: Any) -> Any:
    return config(
        hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, **options
    )


def named(config: Any, **options: Any) -> Any:
    return config(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, **options)


def routed(config: Any, **options: Any) -> Any:
    return config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        routed_scaling_factor=2.5,
        **options,
    )


#: Name -> the model's router, and our arguments.
ROUTERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mixtral": (lambda: MixtralTopKRouter(local(MixtralConfig)), {}),
    "qwen3_moe": (lambda: Qwen3MoeTopKRouter(named(Qwen3MoeConfig, norm_topk_prob=True)), LOGITS),
    "qwen3_moe, not renormalised": (
        lambda: Qwen3MoeTopKRouter(named(Qwen3MoeConfig, norm_topk_prob=False)),
        {"renormalize": False, **LOGITS},
    ),
    "qwen2_moe": (
        lambda: Qwen2MoeTopKRouter(named(Qwen2MoeConfig)),
        {"renormalize": False, **LOGITS},
    ),
    "olmoe": (
        lambda: OlmoeTopKRouter(named(OlmoeConfig)),
        {"renormalize": False, **LOGITS},
    ),
    "gpt_oss": (
        lambda: GptOssTopKRouter(local(GptOssConfig)),
        {"score": "topk_softmax", "bias": True, **LOGITS},
    ),
    "granitemoe": (
        lambda: GraniteMoeTopKRouter(local(GraniteMoeConfig)),
        {"score": "topk_softmax", **LOGITS},
    ),
    "deepseek_v2": (
        lambda: DeepseekV2TopkRouter(routed(DeepseekV2Config, topk_method="greedy")),
        {"renormalize": False, "scale": 2.5, "float32": True},
    ),
    "deepseek_v2, groups": (
        lambda: DeepseekV2TopkRouter(
            routed(DeepseekV2Config, topk_method="group_limited_greedy", n_group=8, topk_group=3)
        ),
        {
            "renormalize": False,
            "scale": 2.5,
            "num_groups": 8,
            "topk_groups": 3,
            "group_score": "max",
            "float32": True,
        },
    ),
    "deepseek_v3": (
        lambda: DeepseekV3TopkRouter(routed(DeepseekV3Config, n_group=4, topk_group=2)),
        {**DEEPSEEK, "scale": 2.5, "num_groups": 4, "topk_groups": 2},
    ),
    "deepseek_v3, not renormalised": (
        lambda: DeepseekV3TopkRouter(
            routed(DeepseekV3Config, n_group=8, topk_group=2, norm_topk_prob=False)
        ),
        {**DEEPSEEK, "renormalize": False, "scale": 2.5, "num_groups": 8, "topk_groups": 2},
    ),
    "glm4_moe": (
        lambda: Glm4MoeTopkRouter(routed(Glm4MoeConfig, n_group=1, topk_group=1)),
        {**DEEPSEEK, "scale": 2.5},
    ),
    "dots1": (
        lambda: Dots1TopkRouter(routed(Dots1Config, n_group=2, topk_group=1)),
        {**DEEPSEEK, "renormalize": False, "scale": 2.5, "num_groups": 2, "topk_groups": 1},
    ),
    "minimax_m2": (
        lambda: MiniMax(local(MiniMaxM2Config)),
        {"score": "sigmoid", "correction_bias": True},
    ),
}


def spread(weights: Tensor, ids: Tensor) -> Tensor:
    """Weights by expert, ``[T, E]``: the order of a token's choices does not matter."""
    assert all(len(row.unique()) == TOP_K for row in ids)
    return torch.zeros(len(ids), EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)


def drawn(name: str, dtype: torch.dtype) -> tuple[nn.Module, Router, Tensor]:
    torch.manual_seed(0)
    make, options = ROUTERS[name]
    theirs = make()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        for buffer in theirs.buffers():
            buffer.uniform_(-0.3, 0.3)
    theirs.to(dtype)
    if "e_score_correction_bias" in theirs.state_dict():  # stays float32 in their models
        theirs.e_score_correction_bias = theirs.e_score_correction_bias.float()
    ours = Router(HIDDEN, EXPERTS, TOP_K, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(TOKENS, HIDDEN, dtype=dtype) / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_equals_the_models(name: str, dtype: torch.dtype) -> None:
    theirs, ours, x = drawn(name, dtype)
    logits, weights, ids = theirs(x)
    routing = ours(x)
    # Granite hands its logits out in float32; their values are those of the activations' dtype.
    assert torch.equal(routing.logits, logits.to(routing.logits.dtype))
    assert routing.weights.dtype == weights.dtype
    assert routing.ids.dtype == torch.int64
    # The sum that renormalises is added in the order of choices, which their routers leave open.
    torch.testing.assert_close(
        spread(routing.weights, routing.ids), spread(weights, ids), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradients_equal_the_models(name: str) -> None:
    theirs, ours, x = drawn(name, torch.float32)
    dy = torch.randn(TOKENS, EXPERTS)
    found = []
    for router in (theirs, ours):
        xs = x.clone().requires_grad_()
        _, weights, ids = router(xs)
        (spread(weights, ids) * dy).sum().backward()
        found.append([xs.grad, *(parameter.grad for parameter in router.parameters())])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


def test_best_choices_come_first_and_leading_dimensions_are_flattened() -> None:
    router = Router(HIDDEN, EXPERTS, TOP_K)
    x = torch.randn(2, 3, HIDDEN)
    logits, weights, ids = router(x)
    assert logits.shape == (6, EXPERTS) and weights.shape == ids.shape == (6, TOP_K)
    assert torch.equal(weights, weights.sort(-1, descending=True).values)
    assert torch.equal(router(x.reshape(6, HIDDEN)).ids, ids)
    assert router(x[:0]).ids.shape == (0, TOP_K)


def test_a_score_function() -> None:
    torch.manual_seed(1)
    router = Router(HIDDEN, EXPERTS, TOP_K, score=lambda z: z.exp(), renormalize=True)
    x = torch.randn(TOKENS, HIDDEN)
    softmax = Router(HIDDEN, EXPERTS, TOP_K)
    softmax.load_state_dict(router.state_dict())
    torch.testing.assert_close(router(x).weights, softmax(x).weights)
    assert torch.equal(router(x).ids, softmax(x).ids)


def test_float32_logits_hold_under_autocast() -> None:
    torch.manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN)
    for float32 in (True, False):
        router = Router(HIDDEN, EXPERTS, TOP_K, float32=float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = router(x).logits
        assert torch.equal(logits, router(x).logits) == float32


def test_float64_is_not_narrowed() -> None:
    router = Router(HIDDEN, EXPERTS, TOP_K, float32=True, dtype=torch.float64)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert router(x).weights.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: router(x).weights, x[:5].detach().requires_grad_())


def test_the_correction_bias_moves_against_the_load() -> None:
    router = Router(HIDDEN, 4, 2, score="sigmoid", correction_bias=True)
    router.update_correction_bias(torch.tensor([7, 0, 4, 5]), rate=0.5)
    assert router.e_score_correction_bias is not None
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.0, -0.5]
    with pytest.raises(ValueError, match="correction_bias=True"):
        Router(HIDDEN, 4, 2).update_correction_bias(torch.ones(4))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"top_k": 17}, "top_k must be 1 to num_experts=16; got 17"),
        ({"top_k": 0}, "top_k must be 1 to"),
        ({"score": "tanh"}, "score must be one of softmax, topk_softmax, sigmoid; got 'tanh'"),
        ({"group_score": "top3"}, "group_score must be one of"),
        ({"weights_dtype": "bf16"}, "weights_dtype must be one of"),
        ({"num_groups": 3}, "num_groups=3 does not cut num_experts=16"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups must be 1 to num_groups=4; got 5"),
        ({"num_groups": 8, "topk_groups": 1}, "groups of 2 experts hold fewer"),
        ({"num_groups": 16, "topk_groups": 8}, "groups of at least two experts"),
        ({"score": "topk_softmax", "correction_bias": True}, "do not go with it"),
        ({"score": "topk_softmax", "num_groups": 2}, "do not go with it"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], complaint: str) -> None:
    arguments = {"hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, **options}
    with pytest.raises(ValueError, match=complaint):
        Router(**arguments)
