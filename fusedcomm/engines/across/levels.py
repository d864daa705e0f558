"""The two levels of a call over several domains, and what is under way between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.between import Between
from fusedcomm.communicator import Communicator
from fusedcomm.crossing import CROSSING_PROGRAMS
from fusedcomm.engines.across.parts import Bounds, Part, cut_shape, width
from fusedcomm.gpu import GpuSide, is_capturing
from fusedcomm.schedule import successors
from fusedcomm.trace import span
from fusedcomm.waiting import Pending


@contextmanager
def two_levels(comm: Communicator, text: str, op: str, device: torch.device) -> Iterator[Levels]:
    """One call of a group of several domains, which all are in.

    Args:
        text: all that must be equal on every rank; see ``Communicator.collective``.
        op: the operation's public name, for messages.
        device: of the tensors.

    Raises:
        ValueError: a CUDA graph is captured that cannot hold it.
        MismatchError: the domains are not in the same call.
    """
    _require_capturable(comm, text, device)
    with comm.collective(text):
        levels = Levels(comm, text, op)
        levels.agree(device)
        yield levels


def _require_capturable(comm: Communicator, text: str, device: torch.device) -> None:
    if device.type == "cpu" or not is_capturing():
        return
    assert comm.between is not None
    if not comm.between.on_stream(device):
        raise ValueError(
            "a CUDA graph cannot hold what crosses between domains through the host's memory, as "
            "it does here: the group has no nccl backend for GPU tensors"
        )
    if text not in comm.gpu(device).seen:
        raise ValueError(
            "over several domains, a call must have been made once before a CUDA graph captures "
            "one like it: domains compare and connect, and memory is allocated"
        )


_CPU = torch.device("cpu")
#: A domain, the part that its ranks have, and the shard of the one in this rank's place.
_Arrived = tuple[int, Part, Tensor]


class Levels:
    """One call: the two levels of its group, and the steps that it is made of.

    Attributes:
        mine: this rank's domain.
        counterparts: the ranks in this one's place, one a domain.
    """

    def __init__(self, comm: Communicator, text: str, op: str) -> None:
        """Within ``comm.collective(text)``."""
        assert comm.inside is not None and comm.between is not None
        self.comm, self.text, self.op = comm, text, op
        self.inside: Communicator = comm.inside
        self.between: Between = comm.between
        self.mine = comm.between.domain
        self.domains = comm.topology.domains
        self.counterparts = [ranks[comm.inside.rank] for ranks in self.domains]
        self.inside.check = comm.check

    def named(self, step: str) -> str:
        """The text of a call inside the domain: it names the whole call and this step."""
        return f"{self.text}: {step}"

    def agree(self, device: torch.device = _CPU) -> None:
        """Make sure that the other domains are in the same call.

        On GPUs that wait themselves for what crosses, hosts compare the first time they make it, or
        where ``Communicator.check`` asks for it.
        """
        on_stream = self.between.on_stream(device)
        seen = self.comm.gpu(device).seen if on_stream else set()
        if self.comm.check or self.text not in seen:
            with (
                self.inside.collective(self.named("agree")),
                span("wait", "agree with the other domains", rank=self.comm.rank),
            ):
                told, descriptions = self.between.describe(self.text)
                self.inside.torch.run(self.op, lambda: told)
                self.between.check(descriptions)
            seen.add(self.text)

    def begin(
        self, step: str, sent: Tensor, sends: Sequence[int], takes: Sequence[int]
    ) -> Crossing:
        """Begin to exchange elements of flat tensors with the counterparts.

        A rank that has nothing to give or take joins in: others wait for all counterparts.
        """
        received = sent.new_empty(sum(takes))
        side = self.comm.gpu(sent.device) if self.between.on_stream(sent.device) else None
        if side is not None:
            side.left += CROSSING_PROGRAMS
        with self.inside.collective(self.named(step)):
            work = self.inside.torch.start(
                self.op,
                lambda: self.between.all_to_all(elements(received), elements(sent), takes, sends),
            )
        return Crossing(self, step, received, list(takes), work, side)

    def spread(self, step: str, own: Tensor, takes: Sequence[int]) -> Crossing:
        """Begin to give ``own`` to all counterparts; ``takes[d]`` elements come from domain d."""
        takes = [0 if domain == self.mine else count for domain, count in enumerate(takes)]
        sends = [0 if domain == self.mine else own.numel() for domain in range(len(self.domains))]
        return self.begin(step, own.reshape(-1).repeat(len(self.domains) - 1), sends, takes)

    def shards(self, step: str, own: Tensor, bounds: Bounds, dim: int) -> Iterator[_Arrived]:
        """The shards of the ranks in this one's place: the own, then those that cross meanwhile.

        Args:
            own: this rank's shard of a tensor that is cut along ``dim``.
            bounds: every rank's, along it.
        """
        shapes = [cut_shape(own.shape, dim, width(bounds[rank])) for rank in self.counterparts]
        crossing = self.spread(step, own, [math.prod(shape) for shape in shapes])
        yield self.mine, self.part(bounds, self.mine, dim), own
        came = crossing.finish()
        for domain in successors(self.mine, len(self.domains)):
            part = self.part(bounds, domain, dim)
            yield domain, part, came[domain].view(shapes[domain])

    def sums(self, step: str, size: int, reduce_for: Callable[[int], Tensor]) -> list[Tensor]:
        """Every domain's sum of what belongs to this rank, in the order of domains.

        Args:
            size: elements of it.
            reduce_for: the own domain's sum of what belongs to this one's counterpart in a domain.
                Called for the own domain last, while the others' sums cross.
        """
        others = successors(self.mine, len(self.domains))
        ready = {domain: reduce_for(domain).view(-1) for domain in others}
        ready[self.mine] = ready[others[0]].new_empty(0)
        sent = torch.cat([ready[domain] for domain in range(len(ready))])
        sends = [ready[domain].numel() for domain in range(len(ready))]
        takes = [0 if domain == self.mine else size for domain in range(len(ready))]
        crossing = self.begin(step, sent, sends, takes)
        own = reduce_for(self.mine)
        parts = crossing.finish()
        parts[self.mine] = own
        return [part.view(own.shape) for part in parts]

    def part(self, bounds: Bounds, domain: int, dim: int) -> Part:
        """The part of a tensor, cut along ``dim``, that a domain's ranks have."""
        return Part(bounds, self.domains[domain], dim)


