"""Model shapes by name: the sizes that one rank sees of a layer's four projections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder layer and the degree ``tp`` by which its projections are sharded.

    The sizes of a shard belong to the shape, however many ranks a benchmark runs: two ranks with
    the shards of TP8 do the work of two of the eight.
    """

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    tp: int

    @property
    def feed_forward_shard(self) -> int:
        """Features of one rank between the up (or gate) and the down projection."""
        return self.feed_forward // self.tp

    @property
    def attention_shard(self) -> int:
        """Features of one rank between the query and the output projection."""
        return self.heads * self.head_dim // self.tp


#: From the models' published configurations; "-tpN" is the degree of sharding.
SHAPES = {
    "llama3-8b-tp8": ModelShape(4096, 14336, 32, 8, 128, 8),
    "llama3-70b-tp8": ModelShape(8192, 28672, 64, 8, 128, 8),
    "qwen2.5-7b-tp4": ModelShape(3584, 18944, 28, 4, 128, 4),
    "smollm2-135m-tp3": ModelShape(576, 1536, 9, 3, 64, 3),
}
