"""Embedding and language-model head cut over the vocabulary.

===================== ============= ========================== ==================================
module                weight        input                      output
===================== ============= ========================== ==================================
VocabParallelEmbedding [V/W, hidden] ids, equal on all ranks    all tokens, or a token shard
VocabParallelHead     [V/W, hidden] token shard, or all tokens all tokens, this rank's vocabulary
===================== ============= ========================== ==================================

The shards are ``torch.chunk``'s, uneven and empty ones included. Both have the same rows of V, so
that ``head.weight = embedding.weight`` ties them: the gradients of both uses add up in one shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.nn.linear import ColumnParallelLinear, check_layout
from fusedcomm.nn.sharded import ShardedModule, local
from fusedcomm.ops.layouts import gather_features
from fusedcomm.ops.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding`` with its rows cut over the ranks.

    Args:
        num_embeddings, embedding_dim: V and hidden, of the whole table.
        padding_idx: an id whose row is drawn as zeros and gets no gradient.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        output_layout: "replicated": every rank gets all tokens' embeddings; "sharded": its tokens'.
    """

    shard_dims = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Any = None,
        output_layout: str = "replicated",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout("output_layout", output_layout)
        super().__init__(group)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.output_layout = output_layout
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is none of {num_embeddings} ids")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        shape = self.own_shape("weight")
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def full_shape(self, name: str) -> list[int]:
        return [self.num_embeddings, self.embedding_dim]

    def reset_parameters(self) -> None:
        """Draw the rows as ``nn.Embedding`` does; see ``ColumnParallelLinear.reset_parameters``."""
        with torch.no_grad():
            full = torch.empty(
                self.full_shape("weight"), device=self.weight.device, dtype=self.weight.dtype
            ).normal_()
            if self.padding_idx is not None:
                full[self.padding_idx].zero_()
            self.load_part("weight", full)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: Any = None, output_layout: str = "replicated"
    ) -> VocabParallelEmbedding:
        """This rank's part of an existing table.

        Raises:
            ValueError: it has ``max_norm``, ``scale_grad_by_freq`` or ``sparse``, which look at the
                whole table or its gradient.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(f"an embedding with {option} cannot be cut over the vocabulary")
        return (
            cls(
                embedding.num_embeddings,
                embedding.embedding_dim,
                embedding.padding_idx,
                group=group,
                output_layout=output_layout,
                device="meta",
                dtype=embedding.weight.dtype,
            )
            .to_empty(device=embedding.weight.device)
            .adopt(embedding)
        )

    def forward(self, ids: Tensor, *, scatter_dim: int = 0) -> Tensor:
        """``[…, T, …]`` ids to ``[…, T, …, hidden]``, or ``[…, T/W, …, hidden]`` where sharded."""
        return vocab_parallel_embedding(
            ids,
            local(self.weight),
            vocabulary=self.num_embeddings,
            padding_idx=self.padding_idx,
            group=self.comm,
            scatter_dim=scatter_dim if self.output_layout == "sharded" else None,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, "
            f"rank={self.comm.rank}/{self.comm.world_size}"
        )


class VocabParallelHead(ColumnParallelLinear):
    """A language-model head: a ``ColumnParallelLinear`` from hidden to the vocabulary.

    ``forward`` gives this rank's logits ``[…, T, …, V/W]``.
    """

    def gather(self, logits: Tensor) -> Tensor:
        """All logits ``[…, V]`` on every rank, from each rank's; for sampling, say."""
        return gather_features(logits, group=self.comm, gathered_size=self.out_features)

    def loss(self, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """The cross entropy of this rank's logits; see :func:`vocab_parallel_cross_entropy`."""
        return vocab_parallel_cross_entropy(
            logits, targets, vocabulary=self.out_features, group=self.comm, **options
        )
