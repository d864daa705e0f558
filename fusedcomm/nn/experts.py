"""The routed experts of a mixture: this rank's of them, their weights in Hugging Face's layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fusedcomm.engines.experts import ACTIVATIONS, GATED, LAYOUTS
from fusedcomm.nn.sharded import ShardedModule, local
from fusedcomm.ops.autocast import autocast
from fusedcomm.ops.checks_moe import check_placement
from fusedcomm.ops.moe import Placed, combine, dispatch, moe_ffn

#: Arguments of ``fusedcomm.moe_ffn`` that pass through the modules.
PASSED = ("align", "capacity", "max_tokens", "overflow", "engine")


class Experts(ShardedModule):
    """Feed-forward blocks of which each rank of the group has some, and each token needs a few.

    Parameters, with E_local this rank's experts, I = ffn and H = hidden (the names and shapes of
    Hugging Face's experts; ``transposed`` ones have their last two dimensions exchanged):

    ================= ========================== =======================================
    gate_up_proj      ``[E_local, 2 I, H]``      gate rows first, or in turn ("interleaved");
                                                 ``up_proj [E_local, I, H]`` without a gate
    down_proj         ``[E_local, H, I]``
    gate_up_proj_bias ``[E_local, 2 I]``         with ``bias``; ``up_proj_bias [E_local, I]``
    down_proj_bias    ``[E_local, H]``           with ``bias``
    ================= ========================== =======================================

    Attributes:
        dropped: a buffer, int64 ``[]``, with ``overflow="drop"``: how many of the last call's
            choices on this rank found no room. Not part of the state dict.

    Args:
        hidden, ffn: features outside and inside of one expert.
        num_experts: E, over all ranks.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        placement: the rank of every expert, E of them, equal on all ranks; a rank may have any
            number of experts, which lie in the order of their ids. None: blocks of ``ceil(E / W)``
            (``torch.chunk``'s rule).
        activation: "swiglu", "geglu", "geglu_tanh", "gpt_oss" or "relu2" (which has no gate), see
            :func:`fusedcomm.moe_ffn`; or a function from the up-projection's output
            ``[rows, 2 I]`` to ``[rows, I]`` (then dispatch, experts and combine run one after the
            other).
        gated: whether there is a gate; by default what the activation has. Only for functions.
        layout: "gate_up" or "interleaved".
        transposed: weights are ``[in, out]``, as gpt-oss's are.
        bias: whether both projections have one.
        passed: ``align``, ``capacity``, ``max_tokens``, ``overflow`` and ``engine`` of
            :func:`fusedcomm.moe_ffn`.

    Raises:
        ValueError: activation, layout or the name of an argument is none of these, or placement
            does not name a rank of the group for every expert.
    """

    dropped: Tensor | None

    shard_dims = dict.fromkeys(
        (
            "gate_up_proj",
            "up_proj",
            "down_proj",
            "gate_up_proj_bias",
            "up_proj_bias",
            "down_proj_bias",
        ),
        0,
    )

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        *,
        group: Any = None,
        placement: Placed = None,
        activation: str | Callable[[Tensor], Tensor] = "swiglu",
        gated: bool | None = None,
        layout: str = "gate_up",
        transposed: bool = False,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **passed: Any,
    ) -> None:
        super().__init__(group)
        if not callable(activation) and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, or a function; "
                f"got {activation!r}"
            )
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
        if unknown := passed.keys() - set(PASSED):
            raise ValueError(f"unknown arguments {sorted(unknown)}; legal are {', '.join(PASSED)}")
        if gated is None:
            gated = callable(activation) or activation in GATED
        elif not callable(activation) and gated != (activation in GATED):
            raise ValueError(f"activation {activation!r} says by itself whether there is a gate")
        self.hidden = hidden
        self.ffn = ffn
        self.num_experts = num_experts
        self.placement = check_placement(placement, num_experts, self.comm.world_size) or None
        if self.placement is not None:
            by_rank = sorted(range(num_experts), key=self.placement.__getitem__)  # stable: by id
            self.order = by_rank
        self.activation = activation
        self.gated = gated
        self.layout = layout
        self.transposed = transposed
        self.passed = passed
        # A buffer, not a new tensor for each call: compilers follow that under checkpointing, too.
        count = torch.zeros((), dtype=torch.int64, device=device)
        drops = passed.get("overflow") == "drop"
        self.register_buffer("dropped", count if drops else None, persistent=False)
        self.up_name = "gate_up_proj" if gated else "up_proj"
        names = [self.up_name, "down_proj"]
        if bias:
            names += [f"{self.up_name}_bias", "down_proj_bias"]
        for name in names:
            part = torch.empty(self.own_shape(name), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(part))
        self.has_bias = bias
        self.reset_parameters()

    def full_shape(self, name: str) -> list[int]:
        """The shape of a parameter of all experts."""
        width = self.ffn * (2 if self.gated else 1)
        if name == "down_proj_bias":
            return [self.num_experts, self.hidden]
        if name.endswith("_bias"):
            return [self.num_experts, width]
        matrix = [self.hidden, self.ffn] if name == "down_proj" else [width, self.hidden]
        return [self.num_experts, *(reversed(matrix) if self.transposed else matrix)]

    def shards(self, total: int) -> list[tuple[int, int]]:
        """Which experts each rank has: (start, stop) in ``order``."""
        if self.placement is None:
            return super().shards(total)
        counts = [self.placement.count(rank) for rank in range(self.comm.world_size)]
        stops = list(accumulate(counts))
        return [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]

    @property
    def local_experts(self) -> Sequence[int]:
        """The ids of this rank's experts."""
        own = slice(*self.shards(self.num_experts)[self.comm.rank])
        return (self.order or range(self.num_experts))[own]

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``nn.Linear`` does, expert by expert.

        Every rank draws all experts and keeps its own, so ranks with the same random state hold
        parts of one and the same mixture, whatever their number, and stay in step.
        """
        if self.dropped is not None:
            self.dropped.zero_()
        place = {expert: i for i, expert in enumerate(self.local_experts)}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                held = local(parameter)
                drawn = held.new_empty(self.full_shape(name)[1:])
                inside = self.hidden if name.startswith(self.up_name) else self.ffn
                bound = 1 / math.sqrt(inside) if inside else 0.0
                for expert in range(self.num_experts):
                    drawn.uniform_(-bound, bound)
                    if expert in place:
                        held[place[expert]].copy_(drawn)

    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """w13, w2, b13 and b2 as :func:`fusedcomm.moe_ffn` takes them."""
        w13, w2 = self._held(self.up_name), self._held("down_proj")
        if not self.has_bias:
            return w13, w2, None, None
        return w13, w2, self._held(f"{self.up_name}_bias"), self._held("down_proj_bias")

    def _held(self, name: str) -> Tensor:
        return local(self.get_parameter(name))

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        beside: Callable[[], Tensor] | None = None,
        *,
        num_tokens: int | Tensor | None = None,
    ) -> Any:
        """The weighted sum of what each token's experts make of it.

        Args:
            x: this rank's tokens ``[T, hidden]``; T may differ from rank to rank.
            ids: integers ``[T, k]``, global expert ids; others mean no expert.
            weights: ``[T, k]``.
            beside, num_tokens: see :func:`fusedcomm.moe_ffn`.

        Returns:
            ``[T, hidden]``; with ``beside``, this and its result. Zeros for a token of no expert.
        """
        w13, w2, b13, b2 = self.weights()
        common: dict[str, Any] = {
            "num_experts": self.num_experts,
            "group": self.comm,
            "placement": self.placement,
            "num_tokens": num_tokens,
        }
        if callable(self.activation):
            x, _, _ = autocast(x, (), ())
            routed = dispatch(x, ids, weights, **common, **self.passed)
            if self.dropped is not None:
                self.dropped.copy_(routed.dropped)
            rows = expert_by_expert(routed.x, routed.offs, self._one_expert)
            if not self.local_experts:  # their gradients, too, are of no experts rather than None
                rows = rows + sum(w.sum() for w in self.weights() if w is not None)
            y = combine(rows, routed)
            return y if beside is None else (y, beside())
        return moe_ffn(
            x,
            ids,
            weights,
            w13,
            w2,
            b13=b13,
            b2=b2,
            activation=self.activation,
            layout=self.layout,
            transposed=self.transposed,
            beside=beside,
            dropped=self.dropped,
            **common,
            **self.passed,
        )

    def _one_expert(self, expert: int, rows: Tensor) -> Tensor:
        """A local expert by its own activation function."""
        assert callable(self.activation)
        w13, w2, b13, b2 = self.weights()
        up, down = w13[expert], w2[expert]
        if self.transposed:
            up, down = up.t(), down.t()
        z = F.linear(rows, up, None if b13 is None else b13[expert])
        return F.linear(self.activation(z), down, None if b2 is None else b2[expert])

    def extra_repr(self) -> str:
        name = self.activation if isinstance(self.activation, str) else "function"
        text = (
            f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}, "
            f"activation={name}, rank={self.comm.rank}/{self.comm.world_size}"
        )
        return text if self.placement is None else f"{text}, placement={list(self.placement)}"


def expert_by_expert(rows: Tensor, offs: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Apply each local expert to its block of rows; rows behind the last block become 0.

    Experts without rows are called on none, so that their gradients are 0 rather than missing.

    Args:
        rows: ``[R, hidden]``, sorted by expert.
        offs: ``[E_local]``, the row after each expert's last.
        expert: from its local number and its rows to as many rows.
    """
    bounds = [0, *offs.tolist()]
    found = [expert(i, rows[start:stop]) for i, (start, stop) in enumerate(pairwise(bounds))]
    behind = rows[bounds[-1] :] * 0.0
    return torch.cat([*found, behind])
