"""Getting every rank's memory of one kind mapped here; collective."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fusedcomm.errors import MismatchError
from fusedcomm.symmetric import cuda
from fusedcomm.symmetric.cuda import CudaSegment
from fusedcomm.symmetric.groups import TorchGroup
from fusedcomm.symmetric.shm import Segment
from fusedcomm.waiting import Awaited, Watch


def allocate(
    watch: Watch,
    group: TorchGroup,
    name: str,
    label: str,
    size: int,
    device: torch.device,
    first_words: Sequence[int] = (),
    first_value: int = 0,
) -> Sequence[Segment | CudaSegment]:
    """Zeroed memory of ``size`` bytes on every rank, by rank; within one call of all ranks.

    Args:
        group: whose ranks take part.
        name, label: what the operating system calls it, in one word, and what messages call it.
        device: this rank's; the ranks' are of one type.
        first_words, first_value: int32 words that begin with another value than 0, on every rank.

    Raises:
        MismatchError: a peer is allocating something else.
        SharedMemoryError: there is no such memory.
    """
    if device.type == "cpu":
        own = Segment.create(name, size)
        for index in first_words:
            own.words[index] = first_value
        return exchange(watch, own, label, group.world_size)
    awaited = Awaited(watch.text, watch.number, -1, f"GPU memory ({label})")
    for peer in watch.links.peers:  # Torch would wait for one that is elsewhere, or dead.
        watch.await_call(peer, awaited)
    watch.look(awaited)
    tag = f"{label}, channel {watch.channel!r}, call {watch.number}"
    return cuda.allocate(group, tag, size, device, first_words, first_value)


def exchange(watch: Watch, own: Segment, label: str, world_size: int) -> list[Segment]:
    """Every rank's segment of the same name and size, by rank, mapped here; collective.

    Raises:
        MismatchError: a peer is allocating something else.
    """
    payload = f"{label} {own.size}".encode()
    awaited = Awaited(watch.text, watch.number, -1, f"shared memory ({label})")
    segments = [own] * world_size
    try:
        # In step, so that few descriptors are under way at a time: their number is limited.
        for step in range(1, world_size):
            watch.send((watch.rank + step) % world_size, payload, own.descriptor, awaited)
            source = (watch.rank - step) % world_size
            theirs, descriptor = watch.receive(source, awaited)
            if theirs != payload:
                os.close(descriptor)
                watch.compare(source)  # Mostly the calls differ, which says more.
                raise MismatchError(
                    f"ranks disagree on an allocation: rank {watch.rank} has "
                    f"[{payload.decode()}], rank {source} has [{theirs.decode()}]"
                )
            segments[source] = Segment.attach(descriptor, own.size)
    finally:
        own.release_descriptor()
    return segments
