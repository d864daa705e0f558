"""How the ranks of a group find each other: the group's store, then sockets, then shared memory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedcomm.board import ControlBlock
from fusedcomm.errors import PeerLostError, PeerTimeoutError
from fusedcomm.symmetric.links import Links, Listener
from fusedcomm.symmetric.shm import Segment

_STORE_POLL_S = 2e-3


def machine_identity() -> str:
    """Equal for two processes exactly if they can share memory through sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


class Meeting:
    """One gathering of a group's ranks. ``key`` is the same on all of them and used once."""

    def __init__(self, group: dist.ProcessGroup, key: str, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._store = distributed_c10d._get_process_group_store(group)
        self._key = key
        self._start = time.monotonic()
        self._timeout_s = timeout_s

    def all_gather(self, card: dict[str, str]) -> list[dict[str, str]]:
        """Every rank's card, by rank.

        Raises:
            PeerTimeoutError: some ranks never came.
        """
        self._store.set(f"{self._key}/{self.rank}", json.dumps(card))
        cards = []
        for rank in range(self.world_size):
            key = f"{self._key}/{rank}"
            while not self._store.check([key]):
                self.check("making a communicator", rank)
                time.sleep(_STORE_POLL_S)
            cards.append(json.loads(self._store.get(key)))
        return cards

    def check(self, doing: str, missing: int) -> None:
        """Raise when the time is over."""
        if time.monotonic() - self._start > self._timeout_s:
            raise PeerTimeoutError(
                f"rank {self.rank} waited {self._timeout_s:g} s for rank {missing} while {doing}; "
                "every rank of the group must make the communicator"
            )


def meet(
    group: dist.ProcessGroup, key: str, timeout_s: float
) -> tuple[Links, dict[int, ControlBlock]] | None:
    """Connect the ranks of ``group`` and map their control blocks; collective.

    Returns:
        None if the ranks lie on several machines (or in several network namespaces) and so
        cannot share memory.
    """
    meeting = Meeting(group, key, timeout_s)
    listener = Listener()
    try:
        cards = meeting.all_gather({"machine": machine_identity(), "socket": listener.name})
        if len({card["machine"] for card in cards}) > 1:
            return None
        names = {rank: card["socket"] for rank, card in enumerate(cards)}
        links = Links.connect(meeting.rank, listener, names, meeting.check)
        return links, _map_blocks(meeting, links)
    except ConnectionError as error:
        raise PeerLostError(
            f"rank {meeting.rank} lost a peer while making a communicator: {error}"
        ) from error
    finally:
        listener.close()


def _map_blocks(meeting: Meeting, links: Links) -> dict[int, ControlBlock]:
    own = Segment.create("control", ControlBlock.size(meeting.world_size))
    blocks = {meeting.rank: ControlBlock(own, meeting.world_size)}
    for peer in links.peers:
        links.send(peer, b"control", own.descriptor)
    for peer in links.peers:

        def check(peer: int = peer) -> None:
            if not links.alive(peer):
                raise ConnectionResetError(f"rank {peer} died")
            meeting.check("making a communicator", peer)

        _, descriptor = links.receive(peer, check)
        segment = Segment.attach(descriptor, own.size)
        blocks[peer] = ControlBlock(segment, meeting.world_size)
    own.release_descriptor()
    return blocks
