"""What passes between a pool and its ranks: whole messages, and values that carry their tensors."""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
from typing import Any

import torch

_LENGTH = struct.Struct("<Q")
_STALL_S = 30.0  # a message that began to pass must not stop passing for longer


class Channel:
    """Whole messages over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Raises ``ConnectionError`` if the other end is gone, ``TimeoutError`` if it is stuck."""
        self._socket.settimeout(_STALL_S)
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def readable(self) -> bool:
        """Whether ``receive`` has something to do, be it to raise ``EOFError``."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> bytes:
        """The next message; waits for its beginning as long as it takes.

        Raises:
            EOFError: the other end is gone, possibly in the middle of a message.
            TimeoutError: the message stopped arriving in its middle.
        """
        self._socket.settimeout(None)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return bytes(self._exactly(length))

    def _exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            try:
                got = self._socket.recv_into(view)
            except ConnectionResetError:
                got = 0
            if got == 0:
                raise EOFError
            view = view[got:]
            self._socket.settimeout(_STALL_S)
        return received


def dumps(value: Any) -> bytes:
    """Pickle by value: plain tensors travel as their elements, from and to CPU memory.

    Nothing of a tensor's storage beyond its elements is sent, and no memory is shared with the
    process that made it, so that a result outlives its rank. Graphs are not sent; a leaf keeps
    ``requires_grad``.
    """
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _ByValue(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        buffer = io.BytesIO()
        torch.save(obj.detach().cpu().clone(), buffer)
        return _load_tensor, (buffer.getvalue(), obj.is_leaf and obj.requires_grad)


def _load_tensor(saved: bytes, requires_grad: bool) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(saved), weights_only=True)
    return tensor.requires_grad_(requires_grad)
