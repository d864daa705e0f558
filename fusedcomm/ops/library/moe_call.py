"""What the custom ops of the mixture of experts share: how a call is decided, sizes for tracing."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.engines.choices import dot_choices
from fusedcomm.engines.relays import relays_of
from fusedcomm.engines.routed import Routed
from fusedcomm.planning.moe import Plan, Terms, is_across, plan

#: num_experts, owners (ranks, blanks between them, or ""), align, capacity, max_tokens, group,
#: channel, engine. (A list would have to be answered by a list in every backward pass.)
Where = tuple[int, str, int, int | None, int | None, str, str, str]


class Run(NamedTuple):
    """One call, decided: who, how, and under which terms."""

    comm: Communicator
    plan: Plan
    terms: Terms
    engine: ModuleType

    def routed(self, table: Tensor, order: Tensor, slot: Tensor, relayed: Tensor) -> Any:
        """The routing as the engine takes it: ``Routed``, or ``Relays`` over several domains."""
        comm = self.comm
        if self.plan.across:
            place = (comm.topology.domains, comm.rank)
            return relays_of(self.terms, *place, table, order, slot, relayed)
        return Routed(self.terms, comm.rank, comm.world_size, table, order, slot)


def ranks_of(owners: str) -> tuple[int, ...]:
    """The ranks named in ``Where``'s owners."""
    return tuple(map(int, owners.split()))


def decide(op: str, like: Tensor, top_k: int, what: str, where: Where) -> Run:
    """How to run ``op`` on tensors like ``like``; ``what`` else must be equal on all ranks."""
    num_experts, owners, align, capacity, max_tokens, group, channel, engine = where
    comm = Communicator.named(group, channel)
    if comm.calls.aside and op != "moe_ffn":
        raise ValueError(
            f"{op} on a channel where a moe_ffn is under way: what runs beside it must use another "
            "channel"
        )
    terms = Terms(num_experts, top_k, ranks_of(owners), align, capacity, max_tokens)
    chosen = plan(comm, op, terms, device=like.device, dtype=like.dtype, what=what, engine=engine)
    family = "moe_across" if chosen.across else "moe"
    return Run(comm, chosen, terms, operations_of(chosen.engine, family))


def received(capacity: int | None) -> Any:
    """For fake kernels: how many rows a rank receives."""
    return torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity


def said(weights: Tensor | None) -> str:
    """What the board says of weights: all ranks must have some, or none."""
    return "" if weights is None else " weighted"


def kept_rows(like: Tensor, slot: Tensor, hidden: int, keep: bool, where: tuple) -> Tensor:
    """For fake kernels: the rows that are kept for the weights' gradient."""
    if not keep:
        return like.new_empty(0)
    *_, group, channel, engine = where
    if is_across(Communicator.named(group, channel), like.device, like.dtype, engine):
        return like.new_empty(torch.library.get_ctx().new_dynamic_size(), hidden)
    return like.new_empty(*slot.shape, hidden)


def weight_grad(
    dy: Tensor, weights: Tensor | None, kept: Tensor | None, slot: Tensor
) -> Tensor | None:
    """``⟨dy[t], row of (t, j)⟩`` ``[T, k]``, where the rows are kept on the tokens' rank."""
    if weights is None or kept is None:
        return None
    return dot_choices(kept, slot, dy, weights.dtype)