class Crossing:
    """Elements that are under way between domains."""

    def __init__(
        self,
        levels: Levels,
        step: str,
        received: Tensor,
        takes: list[int],
        work: Pending | None,
        side: GpuSide | None,
    ) -> None:
        """
        Args:
            side: of the GPU that waits itself, whose kernels leave multiprocessors for the work.
        """
        self._levels, self._step, self._work, self._side = levels, step, work, side
        self._received, self._takes = received, takes

    def finish(self) -> list[Tensor]:
        """Wait; what came from each domain, flat, empty for the own one."""
        levels = self._levels
        with (
            levels.inside.collective(levels.named(f"{self._step}, arrived")),
            span("wait", "wait for the other domains", rank=levels.comm.rank),
        ):
            levels.inside.torch.wait(levels.op, self._work)
        if self._side is not None:
            self._side.left -= CROSSING_PROGRAMS
        return list(self._received.split(self._takes))


class Parcels:
    """Tensors of several shapes and dtypes that cross together, in one message to each domain."""

    def __init__(
        self,
        levels: Levels,
        step: str,
        parcels: Sequence[Sequence[Tensor]],
        likes: Sequence[Sequence[Like]],
    ) -> None:
        """Begin.

        Args:
            parcels: what goes to each domain, nothing to the own one.
            likes: of what comes from each domain, the shapes and dtypes.
        """
        self._likes = likes
        flat = [as_flat_bytes(tensor) for parcel in parcels for tensor in parcel]
        sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        sends = [sum(tensor.nbytes for tensor in parcel) for parcel in parcels]
        takes = [sum(like.nbytes for like in each) for each in likes]
        self._crossing = levels.begin(step, sent, sends, takes)

    def finish(self) -> list[list[Tensor]]:
        """Wait; the tensors that came from each domain."""
        came = self._crossing.finish()
        return [_unpacked(data, each) for data, each in zip(came, self._likes, strict=True)]


class Like(NamedTuple):
    """What a tensor that comes is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _unpacked(data: Tensor, likes: Sequence[Like]) -> list[Tensor]:
    found = []
    for like, part in zip(likes, data.split([like.nbytes for like in likes]), strict=True):
        if part.storage_offset() % like.dtype.itemsize:
            part = part.clone()  # A view of another dtype must lie at a multiple of its size.
        found.append(part.view(like.dtype).view(like.shape))
    return found


def as_flat_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def elements(x: Tensor) -> Tensor:
    """A flat contiguous tensor as bytes ``[elements, itemsize]``: backends move any dtype so.

    (One element is contiguous whatever its stride, which a view of another dtype does not take.)
    """
    dense = x.as_strided((x.numel(),), (1,))
    return dense.view(torch.uint8).view(x.numel(), x.dtype.itemsize)
