"""The communicator: a process group whose ranks share memory, or do in parts.

Making one finds the peers, their topology, and maps their memory; after that the ranks are all a
user needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.between import Between, connect
from fusedcomm.communicator import cache
from fusedcomm.communicator.barrier import Barrier
from fusedcomm.communicator.calls import Calls
from fusedcomm.communicator.life import Life
from fusedcomm.communicator.memory import Memory
from fusedcomm.communicator.reach import reach
from fusedcomm.communicator.reserving import reserve
from fusedcomm.communicator.torch_calls import TorchCalls
from fusedcomm.gpu import GpuSide
from fusedcomm.groups import device_of, resolve_group
from fusedcomm.pairs import Pairs
from fusedcomm.place import Place, machine_identity
from fusedcomm.rendezvous import meet, stay_alone
from fusedcomm.schedule import successors
from fusedcomm.symmetric.devices import Domain
from fusedcomm.symmetric.groups import TorchGroup
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.topology import Topology
from fusedcomm.topology.declared import Declared
from fusedcomm.topology.detect import Facts, facts_of, topology_of
from fusedcomm.waiting import Watch


class Communicator:
    """A process group whose ranks share memory. Made by ``Communicator.of``, never directly.

    Within one communicator every rank issues the same calls in the same order, from one thread (a
    backward pass may run in autograd's own). A second thread makes its own with another channel.

    Attributes:
        rank, world_size: this rank's number in the group, and the group's size.
        device: where this rank's tensors lie, unless a call is given others: of a gloo group,
            whose ranks may have tensors in either place, the CPU.
        channel: the name that tells communicators of one group apart.
        topology: which ranks can address each other, and over which links.
        shares_memory: whether all ranks can address each other: the group is a single domain.
        inside: for engines: the communicator of this rank's own domain, where the group is cut into
            several of equal size; else None. It is no group that an operation can be given.
        is_part: whether this is such a communicator.
        between: for engines: what connects this rank to its counterparts in the other domains; None
            where ``inside`` is.
        check: whether calls on GPU tensors wait on the host until every rank has made the same one,
            and compare, each time. (Without, they do so the first time. On CPU all calls do.)
        memory, calls, torch: for engines: what it can address, the call that it is in, and what it
            does through torch.distributed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channel: str,
        timeout_s: float,
        topology: Topology,
        place: Place,
        *,
        is_part: bool = False,
    ) -> None:
        self.group = group
        self.channel = channel
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = device_of(group)
        self.topology = topology
        self.check = False
        #: The topology that was asked for, if one was.
        self.declared: Topology | None = None
        #: The other ranks, the next one first.
        self.successors = successors(self.rank, self.world_size)
        #: What ``planning`` has decided before, by its arguments.
        self.plans: dict[Any, Any] = {}
        #: Calls of collectives that were checked and planned before, by their kind.
        self.repeated: dict[Any, Any] = {}
        self._pairs: Pairs | None = None
        self._gpu: GpuSide | None = None
        self.inside: Communicator | None = None
        self.is_part = is_part
        self.between: Between | None = None
        #: What ``reach`` has found out about several domains.
        self.reached: Domain | None = None
        self.shares_memory = len(topology.domains) == 1
        links, blocks = meet(place, timeout_s) if self.shares_memory else stay_alone(place)
        self._watch = Watch(self.rank, blocks, links, timeout_s)
        self._watch.channel = channel
        self._barrier = Barrier(self._watch, blocks)
        self._life = Life(self._watch)
        self.calls = Calls(self._watch, self._life)
        self.memory = Memory(self._watch, _torch_group(group, place if is_part else None))
        # What crosses says itself that the host need not wait for it, if the GPU does.
        self.torch = TorchCalls(self._watch, torch.device("cpu") if is_part else self.device)
        own = topology.domains[topology.domain_of(self.rank)]
        if not self.shares_memory and topology.uniform and len(own) > 1:
            self._join_domains(place, own, timeout_s)

    def _join_domains(self, place: Place, own: tuple[int, ...], timeout_s: float) -> None:
        """Make what hierarchical operations need: the domain's communicator, and the way out."""
        domains = self.topology.domains
        part = place.part(own, f"domain {self.topology.domain_of(self.rank)} of {domains}")
        inside = Communicator(
            self.group, self.channel, timeout_s, self.topology.restricted(own), part, is_part=True
        )
        try:
            between = connect(self.group, self.channel, place, domains, timeout_s)
        except BaseException as error:
            inside._watch.fail(error)
            inside.close()
            raise
        inside._watch.alarm = between.alarm
        watch = self._watch

        def spread(error: BaseException) -> None:
            inside._watch.fail(error)
            between.give_up(watch.reason)

        # It must not hold ``inside`` itself: a connection that only the garbage collector ends may
        # be ended in the middle of a call on the next one, and wait there for its own other end.
        part_watch = inside._watch
        inside._life.on_failure = lambda error: between.give_up(part_watch.reason)
        self.inside, self.between, self._life.on_failure = inside, between, spread

    @classmethod
    def of(
        cls,
        group: Any = None,
        *,
        channel: str = "",
        timeout_s: float | None = None,
        topology: Declared = None,
    ) -> Communicator:
        """The communicator of a group; collective the first time, from the cache after that.

        Args:
            group: a ``ProcessGroup``, a 1-D ``DeviceMesh``, or None for the default group.
            channel: a name; communicators of one group with other names share nothing.
            timeout_s: the longest any wait may last, in seconds; 600 unless given. Given again for
                a cached communicator, it replaces the old limit.
            topology: a ``fusedcomm.topology.Topology`` of the group's ranks, or only its domains,
                as in ``[[0, 1], [2, 3]]``, equal on all ranks. By default, what the environment
                variable FUSEDCOMM_DOMAINS declares (``0,1;2,3``, in ranks of the default group), or
                what is found: ranks of one machine are a domain, GPUs that reach each other are.

        Raises:
            ValueError: there is no such group, the limit is not positive, the topology does not fit
                the group or the machines, or the cached communicator has another.
            MismatchError: ranks declare different topologies.
            PeerTimeoutError, PeerLostError: a rank of the group did not come.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive; got {timeout_s}")
        return cache.obtain(resolve_group(group), channel, timeout_s, topology, cls._make)

    @classmethod
    def _make(
        cls, group: dist.ProcessGroup, channel: str, timeout_s: float, declared: Topology | None
    ) -> Communicator:
        place = Place.of(group, f"fusedcomm/{channel}")
        mine = facts_of(machine_identity(), device_of(group))
        question = "domains as found" if declared is None else declared.text()
        said = place.exchange(mine.to_json(), question, timeout_s)
        topology = topology_of([Facts.from_json(text) for text in said], declared)
        made = cls(group, channel, timeout_s, topology, place)
        made.declared = declared
        return made

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest any wait may last, in seconds."""
        self._watch.timeout_s = timeout_s
        if self.inside is not None:
            self.inside.set_timeout(timeout_s)

    @staticmethod
    def named(group_name: str, channel: str) -> Communicator:
        """The communicator of the group that torch calls ``group_name``; see ``of``.

        Raises:
            ClosedError: it was closed, and no other made since; or its group was destroyed.
        """
        found = cache.named(group_name, channel)
        return found if isinstance(found, Communicator) else Communicator.of(found, channel=channel)

    @staticmethod
    def opened(group: Any) -> Communicator | None:
        """The open communicator that a call with this group means, if that is quick to say."""
        if isinstance(group, Communicator):
            return None if group.is_part or group.closed else group
        return cache.opened(group)

    @staticmethod
    def live() -> list[Communicator]:
        """The open communicators of this process."""
        return cache.live()

    def symmetric_empty(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> SymmetricTensor:
        """Allocate a tensor that every rank can address; collective.

        On CPU, an operation whose input lies in it reads it in place, without copying it in; such
        a call returns when every rank has read it. The object must live as long as its memory is
        used.

        Args:
            shape: its shape, the same on every rank.
            device: this communicator's, unless given; of one type on every rank.

        Raises:
            ValueError: the shape is negative, or the ranks do not share memory.
            SharedMemoryError: there is no such memory to be had.
        """
        if any(extent < 0 for extent in shape):
            raise ValueError(f"shape must not be negative; got {list(shape)}")
        label = f"symmetric tensor {list(shape)} {dtype}"
        self._require_shared_memory("symmetric_empty")
        where = self._device(device)
        with self.collective(label):
            return self.memory.tensor(label, tuple(shape), dtype, where)

    def barrier(self) -> None:
        """Wait on the host until every rank has called this.

        It does not wait for a GPU; but a wait there that has run out by now is raised here.
        """
        if self._gpu is not None:
            self._gpu.raise_recorded()
        with self.collective("barrier"):
            if self.inside is not None and self.between is not None:
                # Whoever leaves the second has seen every domain leave the first.
                self.inside.barrier()
                with self.inside.collective("barrier between domains"):
                    self.inside.torch.run("barrier", self.between.barrier)
            elif self.shares_memory:
                self._barrier.wait()
            else:
                self.torch.run("barrier", lambda: dist.barrier(self.group, async_op=True))

    def collective(self, text: str) -> AbstractContextManager[None]:
        """One call: announced to the peers, and fatal to the communicator if it fails.

        Args:
            text: all that must be equal on every rank: operation, dtype, global shape, chunking.
        """
        return self.calls.announced(text)

    @contextmanager
    def pairwise(self) -> Iterator[Pairs]:
        """The transfers between pairs of ranks; an error in the block is fatal, as in a call.

        They are no calls of all ranks, so that nothing is announced.
        """
        self.calls.require_turn()
        try:
            if self._pairs is None:
                self._pairs = Pairs(self._watch, self.memory.first_epoch)
            yield self._pairs
        except BaseException as error:
            self._life.fail(error)
            raise

    def reserve(
        self,
        op: str,
        *global_shapes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        backward: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the memory that calls of ``op`` will need, so that none of them grows it.

        Collective. To be called before a CUDA graph is captured, since a capture cannot allocate;
        what is grown by then stays until ``close()``.

        Args:
            op: "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", or a collective:
                "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"; or
                "dispatch", "combine" (in a group of one domain).
            global_shapes: what crosses between the ranks, uncut: ``[T, …, K]`` of the gathered
                input, or ``[T, …, N]`` of the summed output. Its first dimension is the cut one.
                Of a collective, the shape of the full tensor. Of a dispatch ``[capacity, hidden,
                experts]``, of a combine ``[k * max_tokens, hidden, experts]``.
            dtype: in which it crosses.
            backward: whether the backward pass will run as well.
            device: of the tensors; this communicator's, unless given.

        Raises:
            ValueError: ``op`` is not known, a shape is none, or no ranks share memory.
            SharedMemoryError: the operating system would not give the memory.
        """
        reserve(self, op, global_shapes, dtype, backward, self._device(device))

    def gpu(self, device: torch.device) -> GpuSide:
        """What is kept for tensors on a GPU, by the domain; collective the first time.

        Raises:
            ValueError: this communicator has had tensors on another GPU.
        """
        if self.inside is not None:
            return self.inside.gpu(device)
        if self._gpu is None:
            self._require_shared_memory("an operation on GPU tensors")
            with self.collective("first call with tensors on a GPU"):
                self._gpu = GpuSide(self._watch, device, self.world_size)
        elif self._gpu.device != device:
            raise ValueError(
                f"the tensors lie on {device}, but this communicator has worked on "
                f"{self._gpu.device} so far: a rank has one GPU"
            )
        return self._gpu

    def reach(self, device: torch.device) -> Domain:
        """Whether, and how, kernels can work in each other's GPU memory; see ``reach.reach``."""
        return reach(self, device)

    def workspace_bytes(self) -> dict[str, dict[str, int]]:
        """Symmetric memory held by this rank: kind of workspace -> bytes of data and of flags.

        Of a group over several domains, what this rank holds inside its own.
        """
        return (self if self.inside is None else self.inside).memory.sizes()

    def abort(self, reason: str) -> None:
        """Make every rank's waits on this communicator raise ``AbortedError``."""
        if self.closed or not self._life.here:
            return
        text = f"rank {self.rank} aborted: {reason}"
        self._watch.abort(text)
        if self.inside is not None and self.between is not None:
            self.inside.abort(reason)
            self.between.give_up(text)

    def close(self) -> None:
        """Give everything back; idempotent, not collective. Ranks that still wait get an error.

        After an error in a call of the ``plain`` engine the torch group may be out of step as well,
        and must be made anew.
        """
        if self.closed:
            return
        self._life.closed = True
        if self.inside is not None:
            self.inside.close()
        if self._life.here:
            self._watch.close()
        self._watch.forget()
        self._barrier.close()
        self.memory.close()
        self._gpu = None
        if self._pairs is not None:
            self._pairs.close()
        self._watch.links.close()
        cache.forget(self)

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._life.closed

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # A copied module goes on with the same peers.

    def __reduce__(self) -> tuple[Any, ...]:
        return Communicator.named, (self.group.group_name, self.channel)

    def __repr__(self) -> str:
        channel = f", channel={self.channel!r}" if self.channel else ""
        if len(self.topology.domains) > 1:
            channel += f", domains={len(self.topology.domains)}"
        return f"Communicator(rank={self.rank}, world_size={self.world_size}{channel})"

    def require_usable(self) -> None:
        """Raise ``ClosedError`` if the communicator was closed or has failed."""
        self._life.require_usable()

    def _device(self, device: torch.device | str | None) -> torch.device:
        """A device with its number, this communicator's where none is given."""
        found = self.device if device is None else torch.device(device)
        if str(found) == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return found

    def require_domain(self, what: str) -> None:
        """Raise ``ValueError`` if this rank shares memory with no other: all are domains apart."""
        if self.inside is None:
            self._require_shared_memory(what)

    def _require_shared_memory(self, what: str) -> None:
        if not self.shares_memory:
            raise ValueError(
                f"{what} needs ranks that share memory, but this group has several domains"
            )


def _torch_group(group: dist.ProcessGroup, part: Place | None) -> TorchGroup:
    """Whose GPU memory is paired up: the group's, or that of the ranks that meet in ``part``."""
    if part is None:
        return TorchGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))
    store = dist.PrefixStore(f"{part.key}/memory", part.store)
    return TorchGroup(f"{group.group_name}/{part.key}", part.rank, part.world_size, store)
