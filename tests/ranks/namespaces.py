"""Several "machines" on this one: network namespaces with addresses of their own, on one bridge.

Ranks in different namespaces cannot share memory as far as the library can tell, and what they say
to each other goes through virtual network cards whose counters can be read.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

CARD = "fc0"
_CLONE_NEWNET = 0x40000000


class UnavailableError(Exception):
    """This machine does not allow it; the text says why."""


def _ip(*words: str) -> None:
    command = ["ip", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Names of ``count`` namespaces that reach each other over their card ``CARD``.

    Raises:
        UnavailableError: there is no ``ip``, or it may not make any.
    """
    if shutil.which("ip") is None:
        raise UnavailableError("there is no `ip` (Debian, Ubuntu: apt install iproute2)")
    prefix = f"fc{os.getpid()}"
    hub, names = f"{prefix}hub", [f"{prefix}n{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", CARD, "netns", name)
            _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", CARD)
            _ip("-n", name, "link", "set", CARD, "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def move_into(name: str, rank: int, world_size: int, store: str) -> None:
    """Put this rank into a namespace, and make its default group anew over the card there."""
    dist.destroy_process_group()
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )


def bytes_sent() -> int:
    """What has gone out over the card of this rank's namespace, headers included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == CARD:
            return int(counters.split()[8])
    raise AssertionError(f"no {CARD} here")
