"""A rank's place: which machine it is on, and the group's store, in which ranks tell each other."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedcomm.errors import MismatchError, PeerLostError, PeerTimeoutError

#: Seconds between two looks at the store for what is not there yet.
STORE_POLL_S = 2e-3
#: What stands in the store for what was taken back.
TAKEN_BACK = "-"
#: Seconds after which a rank that asks something else is taken to mean it.
_DISAGREEMENT_S = 3.0


def machine_identity() -> str:
    """Equal for two processes exactly if they can share memory through sockets and see each other.

    That is: the same boot of the same machine, and the same network and process namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")])


@dataclass(frozen=True)
class Place:
    """A rank among those that meet, and the store they share.

    Attributes:
        rank, world_size: its number among them, and how many they are.
        store: torch.distributed's, common to all of them.
        key: in front of all that they write there.
    """

    rank: int
    world_size: int
    store: dist.Store
    key: str

    @classmethod
    def of(cls, group: dist.ProcessGroup, key: str) -> Place:
        """This rank's place in a process group."""
        store = distributed_c10d._get_process_group_store(group)
        return cls(dist.get_rank(group), dist.get_world_size(group), store, key)

    def part(self, ranks: Sequence[int], name: str) -> Place:
        """The place among some of the ranks, this one included, in the order given."""
        return Place(ranks.index(self.rank), len(ranks), self.store, f"{self.key}/{name}")

    def exchange(self, text: str, question: str, timeout_s: float) -> list[str]:
        """What every rank says, by rank; collective.

        Args:
            text: this rank's answer; the same at every call of this process with this question.
            question: what is answered. Ranks that ask different things do not understand each
                other, and are told so.

        Raises:
            MismatchError: another rank asks something else.
            PeerTimeoutError: a rank did not come.
            PeerLostError: the store is gone.
        """
        # Answers are never deleted: a rank may read them long after this one has left.
        answers = f"{self.key}/said/{hashlib.blake2b(question.encode(), digest_size=8).hexdigest()}"
        asking = f"{self.key}/asking"
        start = time.monotonic()
        with store_errors():
            self.store.set(f"{asking}/{self.rank}", question)
            self.store.set(f"{answers}/{self.rank}", text)
            for rank in range(self.world_size):
                while not self.store.check([f"{answers}/{rank}"]):
                    if time.monotonic() - start > _DISAGREEMENT_S:
                        self._compare(rank, asking, question)
                    check_time(self.rank, rank, start, timeout_s)
                    time.sleep(STORE_POLL_S)
            found = [
                self.store.get(f"{answers}/{rank}").decode() for rank in range(self.world_size)
            ]
            # Where it failed, the question stays for others to see that theirs is another.
            self.store.set(f"{asking}/{self.rank}", TAKEN_BACK)
            return found

    def _compare(self, rank: int, asking: str, question: str) -> None:
        """Raise if ``rank`` asks another question than this rank."""
        if self.store.check([f"{asking}/{rank}"]):
            theirs = self.store.get(f"{asking}/{rank}").decode()
            if theirs not in (TAKEN_BACK, question):
                raise MismatchError(
                    f"ranks disagree on the topology: rank {self.rank} has [{question}], rank "
                    f"{rank} has [{theirs}]. FUSEDCOMM_DOMAINS and topology= must be the same on "
                    "every rank."
                )


@contextmanager
def store_errors() -> Iterator[None]:
    """Where the store is used: its end is a ``PeerLostError``."""
    try:
        yield
    except dist.DistError as error:
        raise PeerLostError(f"the group's store, held by a rank, is gone: {error}") from error


def check_time(rank: int, missing: int, start: float, timeout_s: float) -> None:
    """Raise ``PeerTimeoutError`` if ``rank`` has waited for ``missing`` for too long.

    Args:
        start: when it began to, by ``time.monotonic``.
    """
    if time.monotonic() - start > timeout_s:
        raise PeerTimeoutError(
            f"rank {rank} waited {timeout_s:g} s for rank {missing} while making a "
            "communicator; every rank of the group must make it"
        )
