"""The pool's end of the process that starts its ranks; ``launcher_main.py`` says what that is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

#: The most bytes and descriptors of one packet on the control socket.
PACKET = 4096
DESCRIPTORS = 250

_START_S = 120.0  # for an interpreter to import torch, on a machine that has much else to do
_KILL_S = 20.0  # for the kernel to end killed processes

# What the new interpreter runs: it must find fusedcomm where this one did.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fusedcomm.ranks.launcher_main import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
)


@dataclass(frozen=True)
class Ended:
    """A rank that is no more. ``exit_code`` as in ``subprocess``; ``at_ns`` by ``monotonic_ns``."""

    rank: int
    exit_code: int
    at_ns: int


class Launcher:
    """A new interpreter with torch, ready to fork ranks. Closing it ends them too."""

    def __init__(self, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        """Starts it with exactly this environment, and waits until it has imported its modules."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *preload]
        # It inherits the blocked signal: Ctrl-C must not interrupt it before it can ignore that.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        try:
            self._receive(_START_S)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when ``ended`` has something to return, or to raise."""
        return self._control.fileno()

    def fork(self, world_size: int, descriptors: Sequence[int], *, threads: int, pin: bool) -> None:
        """Starts ranks: of ``descriptors``, all get the first one, and rank r two of its own."""
        message = {"do": "fork", "world_size": world_size, "threads": threads, "pin": pin}
        self._send(message, descriptors)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank, if it lives."""
        self._send({"do": "signal", "rank": rank, "number": number})

    def kill(self) -> None:
        """Kills all ranks. ``ended`` then returns those it has not returned before."""
        self._send({"do": "kill"})

    def ended(self) -> Ended:
        """The next rank that ended, each one once. It does not wait for long."""
        return Ended(**self._receive(_KILL_S))

    def close(self) -> None:
        """Ends the launcher and all its ranks, and returns when they are gone; idempotent."""
        self._control.close()  # it sees that, ends its ranks, and then itself
        try:
            self._process.wait(_KILL_S)
        except BaseException:
            self._process.kill()  # its ranks die with it
            self._process.wait()
            raise

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except ConnectionError:
            self._is_gone()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            packet = self._control.recv(PACKET)
        except ConnectionError:
            packet = b""
        if not packet:
            self._is_gone()
        message: dict[str, Any] = json.loads(packet)
        return message

    def _is_gone(self) -> NoReturn:
        code = self._process.wait(_KILL_S)
        raise RuntimeError(
            f"the process that starts the ranks ended with exit code {code}; its error output says "
            "why, unless it was killed"
        )
