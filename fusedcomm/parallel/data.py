"""Data parallelism: gradients averaged over the ranks, while the backward pass goes on.

    ddp = DistributedDataParallel(model)
    fc.parallel.data.average_in_backward(ddp)

or, what that does for plain training loops, ``ddp.register_comm_hook(group, all_reduce_hook)``.
DDP collects gradients in buckets (25 MiB each, the first 1 MiB) and gives each to the hook as soon
as it is full. The hook hands it to a thread that averages it, on a channel of its own, and returns
a future; autograd goes on meanwhile, and DDP waits for the futures at the end of the pass.

Under gradient accumulation, leave the hook where it is and use DDP's ``no_sync()`` as ever. It must
cover the forward pass too: DDP decides there whether the backward pass will synchronise.

    with ddp.no_sync():
        loss_of(ddp(batch)).backward()

**Not under schedules that split the backward pass** (zero bubble, DualPipeV): there weights'
gradients do not come from the backward pass that DDP watches, and DDP silently leaves ranks out.
The hook refuses; call ``average_gradients(module)`` after the schedule's step instead.
"""

# No `from __future__ import annotations`: DDP compares the hook's with the classes themselves.

import queue
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.communicator import Communicator
from fusedcomm.groups import resolve_group
from fusedcomm.nn.sharded import local
from fusedcomm.ops.collectives import all_reduce
from fusedcomm.ops.dispatch import communicator_of
from fusedcomm.trace import span

#: The channel on which buckets are averaged: no other thread may use it.
CHANNEL = "fusedcomm.parallel.data"
#: Bytes of gradients that ``average_gradients`` averages in one exchange, as DDP's buckets.
BUCKET_BYTES = 25 << 20

_SCHEDULES = "torch.distributed.pipelining.schedules"
_SPLIT = (
    "this pipeline schedule splits the backward pass into input gradients (I) and weight gradients "
    "(W). DistributedDataParallel does not see weight gradients made so, and would silently not "
    "average them on some ranks. Leave DistributedDataParallel out and call "
    "fusedcomm.parallel.data.average_gradients(module) after each step of the schedule, or take a "
    "schedule with whole backward passes (GPipe, 1F1B, interleaved 1F1B)."
)


def average_in_backward(ddp: DistributedDataParallel) -> None:
    """Have ``ddp`` average its gradients by ``all_reduce_hook``, over its own process group.

    Beside registering the hook this looks, in each forward pass, whether a pipeline schedule that
    splits the backward pass runs it: in most stages of such a schedule DDP calls no hook at all.

    Raises:
        ValueError: ``ddp`` is no ``DistributedDataParallel``.
        RuntimeError: it has a hook already; or, in its forward pass, for a split backward pass.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"ddp must be a DistributedDataParallel; got {type(ddp).__name__}")
    ddp.register_comm_hook(ddp.process_group, all_reduce_hook)
    ddp.register_forward_pre_hook(lambda module, inputs: _refuse_split_schedule())


def all_reduce_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook for ``DistributedDataParallel.register_comm_hook``.

    Gradients are averaged in their own dtype, added in float32 and rounded once; with more ranks
    than a domain has, as ``fc.all_reduce`` says. Errors of other ranks come out of ``backward()``.

    Args:
        state: the group, as everywhere: a ``ProcessGroup``, a 1-D ``DeviceMesh``, or None for the
            default one. It must be DDP's own.
        bucket: what DDP gives.

    Returns:
        A future of the bucket's averaged gradients.

    Raises:
        RuntimeError: the backward pass belongs to a pipeline schedule that splits it.
    """
    if any(frame.f_code.co_name == "backward_weight_one_chunk" for frame in _frames()):
        raise RuntimeError(_SPLIT)
    _refuse_split_schedule()
    group = resolve_group(state)
    buffer, name = bucket.buffer(), f"bucket {bucket.index()}"
    if buffer.is_cuda:
        return _on_side_stream(group, buffer, name)
    return _worker_of(group).submit(buffer, name)


