"""Small models of transformers with sparse blocks, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

HIDDEN, FFN, EXPERTS, TOP_K = 48, 24, 12, 3

COMMON: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 40,
    "moe_intermediate_size": FFN,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=EXPERTS, intermediate_size=FFN),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON,
        num_experts=EXPERTS,
        moe_intermediate_size=FFN,
        intermediate_size=40,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        num_experts=EXPERTS,
        moe_intermediate_size=FFN,
        intermediate_size=40,
        norm_topk_prob=True,
        head_dim=8,
    ),
    "olmoe": lambda: OlmoeConfig(**COMMON, num_experts=EXPERTS, intermediate_size=FFN),
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**COMMON, **DEEPSEEK, **LATENT}, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**{**COMMON, **DEEPSEEK, **LATENT}),
    "glm4_moe": lambda: Glm4MoeConfig(**{**COMMON, **DEEPSEEK}, head_dim=8),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
        num_local_experts=EXPERTS,
        intermediate_size=FFN,
        head_dim=8,
        sliding_window=16,
    ),
    # An activation that this library has no name for.
    "mixtral with relu": lambda: MixtralConfig(
        **COMMON, num_local_experts=EXPERTS, intermediate_size=FFN, hidden_act="relu"
    ),
}


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with weights large enough that all non-linearities matter."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for key, tensor in made.state_dict().items():
            if tensor.dim() > 1:
                # gpt-oss clamps at 7: some of its experts' inputs shall lie beyond.
                large = 4.0 if name == "gpt_oss" and "experts" in key else 1.0
                tensor.normal_(std=large / HIDDEN**0.5)
            elif key.endswith("bias"):
                tensor.uniform_(-0.2, 0.2)
    return made.to(dtype).eval()


def block(name: str) -> nn.Module:
    """The sparse block of its first layer."""
    layer = model(name).model.layers[0]
    return layer.mlp
