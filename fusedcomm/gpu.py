"""What a communicator keeps for tensors on a GPU: the domain, the order of streams, the record.

On a GPU nobody waits on the host. A kernel whose wait runs out writes why into the **record**, in
device memory; the launches behind it look there first and do nothing, and the call's last one
copies it to host memory. The host looks at that, and at the peers' states, when the next call is
made (``GpuSide.enter``), and raises.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from fusedcomm.errors import CapacityError, PeerTimeoutError
from fusedcomm.symmetric.devices import Domain, survey
from fusedcomm.symmetric.links import POLL_S
from fusedcomm.waiting import Awaited, Watch, following

if TYPE_CHECKING:
    from fusedcomm.protocol import Space

#: Looks at a flag that a kernel takes in a second, roughly: each is a load past the caches.
_LOOKS_PER_S = 1_000_000
_MOST_LOOKS = 2**30


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_counts() -> None:
    """Raise if a graph is captured, which cannot wait for what the ranks say on the host."""
    if is_capturing():
        raise ValueError(
            "all_to_all with counts needs the host, so it cannot be captured in a graph: leave "
            "them out, with equal parts"
        )


def refuse_growth(space: Space) -> None:
    """Raise: memory cannot be had while a graph is captured."""
    raise ValueError(
        f"the workspace {space.kind!r} would have to grow to {space.region_bytes} bytes and "
        f"{space.chunks} flags a rank while a CUDA graph is captured, which cannot allocate "
        "symmetric memory: call Communicator.reserve(op, global_shape, dtype=…) on every rank, or "
        "the operation itself once, before the capture"
    )


class GpuSide:
    """One communicator's GPU. Made on every rank at the first call with GPU tensors.

    Attributes:
        device: where this rank's tensors lie, for as long as the communicator lives.
        domain: whether and how the ranks reach each other's memory.
        programs: how many programs the GPU runs at once: one for each of its multiprocessors.
        record: int32 ``[RECORD_WORDS]`` on the device; zero until a wait runs out.
        host_record: the same in pinned memory, as of the last call that has ended.
        seen: texts of calls that were compared with the peers' already.
    """

    def __init__(self, watch: Watch, device: torch.device, world_size: int) -> None:
        from fusedcomm.kernels.signals import RECORD_WORDS  # imports Triton

        self.device = device
        self._watch = watch
        self.domain: Domain = survey(watch, device, world_size)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, device=device)
        self.host_record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        self.seen: set[str] = set()
        #: Multiprocessors that are left to what crosses between domains beside the kernels.
        self.left = 0
        self._ops: list[str] = [""]
        self._stream: torch.cuda.Stream | None = None
        self._copy_stream: torch.cuda.Stream | None = None
        self._look = 0.0

    @property
    def limit(self) -> int:
        """How often a kernel looks at a flag before it gives up."""
        return min(_MOST_LOOKS, max(1, int(self._watch.timeout_s * _LOOKS_PER_S)))

    @property
    def copy_stream(self) -> torch.cuda.Stream:
        """The stream of the copy engine, of the highest priority."""
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device, priority=-1)
        return self._copy_stream

    def op_number(self, op: str) -> int:
        """The number by which kernels name an operation in the record."""
        if op not in self._ops:
            self._ops.append(op)
        return self._ops.index(op)

    def enter(self) -> None:
        """Before a call: raise what went wrong since the last one, and keep the calls in order.

        Calls of one communicator use the same flags and memory, so they must run in the order in
        which they are made: a stream waits for the one that the last call was made on. (Calls that
        shall run beside each other take a channel each.) A captured graph is ordered by who
        replays it.

        Raises:
            PeerTimeoutError: a wait of an earlier call ran out.
            CapacityError: an earlier call's rows found no room.
            PeerLostError, MismatchError, AbortedError: a peer is gone or has failed.
        """
        self.raise_recorded()
        now = time.monotonic()
        if now >= self._look:
            self._look = now + POLL_S
            self._watch.look(Awaited("the calls on this GPU", self._watch.number, -1, "the data"))
        if is_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def raise_recorded(self) -> None:
        """Raise if a wait of a call that has ended ran out.

        Raises:
            PeerTimeoutError: with the operation, epoch, chunk and ranks.
            CapacityError: more rows were routed to a rank than it has room for.
        """
        failed, kind, source, chunk, wanted, seen, op, _ = self.host_record.tolist()
        if not failed:
            return
        from fusedcomm.kernels.signals import CAPACITY, CONSUMED, FAILED, READY

        rank, where = self._watch.rank, "" if chunk < 0 else f", chunk {chunk}"
        name = self._ops[op] if 0 <= op < len(self._ops) else "an operation"
        error: Exception
        if kind == CAPACITY.value:
            error = CapacityError.at(source, seen, wanted)
        elif kind == FAILED.value:
            error = PeerTimeoutError(
                f"rank {rank}: another rank gave up waiting, in or before {name}"
            )
        else:
            what = {READY.value: "data", CONSUMED.value: "the reader's signal"}.get(kind, "a flag")
            epoch = following(wanted) if kind == CONSUMED.value else wanted
            error = PeerTimeoutError(
                f"rank {rank} waited {self._watch.timeout_s:g} s for {what} in {name} (epoch "
                f"{epoch}{where}) of rank {source}; the flag was {seen}, {wanted} was wanted"
            )
        self._watch.fail(error)
        raise error
