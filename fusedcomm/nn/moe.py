"""The mixture-of-experts block of decoders, its experts spread over the ranks of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fusedcomm.nn.experts import Experts
from fusedcomm.nn.hf_blocks import (
    activation_alone,
    outputs_without_experts,
    read_block,
    read_experts,
)
from fusedcomm.nn.replicated import calls_on_shard
from fusedcomm.nn.router import Router, Routing
from fusedcomm.ops.checks_moe import check_num_tokens
from fusedcomm.ops.moe import Placed, present

_SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class SharedExpert(nn.Module):
    """A feed-forward block that every token goes through; whole on every rank.

    Args:
        hidden, ffn: features outside and inside.
        activation: "swiglu", "geglu" or "geglu_tanh": ``down(act(gate(x)) · up(x))``; "relu2":
            ``down(relu(up(x))²)``.
        bias: whether its projections have one.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _SHARED:
            raise ValueError(
                f"a shared expert's activation must be one of {', '.join(_SHARED)}; got "
                f"{activation!r}. Give a module as shared_ffn for another"
            )
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.activation = activation
        if activation != "relu2":
            self.gate_proj = nn.Linear(hidden, ffn, **factory)
        self.up_proj = nn.Linear(hidden, ffn, **factory)
        self.down_proj = nn.Linear(ffn, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden]`` to the same."""
        activation = _SHARED[self.activation]
        if self.activation == "relu2":
            return self.down_proj(activation(self.up_proj(x)))
        return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class MoE(nn.Module):
    """``y = Σ_j weights_j · expert_{ids_j}(x) + shared(x)``, each rank holding some experts.

    x is this rank's tokens. Their number may differ from rank to rank and be 0; all ranks of the
    group call the module together, forward and backward. Gradients are complete after the backward
    pass: an expert's are of all ranks' tokens, as are those of the router and the shared expert,
    which every rank holds whole (:func:`fusedcomm.parallel.sync_replicated` leaves them out).

    Args:
        hidden, ffn: features outside and inside of one expert.
        num_experts: E, over all ranks.
        top_k: how many of them a token goes to.
        group: the ranks; see ``fusedcomm.ops.tensor_parallel``.
        router: a :class:`Router`, or any module or function ``router(x) -> (logits, weights, ids)``
            for x ``[T, hidden]``; by default ``Router(hidden, num_experts, top_k)``.
        placement: the rank of every expert; by default they lie in blocks of ``ceil(E / W)``.
        activation, layout, transposed, bias: see :class:`fusedcomm.nn.experts.Experts`.
        shared_ffn: features inside of an expert that every token goes through; or a module that
            is one; None for none.
        shared_gate: multiply its output by ``sigmoid(linear(x))``, a number per token (Qwen2-MoE).
        jitter: in training, multiply x by uniform noise from ``1 − jitter`` to ``1 + jitter``
            (Switch Transformer's, Mixtral's).
        passed: ``align``, ``capacity``, ``max_tokens``, ``overflow`` and ``engine`` of
            :func:`fusedcomm.moe_ffn`.

    Raises:
        ValueError: arguments that do not go together; see also ``Experts`` and ``Router``.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        group: Any = None,
        router: nn.Module | Callable[[Tensor], Any] | None = None,
        placement: Placed = None,
        activation: str | Callable[[Tensor], Tensor] = "swiglu",
        layout: str = "gate_up",
        transposed: bool = False,
        bias: bool = False,
        shared_ffn: int | nn.Module | None = None,
        shared_gate: bool = False,
        jitter: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **passed: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, got in (("num_experts", num_experts), ("top_k", top_k)):
            if (of_router := getattr(router, name, got)) != got:
                raise ValueError(f"{name} is {got}, but the router's is {of_router}")
        if router is None:
            router = Router(hidden, num_experts, top_k, **factory)
        elif not isinstance(router, nn.Module):
            router = _Function(router)
        if shared_gate and shared_ffn is None:
            raise ValueError("shared_gate=True, but there is no shared expert: give shared_ffn")
        if isinstance(shared_ffn, int):
            if not isinstance(activation, str):
                raise ValueError("activation is a function: give a module as shared_ffn, too")
            shared_ffn = SharedExpert(hidden, shared_ffn, activation=activation, **factory)
        experts = Experts(
            hidden,
            ffn,
            num_experts,
            group=group,
            placement=placement,
            activation=activation,
            layout=layout,
            transposed=transposed,
            bias=bias,
            **factory,
            **passed,
        )
        gate = nn.Linear(hidden, 1, bias=False, **factory) if shared_gate else None
        self._adopt(experts, router=router, shared_expert=shared_ffn, shared_gate=gate)
        self.jitter = jitter

    def _adopt(self, experts: Experts, **parts: nn.Module | None) -> None:
        self.experts = experts
        #: What a part is -> the attribute that holds it; Hugging Face's blocks keep their names.
        self._names = {role: role for role, part in parts.items() if part is not None}
        for role in self._names:
            self.add_module(role, parts[role])
        self.jitter = 0.0
        #: gpt-oss's block returns the weights of the choices, too.
        self.returns_weights = False

    @classmethod
    def from_hf(cls, block: nn.Module, *, group: Any = None, **passed: Any) -> MoE:
        """The expert-parallel form of a sparse block of a Hugging Face model (transformers ≥ 5).

        For blocks made of a router, experts and possibly a shared expert with or without a gate, as
        those of Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and -V3, GLM-4-MoE, OLMoE, gpt-oss and
        most others are; what it computes is checked against the block on a few tokens. Names of
        parameters stay, so that the model's checkpoints load (``load_full_state_dict``), and it
        returns what the block returns, so that it can take its place in the model. The other models
        that have stacked experts are reached by
        :func:`fusedcomm.integrations.transformers.register`.

        Args:
            block: with its weights loaded, whole on every rank; copied from, not changed.
            group: the ranks; each keeps its experts.
            passed: ``placement`` and those of the class.

        Raises:
            ValueError: the block is put together in another way.
        """
        form = read_block(block)
        whole = getattr(block, form.experts)
        style = read_experts(whole)
        weight: Tensor = whole.down_proj
        ffn, hidden = weight.shape[1:] if style.transposed else (weight.shape[2], weight.shape[1])
        names = {style.up_name, "down_proj"}
        if style.bias:
            names |= {f"{name}_bias" for name in names}
        held = {name for name, _ in whole.named_parameters()}
        if style.normed or held != names:
            raise ValueError(
                f"the experts of {type(block).__name__} hold {', '.join(sorted(held))}"
                f"{' and a norm' * style.normed}; expected {', '.join(sorted(names))}"
            )
        experts = Experts(
            hidden,
            ffn,
            weight.shape[0],
            group=group,
            activation=style.activation or activation_alone(whole),
            gated=style.gated if style.activation is None else None,
            layout=style.layout,
            transposed=style.transposed,
            bias=style.bias,
            device="meta",
            dtype=weight.dtype,
            **passed,
        )
        moe = cls.__new__(cls)
        nn.Module.__init__(moe)
        roles = {
            "router": form.router,
            "shared_expert": form.shared,
            "shared_gate": form.shared_gate,
        }
        moe._adopt(experts.to_empty(device=weight.device).adopt(whole))
        if experts.dropped is not None:
            experts.dropped.zero_()
        moe._names = {role: name for role, name in roles.items() if name}
        for name in moe._names.values():
            moe.add_module(name, copy.deepcopy(getattr(block, name)))
        moe.jitter = float(getattr(block, "jitter_noise", 0.0))
        expected = outputs_without_experts(block, form.experts)
        moe.returns_weights = isinstance(expected, tuple)
        found = outputs_without_experts(moe, "experts")
        if not _same(found, expected):
            raise ValueError(
                f"{type(block).__name__} does more than router, experts and shared expert: what it "
                "makes of them differs. Use ep_implementation='fusedcomm' "
                "(fusedcomm.integrations.transformers), which leaves the block as it is"
            )
        return moe.train(block.training)

    def _part(self, role: str) -> Any:
        name = self._names.get(role)
        return None if name is None else getattr(self, name)

    def forward(
        self,
        x: Tensor,
        *,
        num_tokens: int | Tensor | None = None,
        return_routing: bool = False,
    ) -> Any:
        """``[…, hidden]`` to the same.

        Args:
            num_tokens: how many of x's tokens there are; those behind them are padding, whatever
                they hold. Their y and their gradient are zeros, nothing is sent for them, and no
                gradient of a parameter has a part of theirs. In the routing their ids are -1 and
                their weights 0, so that no count and no loss of it counts them. A number or an
                integer tensor, which on a GPU may be changed between replays of a captured graph.
                Another one on every rank.
            return_routing: return ``(y, routing)``, for a loss that balances the load
                (:func:`fusedcomm.nn.load_balancing_loss`) or for looking at it.
        """
        check_num_tokens(x, num_tokens)
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        rows = x.reshape(-1, x.shape[-1])
        there = None if num_tokens is None else present(rows, num_tokens)
        if there is not None:
            # Router and shared expert read every row: what is no token's, NaN perhaps, would
            # come into the gradients of their parameters, multiplied by 0.
            rows = torch.where(there, rows, 0.0)
        router, shared, gate = map(self._part, ("router", "shared_expert", "shared_gate"))
        call = calls_on_shard(self.experts.comm, (router, shared, gate))
        routing = Routing(*call(router, rows))
        if there is not None:
            ids = torch.where(there, routing.ids.long(), -1)
            routing = routing._replace(ids=ids, weights=torch.where(there, routing.weights, 0.0))
        if shared is None:
            y = self.experts(rows, routing.ids, routing.weights).reshape(x.shape)
        else:

            def beside() -> Tensor:
                own = call(shared, rows)
                own = own if gate is None else torch.sigmoid(call(gate, rows)) * own
                return own if there is None else torch.where(there, own, 0.0)

            y, own = self.experts(rows, routing.ids, routing.weights, beside)
            y = y.reshape(x.shape) + own.reshape(x.shape)
        if return_routing:
            return y, routing
        return (y, routing.weights) if self.returns_weights else y


def _same(found: Any, expected: Any) -> bool:
    """Whether two outputs of a block agree, up to the order of sums."""
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return False
    if found.shape != expected.shape:
        return False
    limit = 16 * torch.finfo(expected.dtype).eps
    return torch.allclose(found.double(), expected.double(), rtol=limit, atol=limit)
