"""What crosses between domains: torch.distributed's collectives among ranks of the same place.

With domains of g ranks each, the ranks that are number l in their domains form one torch group, for
every l from 0 to g - 1. The g groups work at the same time, each on its part of the data, so that
every byte crosses a border once. What carries them stands in ``crossing``.

Before data crosses, the ranks compare what they are about to do: torch.distributed would mix up
messages of different calls, or end the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fusedcomm.board import ControlBlock
from fusedcomm.crossing import Carrier, OnStream, Staged, nccl
from fusedcomm.errors import MismatchError, PeerLostError
from fusedcomm.place import Place
from fusedcomm.waiting import Pending

#: Bytes in which a call is described to the other domains, as on a board.
_DESCRIPTION = 512
#: Seconds between two looks for an alarm, by a rank that waits.
_LOOK_S = 0.5


#: The connections of this process, by group, channel and domains: how many were made before, after
#: errors, and the present one. They outlive their communicators, and end with their groups.
_made: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[int, Between]]
] = WeakKeyDictionary()


def connect(
    group: dist.ProcessGroup,
    channel: str,
    place: Place,
    domains: tuple[tuple[int, ...], ...],
    timeout_s: float,
) -> Between:
    """What connects this rank to its counterparts in other domains; collective over these.

    The one that there is, if it works.

    Args:
        place: this rank's in ``group``.
        domains: the ranks of each, in the group.
    """
    ours = _made.setdefault(group, {})
    before, known = ours.get((channel, domains), (-1, None))
    if known is not None and known.usable and known.alarm(at_once=True) is None:
        return known
    before += 1
    local = next(ranks.index(place.rank) for ranks in domains if place.rank in ranks)
    name = f"place {local} of {domains}, number {before}"
    across = place.part([ranks[local] for ranks in domains], name)
    alarm = f"{place.key}/alarm of {domains}, number {before}"
    made = Between(across, alarm, timeout_s, "cuda:nccl" in dist.get_backend_config(group))
    ours[channel, domains] = before, made
    return made


class Between:
    """The torch group of one rank of every domain.

    What crosses may be on a CPU or on a GPU; what is said about it goes through gloo.

    Attributes:
        domain: which domain this rank is in; its rank in the group.
        domains: how many there are.
        bytes_sent, messages_sent: of data that this rank has sent to other domains since it was
            made. (What the calls are, 512 bytes to each domain in each, is not counted.)
        usable: False once it was given up, after an error.
    """

    def __init__(self, place: Place, alarm_key: str, timeout_s: float, on_gpus: bool) -> None:
        """Connect; collective over the domains.

        Args:
            place: this rank's, among its counterparts.
            alarm_key: where in the store any rank of the group says that it has given up.
            on_gpus: whether NCCL carries tensors of GPUs.

        Raises:
            PeerLostError: a rank did not come within ``timeout_s``, or died.
        """
        self.domain, self.domains = place.rank, place.world_size
        self.bytes_sent = self.messages_sent = 0
        self.usable = True
        self._all_know = False
        self._store, self._alarm_key, self._next_look = place.store, alarm_key, 0.0
        self._timeout_s, self._on_gpus = timeout_s, on_gpus
        self._nccl: OnStream | None = None
        self._meeting = dist.PrefixStore(place.key, place.store)
        try:
            self._backend: Any = dist.ProcessGroupGloo(
                self._meeting, self.domain, self.domains, timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"cannot connect to the other domains: {error}. gloo does, by the host's name or "
                "by the interface that GLOO_SOCKET_IFNAME names"
            ) from error
        self._gloo = Carrier(self._backend)
        self._staged = Staged(self._gloo)

    def on_stream(self, device: torch.device) -> bool:
        """Whether the GPU itself waits for tensors of this device that cross."""
        return device.type == "cuda" and self._on_gpus

    def _carrier(self, device: torch.device) -> Carrier | Staged:
        if device.type == "cpu":
            return self._gloo
        if not self._on_gpus:
            return self._staged
        if self._nccl is None:
            store = dist.PrefixStore("nccl", self._meeting)
            self._nccl = nccl(store, self.domain, self.domains, self._timeout_s)
        return self._nccl

    def describe(self, text: str) -> tuple[Pending, torch.Tensor]:
        """Begin to tell the other domains what this rank is about to do; see ``check``."""
        own = torch.zeros(_DESCRIPTION, dtype=torch.uint8)
        encoded = ControlBlock.fit(text).encode()
        own[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        theirs = own.new_empty(self.domains * _DESCRIPTION)
        return self._backend._allgather_base(theirs, own), theirs

    def check(self, descriptions: torch.Tensor) -> None:
        """Compare what the domains are about to do, when ``describe`` is complete.

        Raises:
            MismatchError: they are not about to do the same.
        """
        self.answers(descriptions, None)

    def answers(self, descriptions: torch.Tensor, question: str | None) -> list[str]:
        """What the domains have said to a question, each after its words; see ``check``.

        Args:
            question: with which every text begins; None if all texts must be equal.

        Raises:
            MismatchError: a domain is about to do something else.
        """
        texts = [
            bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            for row in descriptions.view(self.domains, _DESCRIPTION)
        ]
        for domain, theirs in enumerate(texts):
            equal = theirs == texts[self.domain]
            if not (equal if question is None else theirs.startswith(question)):
                self._all_know = True
                raise MismatchError(
                    f"domains disagree: domain {self.domain} is in [{texts[self.domain]}], domain "
                    f"{domain} in [{theirs}]. Every rank of a group must issue the same calls, "
                    "with the same global shapes and dtypes, in the same order."
                )
        return [text[len(question or "") :] for text in texts]

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_rows: Sequence[int],
        sent_rows: Sequence[int],
    ) -> Pending:  # fmt: skip
        """Begin to send rows of ``sent`` to every domain, in order, and to fill ``received``.

        Args:
            received_rows, sent_rows: how many rows come from, and go to, each domain.
        """
        row_bytes = sent.nbytes // sent.shape[0] if sent.shape[0] else 0
        others = [rows for domain, rows in enumerate(sent_rows) if domain != self.domain]
        self.bytes_sent += sum(others) * row_bytes
        self.messages_sent += sum(rows > 0 for rows in others)
        return self._carrier(sent.device).all_to_all(received, sent, received_rows, sent_rows)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to give every domain what ``tensor`` holds in domain ``source``."""
        if self.domain == source:
            self.bytes_sent += (self.domains - 1) * tensor.nbytes
            self.messages_sent += self.domains - 1 if tensor.nbytes else 0
        return self._carrier(tensor.device).broadcast(tensor, source, self.domain == source)

    def give_up(self, reason: str) -> None:
        """After an error here: have the waits of all domains end; see ``alarm``.

        Not where all counterparts have seen the same error: some may be about to.
        """
        if self.usable:
            self.usable = False
            if self._nccl is not None:
                with suppress(RuntimeError):  # of an abort; what is wrong is known already
                    self._nccl.backend.abort()  # or the GPU waits on for what nobody will send
            if not self._all_know:
                with suppress(dist.DistError):  # of a store that is gone: all will find out
                    self._store.set(self._alarm_key, reason)

    def alarm(self, at_once: bool = False) -> str | None:
        """Why a rank of any domain has given up, if one has.

        The store is asked now and then only, unless ``at_once``.
        """
        now = time.monotonic()
        if now < self._next_look and not at_once:
            return None
        self._next_look = now + _LOOK_S
        try:
            if self._store.check([self._alarm_key]):
                return self._store.get(self._alarm_key).decode()
        except dist.DistError as error:
            return f"the group's store, held by a rank, is gone: {error}"
        return None

    def barrier(self) -> Pending:
        """Begin a barrier of this rank's counterparts."""
        return self._backend.barrier()
