"""The routing of a mixture of experts over several domains; made on the host, for every engine.

The table first, then what else those who carry rows on must know: which choices they are for.
"""

from __future__ import annotations

import numpy as np
import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across import collectives
from fusedcomm.engines.across.border import refuse_capture
from fusedcomm.engines.across.levels import two_levels
from fusedcomm.engines.routing import Route, route_on_host
from fusedcomm.planning import collectives as collective_planning
from fusedcomm.planning.moe import Plan, Terms, digest_text
from fusedcomm.planning.relaying import columns_of_slots, outgoing, part, write_choices

Tensor = torch.Tensor


def exchange_counts(comm: Communicator, plan: Plan, counts: np.ndarray) -> np.ndarray:
    """The table ``[W, E]``, from every rank's own row ``[E]``."""
    own = torch.from_numpy(counts.astype(np.int32)).view(1, -1)
    size, experts = comm.world_size, len(counts)
    table = own.new_empty(1, size * experts)
    bounds = [(rank * experts, (rank + 1) * experts) for rank in range(size)]
    gather = collective_planning.Plan(plan.text, "host", "hierarchical", None, plan.reason)
    collectives.all_gather(comm, gather, own, table, bounds)
    return table.view(size, experts).numpy().astype(np.int64)


def route(comm: Communicator, plan: Plan, terms: Terms, ids: Tensor, overflow: str) -> Route:
    """The routing of ids ``[T, k]``, agreed on by all ranks; see ``engines.routing``.

    Raises:
        CapacityError: some rank has no room, and nothing may be dropped.
        ValueError: a CUDA graph is captured: the host reads the ids.
    """
    refuse_capture()
    return route_on_host(exchange_counts, comm, plan, terms, ids, overflow)


def exchange_choices(
    comm: Communicator, plan: Plan, terms: Terms, table: Tensor, slot: Tensor
) -> Tensor:
    """What ``Relays`` are made of besides the routing: other domains' choices for this one.

    They are those of the ranks in this one's place.
    """
    counts_WE = table.cpu().numpy()
    parted = part(terms.num_experts, comm.world_size, terms.owners, comm.topology.domains)
    columns = columns_of_slots(slot.cpu().numpy(), counts_WE[comm.rank])
    text = f"{plan.text}: choices, {digest_text(counts_WE)}"
    with two_levels(comm, text, "dispatch", torch.device("cpu")) as levels:
        lists = [write_choices(columns, each.choices, parted)
                 for each in outgoing(columns, parted)]  # fmt: skip
        lists[levels.mine] = lists[levels.mine][:0]
        takes = counts_WE[levels.counterparts][:, parted.columns[levels.mine]].sum(1)
        takes[levels.mine] = 0
        sent = torch.from_numpy(np.concatenate(lists))
        crossing = levels.begin("choices", sent, [len(each) for each in lists], takes.tolist())
        number = torch.tensor([comm.calls.number & 0x7FFFFFFF], dtype=torch.int32)
        return torch.cat([number, *crossing.finish()])
