"""The communicators of this process: one a group and channel, made by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from fusedcomm.communicator.life import CLOSED_TEXT
from fusedcomm.errors import ClosedError
from fusedcomm.topology import Topology
from fusedcomm.topology.declared import Declared, declared_topology

if TYPE_CHECKING:
    from fusedcomm.communicator.communicator import Communicator

#: Seconds a wait may last by default: a peer may be compiling.
DEFAULT_TIMEOUT_S = 600.0

_Key = tuple[str, str]  # a group's name, a channel
_present: dict[_Key, Communicator] = {}
#: Those without a channel, by their groups: what most calls name.
_of_group: dict[dist.ProcessGroup, Communicator] = {}
_lock = threading.Lock()
#: By group, as long as there is one: the channels of closed communicators, and a lock a channel.
_closed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_making: WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.Lock]] = WeakKeyDictionary()


def obtain(
    group: dist.ProcessGroup,
    channel: str,
    timeout_s: float | None,
    topology: Declared,
    make: Callable[[dist.ProcessGroup, str, float, Topology | None], Communicator],
) -> Communicator:
    """The communicator that there is, or one that ``make`` makes; see ``Communicator.of``."""
    key = (group.group_name, channel)
    found = _find(key, group)
    if found is not None and timeout_s is None and topology is None:
        return found
    with _lock:
        making = _making.setdefault(group, {}).setdefault(channel, threading.Lock())
    with making:  # One lock each: threads may make theirs in another order on every rank.
        found = _find(key, group)
        if found is None and (stale := _present.get(key)) is not None:
            # It is being closed by a thread, or its group was destroyed and another took the name.
            stale.close()
        declared = None
        if found is None or topology is not None:  # Not in every call of an operation.
            declared = declared_topology(topology, dist.get_process_group_ranks(group))
        if found is None:
            limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
            # Perhaps torch.export is tracing, or a model is built on the meta device: what is
            # mapped here is real memory all the same.
            with _disable_current_modes(), torch.device("cpu"):
                found = _present[key] = make(group, channel, limit, declared)
            if not channel:
                _of_group[group] = found
            _closed.setdefault(group, set()).discard(channel)
        elif topology is not None and found.declared != declared:
            raise ValueError(
                f"this group has a communicator with {found.topology}; close() it on every "
                f"rank before one with {declared} is made, or give the new one a channel"
            )
        if timeout_s is not None:
            found.set_timeout(timeout_s)
    return found


def _find(key: _Key, group: dist.ProcessGroup) -> Communicator | None:
    """The open communicator of this very group, if there is one."""
    found = _present.get(key)
    return None if found is None or found.closed or found.group is not group else found


def named(group_name: str, channel: str) -> Communicator | dist.ProcessGroup:
    """The open communicator of that name, or its group if it has had none.

    Raises:
        ClosedError: it was closed, and no other made since; or there is no such group any more.
    """
    found = _present.get((group_name, channel))
    if found is not None and not found.closed:
        return found
    try:
        group = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(group_name))
    except (RuntimeError, ValueError) as error:
        raise ClosedError(f"the process group {group_name!r} was destroyed") from error
    if found is not None or channel in _closed.get(group, ()):
        raise ClosedError(CLOSED_TEXT)
    return group


def opened(group: dist.ProcessGroup | None) -> Communicator | None:
    """The open communicator of a group and no channel, if there is one; None: the default group."""
    named = dist.GroupMember.WORLD if group is None else group
    found = None if named is None else _of_group.get(named)
    return None if found is None or found.closed else found


def live() -> list[Communicator]:
    """All that are open."""
    return list(_present.values())


def forget(closed: Communicator) -> None:
    """A communicator was closed."""
    key = (closed.group.group_name, closed.channel)
    if _of_group.get(closed.group) is closed:
        del _of_group[closed.group]
    if _present.get(key) is closed:
        del _present[key]
        _closed.setdefault(closed.group, set()).add(closed.channel)
