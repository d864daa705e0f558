"""The gated feed-forward block of today's decoders, cut over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear, check_layout
from fusedcomm.ops.tensor_parallel import all_gather_linear, replicated_linear


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) · up(x))``; gate and up share one gather of x.

    Args:
        hidden, ffn: features outside and inside, of the whole block.
        bias: whether the three layers have one.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        activation: applied to gate's output; SiLU by default.
        layout: "sharded": x and y are this rank's tokens; "replicated": all tokens.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        bias: bool = False,
        group: Any = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        layout: str = "sharded",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_layout("layout", layout)
        factory: dict[str, Any] = {"group": group, "device": device, "dtype": dtype}
        self._adopt(
            ColumnParallelLinear(hidden, ffn, bias, input_layout=layout, **factory),
            ColumnParallelLinear(hidden, ffn, bias, input_layout=layout, **factory),
            RowParallelLinear(ffn, hidden, bias, output_layout=layout, **factory),
            activation,
        )

    @classmethod
    def from_linears(
        cls,
        gate_proj: nn.Linear,
        up_proj: nn.Linear,
        down_proj: nn.Linear,
        *,
        group: Any = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        layout: str = "sharded",
    ) -> GatedMLP:
        """This rank's part of an existing block; parameter names as in Llama's."""
        check_layout("layout", layout)
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block._adopt(
            ColumnParallelLinear.from_linear(gate_proj, group=group, input_layout=layout),
            ColumnParallelLinear.from_linear(up_proj, group=group, input_layout=layout),
            RowParallelLinear.from_linear(down_proj, group=group, output_layout=layout),
            activation,
        )
        return block

    def _adopt(
        self,
        gate_proj: ColumnParallelLinear,
        up_proj: ColumnParallelLinear,
        down_proj: RowParallelLinear,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation

    def forward(self, x: Tensor, *, dim: int = 0, gathered_size: int | None = None) -> Tensor:
        """``[…, T/W, …, hidden]`` to the same (or ``[…, T, …, hidden]`` where replicated).

        Args:
            dim, gathered_size: the cut dimension and T; see :func:`fusedcomm.all_gather_linear`.
        """
        gate, up = self.gate_proj, self.up_proj
        (w_gate, b_gate), (w_up, b_up) = gate.local_parameters(), up.local_parameters()
        weights, biases = (w_gate, w_up), (b_gate, b_up)
        if gate.input_layout == "replicated":
            gated, linear = replicated_linear(x, weights, biases, group=gate.comm)
            return self.down_proj(self.activation(gated) * linear)
        gated, linear = all_gather_linear(
            x,
            weights,
            biases,
            group=gate.comm,
            gather_dim=dim,
            gathered_size=gathered_size,
        )
        return self.down_proj(self.activation(gated) * linear, scatter_dim=dim)
