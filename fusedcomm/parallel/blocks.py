"""The pieces that make a decoder sequence-sharded: layers, and hooks between them.

Hooks and layers share a ``Region``, which knows how many tokens the running forward pass has: a
shard does not tell. A block's forward is left as it is. It finds its linear layers exchanged, and
gets a placeholder of the full shape for its input: the products of the layers that share a gather
are computed as the block begins, and each layer hands its own out.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.communicator import Communicator
from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.vocabulary import VocabParallelHead
from fusedcomm.ops.layouts import gather_tokens, split_tokens
from fusedcomm.ops.tensor_parallel import all_gather_linear, replicated_linear
from fusedcomm.ops.vocabulary import vocab_parallel_cross_entropy


class Region:
    """What the pieces of one model know of the forward pass that runs.

    Attributes:
        tokens: of all ranks, in the second last dimension of activations.
        head_follows: whether the head will see what the last norm returns, shards then.
        joined: whether the last norm returned all tokens.
        keep: which tokens' logits are wanted: 0 for all, n for the last n, or indices.
        local_logits: whether the head returns this rank's part of the vocabulary only.
    """

    def __init__(self, comm: Communicator, has_head: bool, local_logits: bool) -> None:
        self.comm = comm
        self.tokens = 0
        self.has_head = has_head
        self.head_follows = False
        self.joined = False
        self.keep: Any = 0
        self.always_local = local_logits
        self.local_logits = local_logits

    # Hooks of the model

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Before the model's forward: see what is asked of the head."""
        given = dict(kwargs)
        names = inspect.signature(model.forward).parameters
        given.update(zip(names, args, strict=False))
        self.head_follows = self.has_head
        self.local_logits = self.always_local or given.get("labels") is not None
        self.keep = given.get("logits_to_keep", 0)
        if "logits_to_keep" in given:  # The head keeps them itself: it knows of shards.
            position = list(names).index("logits_to_keep")
            if position < len(args):
                args = (*args[:position], 0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "logits_to_keep": 0}
        return args, kwargs

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After the model's forward, whatever came of it."""
        self.head_follows = False
        self.keep = 0

    # Hooks within the trunk

    def split(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Before the first layer: every rank keeps its tokens."""

        def own(x: Tensor) -> Tensor:
            self.tokens = x.shape[-2]
            return split_tokens(x, group=self.comm, dim=-2)

        return _with_input(own, args, kwargs)

    def join(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """After the last norm, where no head follows: every rank gets all tokens."""
        self.joined = not self.head_follows
        if not self.joined:
            return None
        return gather_tokens(output, group=self.comm, dim=-2, gathered_size=self.tokens)


def _with_input(change: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments with its hidden states, the first of them, changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    raise ValueError(
        "a layer was called without its hidden states: they must be the first argument, or named "
        "hidden_states"
    )


class SharedGather:
    """Hooks of a block whose first layers multiply the same input.

    Args:
        names: of the layers in the block.
    """

    def __init__(self, region: Region, names: tuple[str, ...]) -> None:
        self.region = region
        self.names = names

    def install(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self.before, with_kwargs=True)
        block.register_forward_hook(self.after, always_call=True)

    def before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Gather the tokens beside the products, and give the block a placeholder for them."""
        region = self.region
        rotation = kwargs.get("position_embeddings")
        if rotation is not None:
            # Recomputed by activation checkpointing, another forward pass may have come since.
            region.tokens = rotation[0].shape[-2]

        def multiply(x: Tensor) -> Tensor:
            layers: list[SharedColumn] = [getattr(block, name) for name in self.names]
            weights, biases = zip(*(layer.local_parameters() for layer in layers), strict=True)
            products = all_gather_linear(
                x, weights, biases, group=region.comm, gather_dim=-2, gathered_size=region.tokens
            )
            for layer, product in zip(layers, products, strict=True):
                layer.product = product
            # One NaN in the shape of all tokens: whoever reads it will notice.
            return x.new_full((), math.nan).expand(*x.shape[:-2], region.tokens, x.shape[-1])

        return _with_input(multiply, args, kwargs)

    def after(self, block: nn.Module, args: Any, output: Any) -> None:
        """Let go of what the block did not fetch: it may have failed."""
        for name in self.names:
            getattr(block, name).product = None


class SharedColumn(ColumnParallelLinear):
    """A column layer that hands out what ``SharedGather`` computed, once."""

    product: Tensor | None = None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        product, self.product = self.product, None
        if product is None:
            raise RuntimeError(
                "a layer that shares its gather was called twice, or outside of its block: "
                "parallelize expects a block to call each of its linear layers once"
            )
        return product


class TokenRow(RowParallelLinear):
    """A row layer whose output is cut along the second last dimension."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x, scatter_dim=x.dim() - 2)


class Head(VocabParallelHead):
    """The head: from token shards to the logits of all tokens.

    Called apart from its model, it gets what the last norm returned then: all tokens.
    """

    region: Region

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        region = self.region
        weight, bias = self.local_parameters()
        keep, size = region.keep, region.tokens
        everything = isinstance(keep, int) and keep == 0
        if everything and not region.joined:
            logits = all_gather_linear(
                x, weight, bias, group=self.comm, gather_dim=-2, gathered_size=size
            )
        else:
            if not region.joined:
                x = gather_tokens(x, group=self.comm, dim=-2, gathered_size=size)
            if not everything:
                x = x[..., slice(-keep, None) if isinstance(keep, int) else keep, :]
            logits = replicated_linear(x, weight, bias, group=self.comm)
        return logits if region.local_logits else self.gather(logits)


class CausalLoss:
    """transformers' loss for causal language models, of logits cut over the vocabulary."""

    def __init__(self, comm: Communicator, vocabulary: int) -> None:
        self.comm = comm
        self.vocabulary = vocabulary

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The mean over the tokens, or the sum over ``num_items_in_batch``; tokens < n predict n.

        Args:
            logits: this rank's, ``[batch, T, V/W]``.
            labels: ``[batch, T]``, not yet shifted.
            shift_labels: ``[batch, T]``, already shifted, instead.
        """
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels.to(logits.device),
            vocabulary=self.vocabulary,
            group=self.comm,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
