"""Hugging Face transformers' expert parallelism (5.21 and later), its tokens moved by this library.

``fusedcomm.integrations.transformers.register()`` adds the implementation "fusedcomm", which a
model is loaded with::

    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(
            tp_size=2, ep_size=2, ep_implementation="fusedcomm"))

It serves every model whose expert plan says ``ep_dispatch_experts``; how the experts are to be
understood is read from their flags:

============================================= ====================================================
experts                                       carried out by
============================================= ====================================================
an activation known to ``fusedcomm.moe_ffn``, ``moe_ffn``, overlapped, on the experts' own weights,
no norm behind the experts                    transposed, interleaved and biased as they are
any other                                     ``dispatch``, the experts' own forward on the rows
                                              that came, ``combine``
============================================= ====================================================

The own forward (``experts_implementation``) sees this rank's rows and local ids only, never a
sentinel. Ranks that share a batch (tensor parallelism, as in the example) each send a part of its
tokens, and gather the results.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from fusedcomm.communicator import Communicator
from fusedcomm.nn.hf_blocks import ExpertsForm, read_experts
from fusedcomm.ops.layouts import gather_tokens, split_tokens
from fusedcomm.ops.moe import combine, dispatch, moe_ffn

NAME = "fusedcomm"


def register_expert_parallelism() -> None:
    """Make ``ep_implementation="fusedcomm"`` known to transformers."""
    EPImplementationInterface.register(NAME, FusedExpertParallelism)


class FusedExpertParallelism(EPImplementation):
    """How one experts module of a model gets its tokens; transformers makes one for each."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        held: Any = experts
        self.experts = held
        self.num_experts: int = held.num_experts * ep_mesh.size()

    # What follows waits for the first forward: here, parameters may be on the meta device.

    @cached_property
    def form(self) -> ExpertsForm:
        """What the experts compute."""
        return read_experts(self.experts)

    @cached_property
    def comm(self) -> Communicator:
        """The ranks that hold the experts."""
        return Communicator.of(self.ep_mesh)

    @cached_property
    def sharing(self) -> Communicator | None:
        """The ranks that have the same tokens, if there are several."""
        if self.tp_mesh.size() == 1:
            return None
        return self.comm if self.shares_batch else Communicator.of(self.tp_mesh)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it.

        Args:
            hidden_states: ``[T, hidden]``.
            top_k_index: ``[T, k]``, global ids.
            top_k_weights: ``[T, k]``.
        """
        sharing, tokens = self.sharing, hidden_states.shape[0]
        if sharing is None:
            return self._routed(hidden_states, top_k_index, top_k_weights)
        y = self._routed(
            split_tokens(hidden_states, group=sharing),
            split_tokens(top_k_index, group=sharing),
            split_tokens(top_k_weights, group=sharing),
        )
        return gather_tokens(y, group=sharing, gathered_size=tokens)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """For tokens that no other rank has."""
        form, experts = self.form, self.experts
        common: dict[str, Any] = {"num_experts": self.num_experts, "group": self.comm}
        if form.activation is None or form.normed:
            d = dispatch(x, ids, weights, **common)
            return combine(self._own_forward(d.x, d.counts), d)
        bias = form.bias
        return moe_ffn(
            x,
            ids,
            weights,
            getattr(experts, form.up_name),
            experts.down_proj,
            b13=getattr(experts, f"{form.up_name}_bias") if bias else None,
            b2=experts.down_proj_bias if bias else None,
            activation=form.activation,
            layout=form.layout,
            transposed=form.transposed,
            **common,
        )

    def _own_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' forward on the rows that came, each for one local expert, with weight 1."""
        empty = rows.shape[0] == 0
        if empty:
            # One row of zeros, cut off again: the experts' gradients are then zeros, not None.
            rows = rows.new_zeros(1, rows.shape[1])
            ids = torch.zeros(1, dtype=torch.int64, device=rows.device)
        else:
            ids = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        ones = torch.ones(len(ids), 1, dtype=rows.dtype, device=rows.device)
        found = self.experts_forward(rows, ids.unsqueeze(1), ones)
        return found[:0] if empty else found
