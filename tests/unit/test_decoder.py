"""Which of Hugging Face's decoders have the shape that ``parallelize`` expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedcomm.parallel.decoder import find

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e .[demo]"
)

TINY: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    pad_token_id=0,
)


def build(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**TINY)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Gemma"])
def test_decoders_that_qualify(kind: str) -> None:
    model = build(kind)
    found = find(model)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 4)
    assert found.model is model and found.trunk is model.model and found.prefix == "model."
    norms = [name for name, _ in found.norms()]
    assert norms == [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    ]
    of_heads = [name.rpartition(".")[2] for name, _ in found.head_norms()]
    assert of_heads == (["q_norm", "k_norm"] * 2 if kind == "Qwen3" else [])
    assert find(model.model).prefix == "" and not find(model.model).has_head


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("Phi3", r"nothing at model\.layers\.0\.self_attn\.q_proj: expected an nn\.Linear"),
        ("Olmo2", r"nothing at model\.layers\.0\.input_layernorm"),
        ("Mixtral", r"nothing at model\.layers\.0\.mlp\.gate_proj"),
        ("GPT2", "no decoder layers"),
    ],
)
def test_decoders_that_do_not(kind: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        find(build(kind))
