"""What crosses between domains in one call of the mixture of experts, there and back.

A rank's rows go to those in its place in other domains, its **carriers** there, and it carries
theirs; ``moe_across`` has the steps, ``engines.relays`` the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.levels import Levels, Like, Parcels
from fusedcomm.engines.relays import Relays
from fusedcomm.gpu import is_capturing
from fusedcomm.planning.moe import Plan

Tensor = torch.Tensor


class Border:
    """One call's exchange with the other domains.

    Attributes:
        rows: after ``finish``, of every other domain, the rows ``[tokens, hidden]`` to be carried.
        weights: after ``finish``, of every domain, the carried tokens' ``[tokens, k]``, or None.
    """

    def __init__(self, comm: Communicator, op: str, relays: Relays) -> None:
        """Within ``comm.collective``."""
        self.levels = Levels(comm, comm.calls.text, op)
        self.inside, self.relays, self.op = self.levels.inside, relays, op
        self.rows: dict[int, Tensor] = {}
        self.weights: list[Tensor | None] = [None] * len(relays.carried)
        self._there: Parcels | None = None
        self._back: Parcels | None = None
        self._sent = self._sent_back = (False, False)

    def step(self, name: str) -> AbstractContextManager[None]:
        """A part of the call, inside the domain."""
        return self.inside.collective(self.levels.named(name))

    def send(self, x: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> None:
        """Begin to give the other domains this rank's rows and weights, or one of them.

        Args:
            x: ``[T, hidden]``; given on every rank or on none, as are the weights.
            weights: ``[T, k]``.
            dtype: of the rows; weights cross in float32, or, with float64, in this.
        """
        relays, wide = self.relays, _wide(dtype)
        self.weights[relays.mine] = weights
        self._sent = (x is not None, weights is not None)
        if x is None and weights is None:
            return
        count = len(relays.carried)
        parcels: list[list[Tensor]] = [[] for _ in range(count)]
        likes: list[list[Like]] = [[] for _ in range(count)]
        for domain in relays.others:
            carried = relays.carried[domain]
            if x is not None:
                parcels[domain].append(x.index_select(0, relays.tokens[domain]))
                likes[domain].append(Like((carried.tokens, x.shape[1]), dtype))
            if weights is not None:
                parcels[domain].append(weights.reshape(-1)[relays.choices[domain]].to(wide))
                likes[domain].append(Like((carried.choices,), wide))
        self._there = Parcels(self.levels, "there", parcels, likes)

    def finish(self) -> None:
        """Wait for what the other domains sent, if anything was to be sent."""
        if self._there is None:
            return
        came, self._there = self._there.finish(), None
        for domain in self.relays.others:
            parts = iter(came[domain])
            if self._sent[0]:
                self.rows[domain] = next(parts)
            if self._sent[1]:
                self.weights[domain] = self.relays.carried[domain].spread(next(parts))

    def send_back(self, sums: dict[int, Tensor], dots: dict[int, Tensor]) -> None:
        """Begin to give back what was made of the rows that this rank carried.

        Args:
            sums: of every other domain ``[tokens, hidden]``; or nothing, on every rank.
            dots: of every domain the gradients of their choices' weights ``[choices]``, or nothing.
        """
        relays = self.relays
        count = len(relays.carried)
        parcels: list[list[Tensor]] = [[] for _ in range(count)]
        likes: list[list[Like]] = [[] for _ in range(count)]
        for domain in relays.others:
            if sums:
                tokens, (_, hidden) = len(relays.tokens[domain]), sums[domain].shape
                parcels[domain].append(sums[domain])
                likes[domain].append(Like((tokens, hidden), sums[domain].dtype))
            if dots:
                parcels[domain].append(dots[domain])
                likes[domain].append(Like((len(relays.choices[domain]),), dots[domain].dtype))
        self._sent_back = (bool(sums), bool(dots))
        self._back = Parcels(self.levels, "back", parcels, likes)

    def finish_back(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait; of every other domain, the sums and gradients that came, if such were sent."""
        assert self._back is not None
        came = self._back.finish()
        sums, dots = self._sent_back
        others = self.relays.others
        return (
            {domain: came[domain][0] for domain in others} if sums else {},
            {domain: came[domain][-1] for domain in others} if dots else {},
        )


@contextmanager
def call(
    comm: Communicator, plan: Plan, relays: Relays, op: str, said: str = ""
) -> Iterator[Border]:
    """A call that all domains are in; ``said``: what else must be equal on every rank.

    On GPUs that wait themselves for what crosses, only what is the same in other calls is compared,
    once: which routing it is is not.

    Raises:
        ValueError: a CUDA graph is captured.
    """
    refuse_capture()
    assert comm.between is not None
    device = relays.slots.device
    routing = "" if comm.between.on_stream(device) else relays.text
    with comm.collective(", ".join(filter(None, (plan.text, routing, said)))):
        border = Border(comm, op, relays)
        border.levels.agree(device)
        yield border


def refuse_capture() -> None:
    """Raise if a CUDA graph is captured."""
    if is_capturing():
        raise ValueError(
            "a mixture of experts over several domains cannot be captured in a CUDA graph: the "
            "host reads its counts, also with capacity"
        )


def weight_grad(relays: Relays, dots: dict[int, Tensor], weights: Tensor | None) -> Tensor | None:
    """The gradient of a rank's weights ``[T, k]`` from all domains'; 0 for no expert.

    None without weights, or where nothing was made for them.
    """
    if weights is None or not dots:
        return None
    found = weights.new_zeros(weights.numel(), dtype=dots[relays.mine].dtype)
    for domain, values in dots.items():
        found[relays.choices[domain]] = values
    return found.view(weights.shape).to(weights.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
