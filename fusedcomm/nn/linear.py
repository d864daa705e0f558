"""Linear layers cut over the ranks of a group.

===================== ============= ================ ======================================
module                weight        input            output
===================== ============= ================ ======================================
ColumnParallelLinear  [out/W, in]   token shard, or  all tokens, this rank's features
                                    all tokens
RowParallelLinear     [out, in/W]   all tokens, this token shard, or all tokens
                                    rank's features
===================== ============= ================ ======================================

A column layer followed by a row layer is an MLP or an attention block with one exchange on each
side. The shards are ``torch.chunk``'s, uneven and empty ones included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.nn.sharded import ShardedModule, local
from fusedcomm.ops.tensor_parallel import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)

LAYOUTS = ("sharded", "replicated")


def check_layout(name: str, layout: str) -> str:
    """``layout`` if it is one.

    Raises:
        ValueError: it is none.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{name} must be 'sharded' or 'replicated'; got {layout!r}")
    return layout


class _ParallelLinear(ShardedModule):
    """What the two layers share: their parameters' creation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, unit)
        self.in_features = in_features
        self.out_features = out_features
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(self.own_shape("weight"), **factory))
        self.bias = nn.Parameter(torch.empty(self.own_shape("bias"), **factory)) if bias else None
        self.reset_parameters()

    def full_shape(self, name: str) -> list[int]:
        return [self.out_features, self.in_features] if name == "weight" else [self.out_features]

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does, from the full layer's fan-in.

        Every rank draws the full tensors and keeps its shard, so ranks with the same random state
        hold exactly the shards of the layer that ``nn.Linear`` would have drawn, and stay in step.
        """
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        with torch.no_grad():
            full = torch.empty(self.out_features, self.in_features, **like)
            if full.numel():
                nn.init.kaiming_uniform_(full, a=math.sqrt(5))
            self.load_part("weight", full)
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
                full = torch.empty(self.out_features, **like).uniform_(-bound, bound)
                self.load_part("bias", full)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as plain tensors: this rank's parts."""
        return local(self.weight), None if self.bias is None else local(self.bias)

    @classmethod
    def _like(cls, linear: nn.Linear, group: Any, **options: Any) -> Any:
        """A layer that holds this rank's shards of an existing one."""
        return (
            cls(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                group=group,
                device="meta",
                dtype=linear.weight.dtype,
                **options,
            )
            .to_empty(device=linear.weight.device)
            .adopt(linear)
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.comm.rank}/{self.comm.world_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """``y = x · weightᵀ + bias`` with the output features cut over the ranks.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether to add one; each rank holds its features' part.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        input_layout: "sharded": x is this rank's tokens ``[T/W, …, in]``, gathered beside the
            product; "replicated": x is all tokens, and only the gradient communicates.
        unit: output features are cut in multiples of this (the size of an attention head, say).
    """

    shard_dims = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        input_layout: str = "sharded",
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout("input_layout", input_layout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, group=group, unit=unit, **factory)
        self.input_layout = input_layout

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: Any = None, input_layout: str = "sharded", unit: int = 1
    ) -> ColumnParallelLinear:
        """This rank's part of an existing layer; parameter names stay."""
        return cls._like(linear, group, input_layout=input_layout, unit=unit)

    def forward(
        self, x: Tensor, *, gather_dim: int = 0, gathered_size: int | None = None
    ) -> Tensor:
        """``[…, T/W, …, in]`` (or ``[…, in]`` where replicated) to ``[…, T, …, out/W]``.

        Args:
            gather_dim, gathered_size: see :func:`fusedcomm.all_gather_linear`.
        """
        weight, bias = self.local_parameters()
        if self.input_layout == "replicated":
            return replicated_linear(x, weight, bias, group=self.comm)
        return all_gather_linear(
            x,
            weight,
            bias,
            group=self.comm,
            gather_dim=gather_dim,
            gathered_size=gathered_size,
        )


class RowParallelLinear(_ParallelLinear):
    """``y = Σ_ranks x · weightᵀ + bias`` with the input features cut over the ranks.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether to add one, once, after the sum; replicated, with a complete gradient.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        output_layout: "sharded": y is this rank's tokens ``[T/W, …, out]``; "replicated": y is all
            tokens, equal on every rank.
        unit: input features are cut in multiples of this (the size of an attention head, say).
    """

    shard_dims = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        output_layout: str = "sharded",
        unit: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout("output_layout", output_layout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, group=group, unit=unit, **factory)
        self.output_layout = output_layout

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: Any = None, output_layout: str = "sharded", unit: int = 1
    ) -> RowParallelLinear:
        """This rank's part of an existing layer; parameter names stay."""
        return cls._like(linear, group, output_layout=output_layout, unit=unit)

    def forward(self, x: Tensor, *, scatter_dim: int = 0) -> Tensor:
        """``[…, T, …, in/W]`` to ``[…, T/W, …, out]``, or ``[…, T, …, out]`` where replicated.

        Args:
            scatter_dim: see :func:`fusedcomm.linear_reduce_scatter`.
        """
        weight, bias = self.local_parameters()
        if self.output_layout == "replicated":
            return linear_all_reduce(x, weight, bias, group=self.comm)
        return linear_reduce_scatter(x, weight, bias, group=self.comm, scatter_dim=scatter_dim)
