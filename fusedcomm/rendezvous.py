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
from fusedcomm.symmetric.links import POLL_S, Links, Listener
from fusedcomm.symmetric.shm import Segment

_STORE_POLL_S = 2e-3


def machine_identity() -> str:
    """Equal for two processes exactly if they can share memory through sockets and see each other.

    That is: the same boot of the same machine, and the same network and process namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")])


class Meeting:
    """One gathering of a group's ranks, on the group's store.

    The store counts each rank's gatherings under ``key``: all must come to their n-th. One that
    failed is taken back, so that the next try meets again.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._store = distributed_c10d._get_process_group_store(group)
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._counter = f"{key}/count/{self.rank}"
        number = self._store.add(self._counter, 1)
        self._cards = f"{key}/{number}"

    def all_gather(self, card: dict[str, str | int]) -> list[dict[str, str | int]]:
        """Every rank's card, by rank.

        Raises:
            PeerTimeoutError: some ranks never came.
        """
        self._store.set(f"{self._cards}/{self.rank}", json.dumps(card))
        cards = []
        for rank in range(self.world_size):
            key = f"{self._cards}/{rank}"
            while not self._store.check([key]):
                self.check(rank)
                time.sleep(_STORE_POLL_S)
            cards.append(json.loads(self._store.get(key)))
        return cards

    def check(self, missing: int) -> None:
        """Raise when the time is over."""
        if time.monotonic() - self._start > self._timeout_s:
            raise PeerTimeoutError(
                f"rank {self.rank} waited {self._timeout_s:g} s for rank {missing} while making a "
                "communicator; every rank of the group must make it"
            )

    def take_back(self) -> None:
        """Undo this rank's coming, after a failure."""
        self._store.delete_key(f"{self._cards}/{self.rank}")
        self._store.add(self._counter, -1)


def meet(
    group: dist.ProcessGroup, key: str, timeout_s: float
) -> tuple[Links, dict[int, ControlBlock]] | None:
    """Connect the ranks of ``group`` and map their control blocks; collective.

    Returns:
        None if the ranks lie on several machines (or in several namespaces) and so cannot share
        memory.
    """
    meeting = Meeting(group, key, timeout_s)
    listener = Listener()
    links = None
    try:
        identity = machine_identity()
        cards = meeting.all_gather(
            {"machine": identity, "socket": listener.name, "pid": os.getpid()}
        )
        if any(card["machine"] != identity for card in cards):
            return None
        names = {rank: str(card["socket"]) for rank, card in enumerate(cards)}
        pids = {rank: int(card["pid"]) for rank, card in enumerate(cards)}
        links = Links.connect(meeting.rank, listener, names, pids, meeting.check)
        return links, _map_blocks(meeting, links)
    except BaseException as error:
        if links is not None:
            links.close()
        meeting.take_back()
        if isinstance(error, ConnectionError):
            raise PeerLostError(
                f"rank {meeting.rank} lost a peer while making a communicator: {error}"
            ) from error
        raise
    finally:
        listener.close()


def _map_blocks(meeting: Meeting, links: Links) -> dict[int, ControlBlock]:
    """Every rank's control block. There is no board yet to say why a peer does not come."""
    rank, world_size = meeting.rank, meeting.world_size
    own = Segment.create("control", ControlBlock.size(world_size))
    blocks = {rank: ControlBlock(own, world_size)}
    try:
        for step in range(1, world_size):
            links.send((rank + step) % world_size, b"control", own.descriptor)
            source = (rank - step) % world_size
            while not links.pending(source, POLL_S):
                if not links.alive(source) and not links.pending(source, 0.0):
                    raise ConnectionResetError(f"rank {source} died")
                meeting.check(source)
            _, descriptor = links.receive(source)
            blocks[source] = ControlBlock(Segment.attach(descriptor, own.size), world_size)
    finally:
        own.release_descriptor()
    return blocks