def average_gradients(
    module: nn.Module, group: Any = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace every parameter's gradient by its average over the ranks; collective.

    For training loops without DDP: call it between ``backward()`` (or a pipeline schedule's step)
    and the optimiser's step. A parameter that has a gradient on some ranks only counts as zero on
    the others, and has one everywhere afterwards; one without gradient anywhere keeps none.

    Args:
        module: its parameters in the same order on every rank.
        group: the ranks that hold replicas: a ``ProcessGroup``, a 1-D ``DeviceMesh``, a
            ``Communicator`` or None for the default group.
        bucket_bytes: how much is averaged in one exchange.

    Raises:
        ValueError: a gradient is sparse, or ``bucket_bytes`` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive; got {bucket_bytes}")
    comm = communicator_of(group)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse, which cannot be averaged here")
    if not parameters or comm.world_size == 1:
        return
    present = torch.tensor([parameter.grad is not None for parameter in parameters])
    present = all_reduce(present, op="max", group=comm)
    wanted: list[Tensor] = []
    for parameter, some in zip(parameters, present.tolist(), strict=True):
        if some:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            wanted.append(local(parameter.grad.detach()))  # of a DTensor, this rank's part
    for bucket in _buckets(wanted, bucket_bytes):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        all_reduce(flat, op="avg", group=comm, out=flat)
        for grad, averaged in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(averaged.view(grad.shape))


def _buckets(grads: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Gradients of one dtype and device together, in their order, about ``bucket_bytes`` each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for same in kinds.values():
        bucket: list[Tensor] = []
        held = 0
        for grad in same:
            if bucket and held + grad.nbytes > bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append(grad)
            held += grad.nbytes
        yield bucket


class _Worker:
    """The thread that averages one group's buckets, in the order in which they are full."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._queue: queue.SimpleQueue[tuple[Tensor, str, Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: it must not keep a program alive whose main thread is done.
        self._thread = threading.Thread(target=self._run, name=CHANNEL, daemon=True)
        self._thread.start()

    def submit(self, buffer: Tensor, name: str) -> Future[Tensor]:
        """Average ``buffer`` in place; the future is ready when it is done."""
        done: Future[Any] = Future()
        self._queue.put((buffer, name, done))
        # A future's own exception would reach DDP as a value. One raised on the way does arrive.
        return done.then(_unwrapped)

    def end(self) -> None:
        """Have the thread end when its queue is empty."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            buffer, name, done = item
            try:
                done.set_result(_average(self.group, buffer, name))
            except BaseException as error:
                done.set_result(error)
            del buffer, item  # Not kept until the next backward pass.


def _unwrapped(done: Future[Any]) -> Tensor:
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    return result


def _average(group: dist.ProcessGroup, buffer: Tensor, name: str) -> Tensor:
    comm = Communicator.of(group, channel=CHANNEL)
    with torch.no_grad(), span("bucket", name, rank=comm.rank, nbytes=buffer.nbytes):
        return all_reduce(buffer, op="avg", group=comm, out=buffer)


#: By group name. A group that was destroyed and made again has a new worker.
_workers: dict[str, _Worker] = {}
_lock = threading.Lock()


def _worker_of(group: dist.ProcessGroup) -> _Worker:
    with _lock:
        worker = _workers.get(group.group_name)
        if worker is None or worker.group is not group:
            if worker is not None:
                worker.end()
            worker = _workers[group.group_name] = _Worker(group)
        return worker


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _on_side_stream(group: dist.ProcessGroup, buffer: Tensor, name: str) -> Future[Tensor]:
    """On a GPU no thread is needed: the work is queued on a stream beside autograd's."""
    device = buffer.device
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    done: Future[Tensor] = Future(devices=[device])
    with torch.cuda.stream(stream):
        averaged = _average(group, buffer, name)
        buffer.record_stream(stream)
        done.set_result(averaged)  # It records the stream; who waits for it waits for that.
    return done


def _refuse_split_schedule() -> None:
    """Raise if a pipeline schedule that splits backward passes is further up in this thread."""
    module = sys.modules.get(_SCHEDULES)
    if module is None:
        return
    for frame in _frames():
        if frame.f_code.co_filename != module.__file__:
            continue
        schedule = frame.f_locals.get("self")
        if schedule is not None and _splits_backward(schedule):
            raise RuntimeError(f"{type(schedule).__name__}: {_SPLIT}")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _splits_backward(schedule: Any) -> bool:
    """Whether any rank's actions in it are input or weight gradients alone."""
    kinds = sys.modules[_SCHEDULES]._ComputationType
    split = (kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT)

    def is_split(action: Any) -> bool:
        if action is None:
            return False
        parts = getattr(action, "sub_actions", None) or ()
        return action.computation_type in split or any(is_split(part) for part in parts)

    orders = [
        getattr(schedule, name, None) or {}
        for name in ("pipeline_order", "pipeline_order_with_comms")
    ]
    return any(
        is_split(action) for order in orders for actions in order.values() for action in actions
    )
