"""What the ranks' GPUs are, and whether the ranks can address each other through them.

Every rank writes down what it has; all read all, and come to the same answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusedcomm.symmetric.exchange import exchange
from fusedcomm.symmetric.shm import Segment
from fusedcomm.waiting import Watch

#: The least compute capability with bfloat16 and asynchronous copies.
LEAST_CAPABILITY = (8, 0)
#: With this variable torch lets several ranks share one GPU.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
#: With 1, the driver may put a copy behind a kernel that waits for it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_PAGE = 4096


@dataclass(frozen=True)
class Facts:
    """One rank's GPU.

    Attributes:
        uuid: names the GPU, whatever its number in this process.
        capability: (major, minor).
        hip: whether torch was built for ROCm.
        overlapping: whether several ranks may share a GPU.
        one_queue: whether the driver has a single queue for all streams.
        unreachable: uuids of GPUs of other ranks that this one cannot address.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    hip: bool = False
    overlapping: bool = False
    one_queue: bool = False
    unreachable: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Facts:
        found: dict[str, Any] = json.loads(data)
        for name, value in found.items():
            found[name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)


@dataclass(frozen=True)
class Domain:
    """What follows for the group, equally on every rank.

    Attributes:
        obstacle: why the ranks cannot work in each other's GPU memory; None if they can.
        copies: whether copy engines can carry data beside a kernel that waits for it: the GPUs are
            different ones, so that copies need none of the kernel's processors.
    """

    obstacle: str | None
    copies: bool


def facts_of(device: torch.device) -> Facts:
    """This rank's facts; of the peers it knows nothing yet."""
    properties = torch.cuda.get_device_properties(device)
    return Facts(
        uuid=str(properties.uuid),
        name=properties.name,
        capability=(properties.major, properties.minor),
        hip=torch.version.hip is not None,
        overlapping=os.environ.get(OVERLAPPING) == "1",
        one_queue=os.environ.get(CONNECTIONS) == "1",
    )


def unreachable_from(device: torch.device, others: Sequence[Facts]) -> tuple[str, ...]:
    """The uuids of GPUs that this process sees and ``device`` cannot address.

    Those that it does not see (CUDA_VISIBLE_DEVICES) are left for the driver to tell.
    """
    numbers = {
        str(torch.cuda.get_device_properties(number).uuid): number
        for number in range(torch.cuda.device_count())
    }
    own = device.index
    return tuple(
        sorted(
            other.uuid
            for other in set(others)
            if (number := numbers.get(other.uuid, own)) != own
            and not torch.cuda.can_device_access_peer(own, number)
        )
    )


def judge(ranks: Sequence[Facts]) -> Domain:
    """What follows from all ranks' facts."""
    shared = len({facts.uuid for facts in ranks}) < len(ranks)
    obstacle = None
    for rank, facts in enumerate(ranks):
        least, found = (".".join(map(str, c)) for c in (LEAST_CAPABILITY, facts.capability))
        if facts.hip:
            obstacle = (
                "this is a ROCm build of torch; the kernels compile for AMD GPUs, but their waits "
                "and signals were never tried on one"
            )
        elif facts.capability < LEAST_CAPABILITY:
            obstacle = (
                f"rank {rank} has a {facts.name} of compute capability {found}; the kernels need "
                f"{least} (Ampere) or newer"
            )
        elif facts.unreachable:
            whose = [r for r, other in enumerate(ranks) if other.uuid in facts.unreachable]
            obstacle = (
                f"the GPU of rank {rank} cannot address that of rank {whose[0]} (no peer access; "
                "see nvidia-smi topo -p2p r)"
            )
        elif shared and not facts.overlapping:
            obstacle = (
                f"several ranks share one GPU; for tests, torch allows it with {OVERLAPPING}=1"
            )
        if obstacle is not None:
            break
    copies = obstacle is None and not shared and not any(facts.one_queue for facts in ranks)
    return Domain(obstacle, copies)


def survey(watch: Watch, device: torch.device, world_size: int) -> Domain:
    """Find out; within one call of all ranks."""
    own = facts_of(device)
    ranks = _exchanged(watch, own, "GPU", world_size)
    seen = replace(own, unreachable=unreachable_from(device, ranks))
    return judge(_exchanged(watch, seen, "peer access", world_size))


def _exchanged(watch: Watch, own: Facts, label: str, world_size: int) -> list[Facts]:
    """Every rank's facts, by rank, through shared memory."""
    segment = Segment.create("facts", _PAGE)
    data = own.to_bytes()
    segment.bytes[8 : 8 + len(data)] = data
    segment.words[0] = len(data)
    segments = exchange(watch, segment, label, world_size)
    watch.fence()
    return [Facts.from_bytes(bytes(s.bytes[8 : 8 + s.words[0]])) for s in segments]
