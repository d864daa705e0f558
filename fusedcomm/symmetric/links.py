"""Connections between the ranks of one machine: descriptors travel over them, deaths show on them.

Every pair of ranks keeps one abstract Unix socket open for the life of the communicator. Abstract
names vanish with their process, so nothing is left in the file system. A peer is watched by a
pidfd: a killed child is a zombie, for which signal 0 still succeeds, but whose pidfd is readable.
A held connection would not do: a child that the peer forked may hold its end open.
"""

from __future__ import annotations

import array
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable

from fusedcomm.errors import SharedMemoryError

_LENGTH = struct.Struct("<q")
#: Seconds that a rank may take between connecting and naming itself.
_HELLO_S = 5.0
#: Seconds between two looks at the peers while this rank waits on a socket.
POLL_S = 0.05


class Listener:
    """The socket on which this rank awaits the ranks above it."""

    def __init__(self) -> None:
        self.name = f"fusedcomm-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.name)
        self._socket.listen(1024)

    def accept(self, timeout_s: float) -> socket.socket | None:
        """The next connection, or None when none came within ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        return connection

    def close(self) -> None:
        self._socket.close()


class Links:
    """This rank's connections to the other ranks of its domain."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sockets: dict[int, socket.socket] = {}
        self._pidfds: dict[int, int] = {}
        self._lost: set[int] = set()

    @property
    def peers(self) -> list[int]:
        return sorted(self._sockets)

    @classmethod
    def connect(
        cls,
        rank: int,
        listener: Listener,
        names: dict[int, str],
        pids: dict[int, int],
        check: Callable[[int], None],
    ) -> Links:
        """Join the mesh: connect to the ranks below, accept the ranks above.

        Args:
            names, pids: the listener name and the process of every rank, this one included.
            check: called every ``POLL_S`` while waiting, with a missing rank; raises to give up.

        Raises:
            ConnectionError: a rank is gone.
        """
        links = cls(rank)
        try:
            for peer, pid in pids.items():
                if peer != rank:
                    links._watch(peer, pid)
            for peer in sorted(r for r in names if r < rank):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                links._sockets[peer] = connection
                connection.connect("\0" + names[peer])
                connection.send(_LENGTH.pack(rank), socket.MSG_NOSIGNAL)
            awaited = {r for r in names if r > rank}
            while awaited:
                accepted = listener.accept(POLL_S)
                if accepted is not None:
                    peer = _introduced(accepted)
                    links._sockets[peer] = accepted
                    awaited.discard(peer)
                    continue
                for missing in sorted(awaited):
                    if not links.alive(missing):
                        raise ConnectionResetError(f"rank {missing} died")
                check(min(awaited))
        except BaseException:
            links.close()
            raise
        return links

    def _watch(self, peer: int, pid: int) -> None:
        try:
            self._pidfds[peer] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lost.add(peer)

    def alive(self, peer: int) -> bool:
        """Whether the peer's process runs (a rank is always alive to itself)."""
        if peer in self._lost:
            return False
        pidfd = self._pidfds.get(peer)
        if pidfd is None:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(0):
            self._lost.add(peer)
            return False
        return True

    def send(self, peer: int, payload: bytes, descriptor: int) -> None:
        """Send a message and a file descriptor; the peer receives its own copy of it.

        Raises:
            ConnectionError: the peer is gone.
        """
        rights = array.array("i", [descriptor])
        self._sockets[peer].sendmsg(
            [payload], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL
        )

    def pending(self, peer: int, timeout_s: float) -> bool:
        """Whether a message of ``peer`` (or its end) is there, waiting up to ``timeout_s``."""
        poll = select.poll()
        poll.register(self._sockets[peer], select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def receive(self, peer: int) -> tuple[bytes, int]:
        """The peer's next message and descriptor, which must be ``pending``.

        Raises:
            ConnectionError: the peer is gone.
            SharedMemoryError: this process can hold no more file descriptors.
        """
        space = socket.CMSG_SPACE(struct.calcsize("i"))
        connection = self._sockets[peer]
        payload, ancillary, _, _ = connection.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
        if not payload:
            raise ConnectionResetError(f"rank {peer} closed its connection")
        if not ancillary:
            raise SharedMemoryError(
                f"rank {self.rank} cannot take over shared memory of rank {peer}: it holds as many "
                "file descriptors as it may (raise ulimit -n)"
            )
        rights = array.array("i")
        rights.frombytes(ancillary[0][2][: rights.itemsize])
        return payload, rights[0]

    def close(self) -> None:
        """Close everything; idempotent."""
        for connection in self._sockets.values():
            connection.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._sockets.clear()
        self._pidfds.clear()


def _introduced(connection: socket.socket) -> int:
    """The rank that a new connection's first message names."""
    connection.settimeout(_HELLO_S)
    try:
        hello = connection.recv(_LENGTH.size)
    except TimeoutError:
        hello = b""
    if len(hello) != _LENGTH.size:
        connection.close()
        raise ConnectionResetError("a rank connected and fell silent: it died or was stopped")
    connection.settimeout(None)
    return _LENGTH.unpack(hello)[0]
