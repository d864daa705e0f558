"""Point-to-point messages between two ranks: ``send``, ``recv``, their forms that do not wait, and
exchanges of several.

A rank number of the group is all that is needed. Both ranks name the same dtype and shape, of any
size; messages from one rank to another are received in the order in which they were sent. Each
ordered pair has a buffer of 2 MiB on each communicator, through which larger messages go in parts.

``send`` returns when x may be used again: at once for what fits into the buffer, else when the
receiver has come. Two ranks that both ``send`` more than that before they ``recv`` wait for each
other, which is an error that says so: such exchanges are what ``batch_send_recv``, or ``isend`` and
``irecv``, are for. All transfers under way go on whenever the rank waits for anything on the same
communicator.

Messages carry no gradient. ``group`` is as for the collectives; a second thread takes a channel of
its own.

Raises, all functions: ``ValueError`` for arguments that cannot be right; ``MismatchError`` where
the two ranks disagree about a message, or ranks wait for each other in a circle; ``PeerLostError``,
``PeerTimeoutError``, ``AbortedError`` where a rank is gone, late or failed; ``ClosedError`` on a
communicator that is unusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.ops.checks import check_engine
from fusedcomm.ops.collective_checks import check_fillable, check_rank, check_tensor
from fusedcomm.ops.dispatch import communicator_of
from fusedcomm.planning.engine import choose_engine


class Handle:
    """A message under way, from ``isend`` or ``irecv``.

    The tensor must not be changed (sent) or used (received) before ``wait`` has returned, or
    ``done`` was true.
    """

    def __init__(
        self, comm: Communicator, engine: ModuleType, sends: bool, x: Tensor, peer: int
    ) -> None:
        self._comm, self._engine, self._x = comm, engine, x
        # Bytes are moved: nothing may be left to be done to them, as in the view that conj() makes.
        plain = x.is_contiguous() and not x.is_conj() and not x.is_neg()
        if plain:
            self._data = x
        elif sends:
            self._data = x.contiguous().resolve_conj().resolve_neg()
        else:
            self._data = x.new_empty(x.shape)
        self._copies_back = not sends and self._data is not x
        self._transfer = engine.begin(comm, sends, self._data, peer)

    def wait(self) -> Tensor:
        """Wait until the message is over; returns the tensor."""
        self._engine.finish(self._comm, [self._transfer])
        return self._finished()

    @property
    def done(self) -> bool:
        """Whether the message is over, without waiting for it; lets all messages go on."""
        if not self._engine.is_done(self._comm, self._transfer):
            return False
        self._finished()
        return True

    def _finished(self) -> Tensor:
        if self._copies_back:
            self._copies_back = False
            with torch.no_grad():
                self._x.copy_(self._data)
        return self._x


def send(x: Tensor, dst: int, *, group: Any = None, engine: str = "auto") -> None:
    """Send x to rank ``dst``, which calls ``recv`` with a tensor of the same dtype and shape."""
    isend(x, dst, group=group, engine=engine).wait()


def recv(x: Tensor, src: int, *, group: Any = None, engine: str = "auto") -> Tensor:
    """Fill x with the next message of rank ``src``; returns x."""
    return irecv(x, src, group=group, engine=engine).wait()


def isend(x: Tensor, dst: int, *, group: Any = None, engine: str = "auto") -> Handle:
    """Begin to send x to rank ``dst``; x must not be changed until the handle is done."""
    return _begin("isend", True, x, dst, group, engine)


def irecv(x: Tensor, src: int, *, group: Any = None, engine: str = "auto") -> Handle:
    """Begin to fill x with the next message of rank ``src``; x is there when the handle is done."""
    return _begin("irecv", False, x, src, group, engine)


def batch_send_recv(
    messages: Sequence[tuple[str, Tensor, int]], *, group: Any = None, engine: str = "auto"
) -> list[Tensor]:
    """Send and receive several messages at once, in whichever order they get on.

    Args:
        messages: ``("send", x, dst)`` or ``("recv", x, src)`` each. Messages to (or from) one rank
            keep their order.

    Returns:
        The tensors received, in the order of ``messages``; all messages are over.
    """
    checked = [_checked_message(number, message) for number, message in enumerate(messages)]
    comm = _communicator(group)
    for kind, x, peer in checked:
        _check("batch_send_recv", kind == "send", x, peer, comm, engine)
    handles = [_begin(kind, kind == "send", x, peer, comm, engine) for kind, x, peer in checked]
    for handle in handles:
        handle.wait()
    return [x for kind, x, _ in checked if kind == "recv"]


def _checked_message(number: int, message: Any) -> tuple[str, Tensor, int]:
    if (
        not isinstance(message, (tuple, list))
        or len(message) != 3
        or message[0] not in ("send", "recv")
    ):
        raise ValueError(
            f'messages[{number}] must be ("send", x, dst) or ("recv", x, src); got {message!r}'
        )
    kind, x, peer = message
    return kind, x, peer


def _communicator(group: Any) -> Communicator:
    comm = communicator_of(group)
    comm.require_usable()
    return comm


def _check(name: str, sends: bool, x: Tensor, peer: int, comm: Communicator, engine: str) -> None:
    check_tensor(x)
    check_engine(engine)
    check_rank("dst" if sends else "src", peer, comm.world_size)
    if peer == comm.rank:
        raise ValueError(f"{name}: rank {peer} is this rank itself; copy the tensor instead")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name}: messages carry no gradient, but x requires one; detach() it")
    if not sends:
        check_fillable(x, f"{name}: x")


def _begin(name: str, sends: bool, x: Tensor, peer: int, group: Any, engine: str) -> Handle:
    comm = _communicator(group)
    _check(name, sends, x, peer, comm, engine)
    if engine == "triton":
        raise ValueError('engine="triton" cannot serve messages: they have no kernels yet')
    chosen, _ = choose_engine(comm, x.device, x.dtype, engine)
    return Handle(comm, operations_of(chosen, "point_to_point"), sends, x, peer)
