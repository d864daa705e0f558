"""How the demo divides its model over the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusedcomm.cli.demo.llama import DOWN, EMBEDDING, GATE_UP, HEAD, NORMS, OUT, QKV, LlamaConfig
from fusedcomm.cli.demo.reference import SMOLLM2, random_weights
from fusedcomm.cli.demo.sharding import legal_ranks, shard

TINY = LlamaConfig(
    vocabulary=20,
    hidden=24,
    ffn=10,
    layers=2,
    heads=6,
    kv_heads=3,
    head_size=4,
    norm_eps=1e-5,
    rope_theta=1e4,
)


@pytest.mark.parametrize(
    ("kv_heads", "legal"), [(3, [1, 2, 3]), (1, [1]), (5, [1, 2, 3, 5]), (8, [1, 2, 3, 4, 8])]
)
def test_every_rank_needs_a_key_value_head(kv_heads: int, legal: list[int]) -> None:
    # torch.chunk gives 5 heads to 4 ranks as 2, 2, 1: the last rank would have none.
    assert legal_ranks(replace(SMOLLM2, kv_heads=kv_heads)) == legal


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_put_together_are_the_whole(world_size: int) -> None:
    weights = random_weights(TINY, seed=1)
    shards = [shard(weights, TINY, world_size, rank) for rank in range(world_size)]
    rows, columns = {*QKV, *GATE_UP, HEAD}, {OUT, DOWN}
    for name, weight in weights.items():
        kind = name.split(".", 3)[-1] if ".layers." in name else name
        parts = [s[name] for s in shards]
        if kind in rows | columns:
            assert torch.equal(torch.cat(parts, dim=0 if kind in rows else 1), weight), name
        else:
            assert kind == EMBEDDING or kind in NORMS or kind == "model.norm.weight"
            assert all(torch.equal(part, weight) for part in parts), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_queries_lie_with_their_keys(world_size: int) -> None:
    """Marked with the number of its key-value head, each row of q lies on that head's rank."""
    weights = random_weights(TINY, seed=1)
    head, group = TINY.head_size, TINY.heads // TINY.kv_heads
    marks = torch.arange(TINY.kv_heads, dtype=torch.float32)
    prefix = "model.layers.0."
    weights[prefix + QKV[0]] = marks.repeat_interleave(group * head)[:, None].expand(-1, 24)
    weights[prefix + OUT] = marks.repeat_interleave(group * head)[None, :].expand(24, -1)
    for name in QKV[1:]:
        weights[prefix + name] = marks.repeat_interleave(head)[:, None].expand(-1, 24)
    for rank in range(world_size):
        part = shard(weights, TINY, world_size, rank)
        mine = part[prefix + QKV[1]][::head, 0]
        assert len(mine) > 0
        assert torch.equal(part[prefix + QKV[2]][::head, 0], mine)
        assert torch.equal(part[prefix + QKV[0]][:, 0], mine.repeat_interleave(group * head))
        assert torch.equal(part[prefix + OUT][0], mine.repeat_interleave(group * head))


def test_shards_do_not_keep_the_whole_in_memory() -> None:
    weights = random_weights(TINY, seed=1)
    name = "model.layers.0." + DOWN
    assert shard(weights, TINY, 3, 0)[name].untyped_storage().nbytes() == 24 * 4 * 4
