"""Connections between the ranks of one machine: descriptors travel over them, deaths show on them.

Every pair of ranks keeps one abstract Unix socket open for the life of the communicator. Abstract
names vanish with their process, so nothing is left in the file system. A peer is watched by a
pidfd: a killed child is a zombie, for which signal 0 still succeeds, but whose pidfd is readable.
A held connection would not do: a child that the peer forked may hold its end open.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import select
import socket
import struct

from fusedcomm.errors import SharedMemoryError

#: Seconds between two looks at the peers while this rank waits.
POLL_S = 0.05
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """The socket on which this rank awaits the ranks above it."""

    def __init__(self) -> None:
        self.name = f"fusedcomm-{secrets.token_hex(12)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind("\0" + self.name)
        self.socket.listen(1024)
        self.socket.setblocking(False)

    def accept(self) -> tuple[socket.socket, int]:
        """A connection that is there, and the process that made it.

        Raises:
            BlockingIOError: there is none.
        """
        connection, _ = self.socket.accept()
        connection.setblocking(True)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        return connection, pid

    def close(self) -> None:
        self.socket.close()


def open_connection(name: str) -> socket.socket:
    """Connect to the listener of that name.

    Raises:
        ConnectionError: there is none (any more).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + name)
    except BaseException:
        connection.close()
        raise
    return connection


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

    def watch(self, peer: int, pid: int) -> None:
        """From now on, ``alive(peer)`` is about this process."""
        self._unwatch(peer)
        try:
            self._pidfds[peer] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lost.add(peer)

    def _unwatch(self, peer: int) -> None:
        self._lost.discard(peer)
        if peer in self._pidfds:
            os.close(self._pidfds.pop(peer))

    def connected(self, peer: int) -> bool:
        return peer in self._sockets

    def fileno(self, peer: int) -> int:
        return self._socket(peer).fileno()

    def add(self, peer: int, connection: socket.socket) -> None:
        """Take over a connection; an older one to the same peer is closed."""
        self.drop(peer)
        self._sockets[peer] = connection

    def drop(self, peer: int) -> None:
        """Close the connection to a peer, if there is one."""
        if peer in self._sockets:
            self._sockets.pop(peer).close()

    def alive(self, peer: int) -> bool:
        """Whether the peer's process runs (as far as it is known; a rank is alive to itself)."""
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

    def send(self, peer: int, payload: bytes, descriptor: int) -> bool:
        """Send a message and a file descriptor; the peer receives its own copy of it.

        Returns:
            False if this user has as many descriptors under way as the kernel allows: nothing was
            sent, and may be once others have received theirs.

        Raises:
            ConnectionError: the peer is gone.
        """
        rights = array.array("i", [descriptor])
        try:
            self._socket(peer).sendmsg(
                [payload], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL
            )
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise
        return True

    def pending(self, peer: int, timeout_s: float) -> bool:
        """Whether a message of ``peer`` (or its end) is there, waiting up to ``timeout_s``."""
        poll = select.poll()
        poll.register(self._socket(peer), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def receive(self, peer: int) -> tuple[bytes, int]:
        """The peer's next message and descriptor, which must be ``pending``.

        Raises:
            ConnectionError: the peer is gone.
            SharedMemoryError: this process can hold no more file descriptors.
        """
        space = socket.CMSG_SPACE(struct.calcsize("i"))
        flags = socket.MSG_CMSG_CLOEXEC
        connection = self._socket(peer)
        try:
            payload, ancillary, _, _ = connection.recvmsg(4096, space, flags)
        except ConnectionResetError:
            # The peer closed with a message of ours unread: said before its own are delivered.
            payload, ancillary, _, _ = connection.recvmsg(4096, space, flags)
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

    def _socket(self, peer: int) -> socket.socket:
        connection = self._sockets.get(peer)
        if connection is None:
            raise ConnectionResetError(f"the connection to rank {peer} was closed")
        return connection

    def close(self) -> None:
        """Close everything; idempotent."""
        for peer in list(self._sockets):
            self.drop(peer)
        for peer in list(self._pidfds):
            self._unwatch(peer)
