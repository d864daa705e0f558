"""Which part of the model a rank holds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fusedcomm.cli.demo.llama import DOWN, GATE_UP, HEAD, OUT, QKV, LlamaConfig
from fusedcomm.schedule import shard_bounds


def legal_ranks(config: LlamaConfig) -> list[int]:
    """The numbers of ranks that leave none without a key-value head."""
    heads = config.kv_heads
    return [
        count
        for count in range(1, heads + 1)
        if all(start < stop for start, stop in shard_bounds(heads, count))
    ]


def shard(
    weights: Mapping[str, Tensor], config: LlamaConfig, world_size: int, rank: int
) -> dict[str, Tensor]:
    """A rank's part of each weight, copied where it is not the whole.

    Queries, keys and values are cut along their output features and o along its input features, by
    groups of heads; gate and up, down likewise by the feed-forward size; the vocabulary's rows by
    torch.chunk's rule. Norms and the embedding are whole on every rank.
    """
    group = config.heads // config.kv_heads * config.head_size  # features of one group's queries
    first, last = shard_bounds(config.kv_heads, world_size)[rank]
    query = (first * group, last * group)
    key = (first * config.head_size, last * config.head_size)
    ffn = shard_bounds(config.ffn, world_size)[rank]
    cuts = {QKV[0]: (0, *query), QKV[1]: (0, *key), QKV[2]: (0, *key), OUT: (1, *query)}
    cuts |= {name: (0, *ffn) for name in GATE_UP} | {DOWN: (1, *ffn)}
    cuts[HEAD] = (0, *shard_bounds(config.vocabulary, world_size)[rank])
    shards = {}
    for name, weight in weights.items():
        kind = name if name == HEAD else name.split(".", 3)[-1]  # model.layers.<i>.<kind>
        if kind in cuts:
            dim, start, end = cuts[kind]
            weight = weight.narrow(dim, start, end - start).clone()
        shards[name] = weight
    return shards
