"""The communicator: a process group whose ranks share memory.

Making one finds the peers and maps their memory; after that the ranks are all a user needs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work, distributed_c10d

from fusedcomm import board
from fusedcomm.board import ControlBlock
from fusedcomm.errors import ClosedError, FusedcommError
from fusedcomm.groups import device_of, resolve_group
from fusedcomm.planning import spaces
from fusedcomm.protocol import Call, Space, Workspace, exchange
from fusedcomm.rendezvous import meet
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from fusedcomm.symmetric.tensor import SymmetricTensor
from fusedcomm.waiting import Awaited, Watch, following

#: Seconds a wait may last by default: a peer may be compiling.
DEFAULT_TIMEOUT_S = 600.0

_CLOSED_TEXT = "this communicator was closed; Communicator.of(group) makes a new one"

_Key = tuple[str, str]  # a group's name, a channel
_cache: dict[_Key, Communicator] = {}
_closed: set[_Key] = set()
_making: defaultdict[_Key, threading.Lock] = defaultdict(threading.Lock)
_lock = threading.Lock()


class Communicator:
    """A process group whose ranks share memory. Made by ``Communicator.of``, never directly.

    Within one communicator every rank issues the same calls in the same order, from one thread (a
    backward pass may run in autograd's own). A second thread makes its own with another channel.

    Attributes:
        rank, world_size: this rank's number in the group, and the group's size.
        device: where this rank's tensors lie.
        channel: the name that tells communicators of one group apart.
        shares_memory: whether all ranks can address each other; if not, only the ``plain`` engine,
            torch.distributed's collectives, can serve this group.
    """

    def __init__(self, group: dist.ProcessGroup, channel: str, timeout_s: float) -> None:
        self.group = group
        self.channel = channel
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device_of(group)
        #: Where the counters of new workspaces start; tests set it near the wrap-around.
        self.first_epoch = 0
        self._workspaces: dict[str, Workspace] = {}
        self._symmetric: dict[int, weakref.ref[SymmetricTensor]] = {}
        self._thread: int | None = None
        self._barriers = 0
        met = meet(group, f"fusedcomm/{channel}", timeout_s)
        self.shares_memory = met is not None
        links, blocks = met or (Links(self.rank), {self.rank: _private_block()})
        self._links = links
        self._blocks = blocks
        self._watch = Watch(self.rank, blocks, links, timeout_s)
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def of(
        cls, group: Any = None, *, channel: str = "", timeout_s: float | None = None
    ) -> Communicator:
        """The communicator of a group; collective the first time, from the cache after that.

        Args:
            group: a ``ProcessGroup``, a 1-D ``DeviceMesh``, or None for the default group.
            channel: a name; communicators of one group with other names share nothing.
            timeout_s: the longest any wait may last, in seconds; 600 unless given. Given again for
                a cached communicator, it replaces the old limit.

        Raises:
            ValueError: there is no such group, or the limit is not positive.
            PeerTimeoutError, PeerLostError: a rank of the group did not come.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive; got {timeout_s}")
        resolved = resolve_group(group)
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
            if cached is None:
                limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
                cached = _cache[key] = cls(resolved, channel, limit)
                _closed.discard(key)
            elif timeout_s is not None:
                cached._watch.timeout_s = timeout_s
        return cached

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

    def symmetric_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> SymmetricTensor:
        """Allocate a tensor that every rank can address; collective.

        An operation whose input lies in it reads it in place, without copying it in; such a call
        returns when every rank has read it. The object must live as long as its memory is used.

        Args:
            shape: its shape, the same on every rank.

        Raises:
            ValueError: the shape is negative, or the ranks do not share memory.
            SharedMemoryError: the operating system would not give the memory.
        """
        if any(extent < 0 for extent in shape):
            raise ValueError(f"shape must not be negative; got {list(shape)}")
        size = torch.Size(shape).numel() * dtype.itemsize
        label = f"symmetric tensor {list(shape)} {dtype}"
        self._require_shared_memory("symmetric_empty")
        with self.collective(label):
            own = Segment.create("tensor", size)
            segments = exchange(self._watch, own, label, self.world_size)
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
        """Wait until every rank has called this."""
        with self.collective("barrier"):
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

    @contextmanager
    def collective(self, text: str) -> Iterator[None]:
        """One call: announced to the peers, and fatal to the communicator if it fails.

        Args:
            text: all that must be equal on every rank: operation, dtype, global shape, chunking.
        """
        self.require_usable()
        self._require_thread()
        self._watch.post(text)
        try:
            yield
        except BaseException as error:
            self._watch.fail(error)
            raise

    def take(self, op: str, space: Space) -> Call:
        """Within ``collective``: a slot of a workspace, which is grown if it must be.

        Args:
            op: the operation's public name, for messages.
            space: what the call needs; the same on every rank.
        """
        return Call(self._watch, self.workspace(space), op)

    def workspace(self, space: Space) -> Workspace:
        """Within ``collective``: the workspace of a kind, grown if ``space`` does not fit."""
        old = self._workspaces.get(space.kind)
        if old is not None and old.fits(space):
            return old
        if old is not None:
            space = old.joined(space)
            # Readers keep their own mappings of the old memory; it goes when the last is done.
            del self._workspaces[space.kind]
        workspace = Workspace(self._watch, space, self.world_size, self.first_epoch)
        self._workspaces[space.kind] = workspace
        return workspace

    def reserve(
        self,
        op: str,
        *global_shapes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        backward: bool = False,
    ) -> None:
        """Allocate the memory that calls of ``op`` will need, so that none of them grows it.

        Collective.

        Args:
            op: "all_gather_linear", "linear_reduce_scatter" or "linear_all_reduce".
            global_shapes: what crosses between the ranks, uncut: ``[T, …, K]`` of the gathered
                input, or ``[T, …, N]`` of the summed output. Its first dimension is the cut one.
            dtype: in which it crosses.
            backward: whether the backward pass will run as well.

        Raises:
            ValueError: ``op`` is not known, or a shape is none.
            SharedMemoryError: the operating system would not give the memory.
        """
        wanted = [
            space
            for shape in global_shapes
            for space in spaces(op, shape, self.world_size, dtype, backward)
        ]
        self._require_shared_memory("reserve")
        with self.collective(f"reserve {op} {global_shapes} {dtype} backward={backward}"):
            for space in wanted:
                self.workspace(space)

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

    def run_torch(self, op: str, start: Callable[[], Work | None]) -> None:
        """Within ``collective``: start one of torch.distributed and wait, with our own errors."""
        awaited = Awaited(op, self._watch.number, -1, "the collective")
        try:
            work = start()
            if work is None:
                return
            if self._links.peers and self.device.type == "cpu":
                self._watch.await_work(work, awaited)
            else:
                work.wait()
        except RuntimeError as error:
            if isinstance(error, FusedcommError):
                raise
            raise self._watch.explained(error, awaited) from error

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

    def close(self) -> None:
        """Give everything back; idempotent, not collective. Ranks that still wait get an error.

        After an error in a call of the ``plain`` engine the torch group may be out of step as well,
        and must be made anew.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            self._watch.close()
        self._watch.forget()
        self._blocks = {}
        self._workspaces.clear()
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

    def _require_shared_memory(self, what: str) -> None:
        if not self.shares_memory:
            raise ValueError(
                f"{what} needs ranks that share memory, but this group spans several machines"
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


def _private_block() -> ControlBlock:
    segment = Segment.create("control", ControlBlock.size(1))
    segment.release_descriptor()
    return ControlBlock(segment, 1)
