"""The communicator: a process group whose ranks share memory, or do in parts.

Making one finds the peers, their topology, and maps their memory; after that the ranks are all a
user needs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work, distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from fusedcomm import board, rendezvous
from fusedcomm.between import Between
from fusedcomm.board import ControlBlock
from fusedcomm.errors import ClosedError, FusedcommError
from fusedcomm.gpu import GpuSide, is_capturing, refuse_growth
from fusedcomm.groups import device_of, resolve_group
from fusedcomm.pairs import Pairs
from fusedcomm.planning import spaces
from fusedcomm.protocol import Call, Space, Workspace
from fusedcomm.rendezvous import Place, meet
from fusedcomm.schedule import successors
from fusedcomm.symmetric.exchange import allocate
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.topology import Topology
from fusedcomm.topology.declared import Declared, declared_topology
from fusedcomm.topology.detect import Facts, facts_of, topology_of
from fusedcomm.waiting import Awaited, Watch, following

#: Seconds a wait may last by default: a peer may be compiling.
DEFAULT_TIMEOUT_S = 600.0

_CPU = torch.device("cpu")

_CLOSED_TEXT = "this communicator was closed; Communicator.of(group) makes a new one"

_Key = tuple[str, str]  # a group's name, a channel
_cache: dict[_Key, Communicator] = {}
_closed: set[_Key] = set()
_making: defaultdict[_Key, threading.Lock] = defaultdict(threading.Lock)
_lock = threading.Lock()
#: Torch groups between domains, by key and domains: the group that they belong to, how many were
#: made before, after errors, and the present one. They outlive their communicators, as the groups
#: that users make do.
_betweens: dict[
    tuple[_Key, tuple[tuple[int, ...], ...]], tuple[dist.ProcessGroup, int, Between]
] = {}


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
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channel: str,
        timeout_s: float,
        topology: Topology,
        place: Place,
    ) -> None:
        self.group = group
        self.channel = channel
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = device_of(group)
        self.topology = topology
        #: Where the counters of new workspaces start; tests set it near the wrap-around.
        self.first_epoch = 0
        self.check = False
        self._declared: Topology | None = None
        #: The other ranks, the next one first.
        self.successors = successors(self.rank, self.world_size)
        #: What ``planning`` has decided before, by its arguments.
        self.plans: dict[Any, Any] = {}
        self._workspaces: dict[str, Workspace] = {}
        self._captured: list[Workspace] = []
        self._pairs: Pairs | None = None
        self._symmetric: dict[int, weakref.ref[SymmetricTensor]] = {}
        self._gpu: GpuSide | None = None
        self._thread: int | None = None
        self._barriers = 0
        #: What calls began and later ones will end.
        self.aside: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
        self.inside: Communicator | None = None
        self.is_part = False
        self.between: Between | None = None
        self.shares_memory = len(topology.domains) == 1
        if self.shares_memory:
            links, blocks = meet(place, timeout_s)
        else:
            links, blocks = Links(self.rank), {self.rank: _private_block()}
        self._links = links
        self._blocks = blocks
        self._watch = Watch(self.rank, blocks, links, timeout_s)
        self._watch.channel = channel
        own = topology.domains[topology.domain_of(self.rank)]
        if not self.shares_memory and topology.uniform and len(own) > 1 and _on_cpu(self.device):
            self._join_domains(place, own, timeout_s)

    def _join_domains(self, place: Place, own: tuple[int, ...], timeout_s: float) -> None:
        """Make what hierarchical operations need: the domain's communicator, and the way out."""
        domains = self.topology.domains
        number, local = self.topology.domain_of(self.rank), own.index(self.rank)
        part = place.part(own, f"domain {number} of {domains}")
        inside = Communicator(
            self.group, self.channel, timeout_s, self.topology.restricted(own), part
        )
        try:
            self.between = self._between(place, local, timeout_s)
        except BaseException as error:
            inside._watch.fail(error)
            inside.close()
            raise
        self.inside = inside
        inside.is_part = True
        inside._watch.alarm = self.between.alarm

    def _between(self, place: Place, local: int, timeout_s: float) -> Between:
        """The torch group of this rank's counterparts: the one that there is, if it works."""
        domains = self.topology.domains
        key = ((self.group.group_name, self.channel), domains)
        known, before = _betweens.get(key), 0
        if known is not None and known[0] is self.group:
            if known[2].usable and known[2].alarm(at_once=True) is None:
                return known[2]
            before = known[1] + 1
        name = f"place {local} of {domains}, number {before}"
        across = place.part([ranks[local] for ranks in domains], name)
        made = Between(across, f"{place.key}/alarm of {domains}, number {before}", timeout_s)
        _betweens[key] = self.group, before, made
        return made

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
        resolved = resolve_group(group)
        if timeout_s is None and topology is None:
            cached = _cache.get((resolved.group_name, channel))
            if cached is not None and not cached._closed and cached.group is resolved:
                return cached
        key = (resolved.group_name, channel)
        with _lock:
            making = _making[key]
        with making:  # One lock a key: threads may make theirs in another order on every rank.
            cached = _cache.get(key)
            if cached is not None and (cached._closed or cached.group is not resolved):
                # It is being closed by a thread, or its group was destroyed and another took the
                # name.
                cached.close()
                cached = None
            declared = None
            if cached is None or topology is not None:  # Not in every call of an operation.
                declared = declared_topology(topology, dist.get_process_group_ranks(resolved))
            if cached is None:
                limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
                # Perhaps torch.export is tracing, or a model is built on the meta device: what is
                # mapped here is real memory all the same.
                with _disable_current_modes(), torch.device("cpu"):
                    cached = _cache[key] = cls._make(resolved, channel, limit, declared)
                _closed.discard(key)
            elif topology is not None and cached._declared != declared:
                raise ValueError(
                    f"this group has a communicator with {cached.topology}; close() it on every "
                    f"rank before one with {declared} is made, or give the new one a channel"
                )
            if timeout_s is not None:
                cached._set_timeout(timeout_s)
        return cached

    @classmethod
    def _make(
        cls, group: dist.ProcessGroup, channel: str, timeout_s: float, declared: Topology | None
    ) -> Communicator:
        place = Place.of(group, f"fusedcomm/{channel}")
        mine = facts_of(rendezvous.machine_identity(), device_of(group))
        question = "domains as found" if declared is None else declared.text()
        said = place.exchange(mine.to_json(), question, timeout_s)
        topology = topology_of([Facts.from_json(text) for text in said], declared)
        made = cls(group, channel, timeout_s, topology, place)
        made._declared = declared
        return made

    def _set_timeout(self, timeout_s: float) -> None:
        self._watch.timeout_s = timeout_s
        if self.inside is not None:
            self.inside._set_timeout(timeout_s)

    @staticmethod
    def named(group_name: str, channel: str) -> Communicator:
        """The communicator of the group that torch calls ``group_name``; see ``of``.

        Raises:
            ClosedError: it was closed, and no other made since.
        """
        key = (group_name, channel)
        cached = _cache.get(key)
        if cached is not None and not cached._closed:
            return cached
        if cached is not None or key in _closed:
            raise ClosedError(_CLOSED_TEXT)
        group = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(group_name))
        return Communicator.of(group, channel=channel)

    @staticmethod
    def live() -> list[Communicator]:
        """The open communicators of this process."""
        return list(_cache.values())

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
        size = torch.Size(shape).numel() * dtype.itemsize
        label = f"symmetric tensor {list(shape)} {dtype}"
        self._require_shared_memory("symmetric_empty")
        where = self._device(device)
        with self.collective(label):
            segments = allocate(
                self._watch, self.group, self.world_size, "tensor", label, size, where
            )
        number = self._watch.number
        tensor = SymmetricTensor(segments, self.rank, tuple(shape), dtype, number)
        registry = self._symmetric
        registry[number] = weakref.ref(tensor, lambda _: registry.pop(number, None))
        return tensor

    def find_symmetric(self, x: torch.Tensor) -> tuple[SymmetricTensor, int] | None:
        """The symmetric tensor in which the contiguous ``x`` lies, and its offset in bytes."""
        if not self._symmetric or not x.is_contiguous():
            return None
        address = x.untyped_storage().data_ptr()
        for reference in list(self._symmetric.values()):
            tensor = reference()
            if tensor is not None and address == tensor.address:
                return tensor, int(x.storage_offset()) * x.dtype.itemsize
        return None

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
                    self.inside.run_torch("barrier", self.between.barrier)
                return
            if not self.shares_memory:
                self.run_torch("barrier", lambda: dist.barrier(self.group, async_op=True))
                return
            self._barriers = following(self._barriers)
            self._watch.fence()
            mine = ControlBlock.barrier_index(self.rank)
            peers = [rank for rank in self._blocks if rank != self.rank]
            for peer in peers:
                self._blocks[peer].words[mine] = self._barriers
            awaited = Awaited("barrier", self._barriers, -1, "the arrival")
            words = self._blocks[self.rank].words
            for peer in peers:
                index = ControlBlock.barrier_index(peer)
                self._watch.wait(words, index, self._barriers, peer, awaited)
                self._watch.compare(peer)

    def collective(self, text: str) -> AbstractContextManager[None]:
        """One call: announced to the peers, and fatal to the communicator if it fails.

        Args:
            text: all that must be equal on every rank: operation, dtype, global shape, chunking.
        """
        return _Announced(self, text)

    @contextmanager
    def pairwise(self) -> Iterator[Pairs]:
        """The transfers between pairs of ranks; an error in the block is fatal, as in a call.

        They are no calls of all ranks, so that nothing is announced.
        """
        self.require_usable()
        self._require_thread()
        try:
            if self._pairs is None:
                self._pairs = Pairs(self._watch, self.first_epoch)
            yield self._pairs
        except BaseException as error:
            self._fail(error)
            raise

    def put_aside(self, begun: Any) -> int:
        """Within ``collective``: keep what the call began; a number for ``take_up``."""
        self.aside[self._watch.number] = begun
        return self._watch.number

    def take_up(self, number: int) -> Any:
        """Within a later ``collective``: what the call of this number began."""
        return self.aside.pop(number)

    def _fail(self, error: BaseException) -> None:
        """Make this communicator unusable, and have the waits of all other ranks end."""
        self._watch.fail(error)
        if self.inside is not None and self.between is not None:
            self.inside._watch.fail(error)
            self.between.give_up(self._watch.reason)

    def take(self, op: str, space: Space) -> Call:
        """Within ``collective``: a slot of a workspace, which is grown if it must be.

        Args:
            op: the operation's public name, for messages.
            space: what the call needs; the same on every rank.
        """
        return Call(self._watch, self.workspace(space), op)

    def workspace(self, space: Space, device: torch.device = _CPU) -> Workspace:
        """Within ``collective``: the workspace of a kind, grown if ``space`` does not fit."""
        key = _workspace_key(space, device)
        old = self._workspaces.get(key)
        if old is not None and old.fits(space):
            return old
        if old is not None:
            space = old.joined(space)
            # Readers keep their own mappings of the old memory; it goes when the last is done.
            del self._workspaces[key]
            if old.captured:
                self._captured.append(old)
        workspace = Workspace(
            self._watch, self.group, self.world_size, space, device, self.first_epoch
        )
        self._workspaces[key] = workspace
        return workspace

    def require_room(self, space: Space, device: torch.device) -> None:
        """Before ``collective``: raise if memory would have to grow while a graph is captured.

        Raises:
            ValueError: it would.
        """
        old = self._workspaces.get(_workspace_key(space, device))
        if (old is None or not old.fits(space)) and is_capturing():
            refuse_growth(space)

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
                "dispatch", "combine".
            global_shapes: what crosses between the ranks, uncut: ``[T, …, K]`` of the gathered
                input, or ``[T, …, N]`` of the summed output. Its first dimension is the cut one.
                Of a collective, the shape of the full tensor. Of a dispatch ``[capacity, hidden,
                experts]``, of a combine ``[k * max_tokens, hidden, experts]``.
            dtype: in which it crosses.
            backward: whether the backward pass will run as well.
            device: of the tensors; this communicator's, unless given.

        Raises:
            ValueError: ``op`` is not known, or a shape is none.
            SharedMemoryError: the operating system would not give the memory.
        """
        where = self._device(device)
        wanted = [
            space
            for shape in global_shapes
            for space in spaces(op, shape, self.world_size, dtype, backward, where)
        ]
        self._require_shared_memory("reserve")
        for space in wanted:
            self.require_room(space, where)
        text = f"reserve {op} {global_shapes} {dtype} backward={backward} on {where.type}"
        with self.collective(text):
            for space in wanted:
                self.workspace(space, where)

    def gpu(self, device: torch.device) -> GpuSide:
        """What is kept for tensors on a GPU; collective the first time.

        Raises:
            ValueError: this communicator has had tensors on another GPU.
        """
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

    def compare_first(self, op: str, text: str, device: torch.device) -> None:
        """Within ``collective``: compare a call on GPU tensors with the peers', the first time."""
        seen = self.gpu(device).seen
        if self.check or text not in seen:
            self.await_peers(op, exchanging=False)
            seen.add(text)

    def fence(self) -> None:
        """Order the host's memory accesses before against those after."""
        self._watch.fence()

    def await_peers(self, op: str, *, exchanging: bool = True) -> None:
        """Within ``collective``: wait until every peer has begun the same call.

        Args:
            exchanging: whether a collective of torch.distributed follows. It must not be begun when
                a peer has failed since: a collective that nobody joins leaves the torch group out
                of step.
        """
        awaited = Awaited(op, self._watch.number, -1, "the call")
        for peer in self._links.peers:
            self._watch.await_call(peer, awaited)
        if exchanging:
            self._watch.look(awaited)

    def await_any(self, op: str) -> Callable[[], None]:
        """Within ``collective``: what a wait elsewhere (in a kernel) calls now and then.

        The function returned gives up the core, and raises when a peer is gone, has failed, or is
        in another call; see ``Watch``.
        """
        return self._watch.relaxer(Awaited(op, self._watch.number, -1, "a flag"))

    def compare_peers(self) -> None:
        """Within ``collective``, when all peers' flags were seen: compare their calls with ours."""
        for peer in self._links.peers:
            self._watch.compare(peer)

    @property
    def current_call(self) -> str:
        """Within ``collective``: its text, as on the board."""
        return self._watch.text

    def run_torch(self, op: str, start: Callable[[], Work | None]) -> None:
        """Within ``collective``: start one of torch.distributed and wait, with our own errors."""
        self.await_torch(op, self.start_torch(op, start))

    def start_torch(self, op: str, start: Callable[[], Work | None]) -> Work | None:
        """Within ``collective``: start one of torch.distributed, with our own errors."""
        with self._torch_errors(op):
            return start()

    def await_torch(self, op: str, work: Work | None) -> None:
        """Within ``collective``: wait for what was started, with our own errors."""
        if work is None:
            return
        with self._torch_errors(op) as awaited:
            if self._links.peers and self.device.type == "cpu":
                self._watch.await_work(work, awaited)
            else:
                work.wait()

    @contextmanager
    def _torch_errors(self, op: str) -> Iterator[Awaited]:
        awaited = Awaited(op, self._watch.number, -1, "the collective")
        try:
            yield awaited
        except RuntimeError as error:
            if isinstance(error, FusedcommError):
                raise
            raise self._watch.explained(error, awaited) from error

    def explained(self, op: str, error: RuntimeError) -> FusedcommError:
        """Why something of torch.distributed failed, as one of our own errors."""
        return self._watch.explained(error, Awaited(op, self._watch.number, -1, "the message"))

    def workspace_bytes(self) -> dict[str, dict[str, int]]:
        """Symmetric memory held by this rank: kind of workspace -> bytes of data and of flags."""
        return {
            kind: {"data": workspace.data_bytes, "flags": workspace.flag_bytes}
            for kind, workspace in self._workspaces.items()
        }

    def abort(self, reason: str) -> None:
        """Make every rank's waits on this communicator raise ``AbortedError``."""
        if self._closed or self._pid != os.getpid():
            return
        self._blocks[self.rank].set_state(board.ABORTED, f"rank {self.rank} aborted: {reason}")
        if self.inside is not None and self.between is not None:
            self.inside.abort(reason)
            self.between.give_up(f"rank {self.rank} aborted: {reason}")

    def close(self) -> None:
        """Give everything back; idempotent, not collective. Ranks that still wait get an error.

        After an error in a call of the ``plain`` engine the torch group may be out of step as well,
        and must be made anew.
        """
        if self._closed:
            return
        self._closed = True
        if self.inside is not None:
            self.inside.close()
        if self._pid == os.getpid():
            self._watch.close()
        self._watch.forget()
        self._blocks = {}
        self._workspaces.clear()
        self._captured.clear()
        self._gpu = None
        if self._pairs is not None:
            self._pairs.close()
        self._links.close()
        key = (self.group.group_name, self.channel)
        if _cache.get(key) is self:
            del _cache[key]
            _closed.add(key)

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
        if self._closed:
            raise ClosedError(_CLOSED_TEXT)
        if self._pid != os.getpid():
            raise ClosedError(
                "this communicator belongs to the process that this one was forked from; a forked "
                "process is no rank"
            )
        if self._watch.state != board.RUNNING:
            raise ClosedError(
                "this communicator is unusable after an error; close() it on every rank and make "
                f"a new one with Communicator.of(group). The error was: {self._watch.reason}"
            )

    def _device(self, device: torch.device | str | None) -> torch.device:
        """A device with its number, this communicator's where none is given."""
        found = self.device if device is None else torch.device(device)
        if str(found) == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return found

    def _require_shared_memory(self, what: str) -> None:
        if not self.shares_memory:
            raise ValueError(
                f"{what} needs ranks that share memory, but this group has several domains"
            )

    def _require_thread(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # A backward pass; its caller waits for it, so the order of calls is kept.
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif self._thread != thread:
            raise ValueError(
                f"this communicator (channel {self.channel!r}) belongs to another thread; a second "
                "thread needs its own: Communicator.of(group, channel='…')"
            )


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _workspace_key(space: Space, device: torch.device) -> str:
    return space.kind if device.type == "cpu" else f"{space.kind} on the GPU"


class _Announced:
    """``Communicator.collective``; a class, which costs half of what a generator does."""

    __slots__ = ("_comm", "_text")

    def __init__(self, comm: Communicator, text: str) -> None:
        self._comm, self._text = comm, text

    def __enter__(self) -> None:
        comm = self._comm
        comm.require_usable()
        comm._require_thread()
        comm._watch.post(self._text)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._comm._fail(error)


def _private_block() -> ControlBlock:
    segment = Segment.create("control", ControlBlock.size(1))
    segment.release_descriptor()
    return ControlBlock(segment, 1)
