"""The topology of a group, from what every rank says of itself.

A rank says which machine it is on (ranks of one machine can share memory), on which GPU if it has
one, and which other GPUs that one reaches. All ranks compute the topology from all ranks' words,
so all come to the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from fusedcomm.topology import calibration, nvml
from fusedcomm.topology.links import NETWORK, PCIE, SHARED_MEMORY, TCP, Link
from fusedcomm.topology.model import Topology
from fusedcomm.topology.partition import domains_of

#: Between two ranks on one GPU; its own memory sets the pace.
_SAME_GPU = Link("same-gpu", 1000e9, 5e-6)


@dataclass(frozen=True)
class Facts:
    """What one rank says of itself.

    Attributes:
        machine: equal for two ranks exactly if they can share memory.
        device: "cpu" or "cuda".
        gpu: the UUID of its GPU; "" without one, or where nobody knows.
        links: UUID of every GPU that its GPU can read and write -> over which link.
        clique: the NVLink fabric over several machines that its GPU is in; "" for none.
        measured: kind of link -> what was measured on its machine.
        note: what a person should know.
    """

    machine: str
    device: str = "cpu"
    gpu: str = ""
    links: Mapping[str, Link] = field(default_factory=dict)
    clique: str = ""
    measured: Mapping[str, Link] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> str:
        """As the other ranks read it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """What ``to_json`` wrote."""
        content = json.loads(text)
        for name in ("links", "measured"):
            content[name] = {key: Link(**value) for key, value in content[name].items()}
        return cls(**content)


def facts_of(machine: str, device: torch.device) -> Facts:
    """This process's facts; asks NVML where the device is a GPU."""
    measured = calibration.load()
    if device.type != "cuda":
        return Facts(machine, measured=measured)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        gpus, _ = nvml.read()
    except nvml.NvmlMissingError as error:
        return Facts(machine, "cuda", uuid, measured=measured, note=str(error))
    found = next((gpu for gpu in gpus if gpu.uuid == uuid), None)
    if found is None:
        note = f"NVML does not list {uuid}, as for a part of a GPU (MIG)"
        return Facts(machine, "cuda", uuid, measured=measured, note=note)
    return Facts(machine, "cuda", uuid, found.links, found.clique, measured)


def topology_of(facts: Sequence[Facts], declared: Topology | None = None) -> Topology:
    """The topology of the ranks that stated these facts, in their order.

    Args:
        declared: what the user says; it may split what was found, and names links.

    Raises:
        ValueError: a declared domain has ranks of several machines, or other ranks than the group.
    """
    if declared is not None:
        return _agreed(facts, declared).with_links(facts[0].measured)
    on_gpus = all(rank.device == "cuda" for rank in facts)
    links: dict[tuple[int, int], Link] = {}
    for a, first in enumerate(facts):
        for b in range(a + 1, len(facts)):
            link = _link(first, facts[b])
            if link is not None:
                links[a, b] = link
    domains = domains_of(len(facts), lambda a, b: (min(a, b), max(a, b)) in links)
    inside = next(iter(links.values()), PCIE if on_gpus else SHARED_MEMORY)
    return Topology(
        domains,
        links={pair: link for pair, link in links.items() if link != inside},
        inside=inside,
        between=NETWORK if on_gpus else TCP,
        source="NVML" if on_gpus else "the machine",
        notes=_notes(facts, domains),
    ).with_links(facts[0].measured)


def _link(a: Facts, b: Facts) -> Link | None:
    """How two ranks address each other; None if they cannot."""
    if a.machine != b.machine:
        return None
    if a.device != "cuda" or b.device != "cuda":
        return SHARED_MEMORY if a.device == b.device else None
    if a.gpu == b.gpu:
        return _SAME_GPU
    if a.note or b.note:
        return PCIE  # Nobody knows: it is found out by mapping the memory.
    there, back = a.links.get(b.gpu), b.links.get(a.gpu)
    if there is None or back is None:
        return None
    return min(there, back, key=lambda link: link.bandwidth)


def _agreed(facts: Sequence[Facts], declared: Topology) -> Topology:
    if declared.world_size != len(facts):
        raise ValueError(
            f"the declared topology has {declared.world_size} ranks, the group {len(facts)}"
        )
    for ranks in declared.domains:
        first = ranks[0]
        for rank in ranks:
            if facts[rank].machine != facts[first].machine:
                raise ValueError(
                    f"the declared domain {list(ranks)} has ranks {first} and {rank}, which lie on "
                    "different machines (or in different namespaces) and cannot share memory"
                )
    return declared


def _notes(facts: Sequence[Facts], domains: list[list[int]]) -> list[str]:
    notes = [
        f"rank {rank}: {each.note}; ranks of one machine are taken to reach each other"
        for rank, each in enumerate(facts)
        if each.note
    ]
    machines = {each.machine for each in facts}
    cliques = {each.clique for each in facts if each.clique}
    if len(machines) > 1 and len(cliques) < len(machines) and cliques:
        notes.append("NVLink joins several machines; a domain ends at its machine all the same")
    if len(domains) > len(machines) and all(each.device == "cuda" for each in facts):
        notes.append(
            "not all GPUs of a machine can address each other: `python -m fusedcomm doctor` says "
            "which, and why"
        )
    return notes
