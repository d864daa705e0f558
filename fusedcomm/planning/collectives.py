"""Which engine, algorithm and pieces the collectives use, and the memory they take."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusedcomm.planning.engine import ACROSS, choose_engine
from fusedcomm.programs import ALGORITHMS, all_reduce_programs
from fusedcomm.programs.all_reduce import Domains
from fusedcomm.programs.steps import messages_per_pair
from fusedcomm.protocol import Space
from fusedcomm.topology.cost import choose

if TYPE_CHECKING:
    from fusedcomm.communicator import Communicator

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

#: What is chosen from, where nothing else is asked for, by ranks that share memory.
_SHARED = ("one_shot", "two_shot")
#: The all-reduce algorithms that the Triton engine has.
KERNELS = ("one_shot", "two_shot", "ring", "multimem")
#: Bytes of data that one slot has room for, whatever the tensor's size.
SLOT_BYTES = 1 << 23
#: A larger tensor goes through in pieces of this size, which stay in a core's cache. A slot then
#: has room for several, to be used in turn where going on in the same cache is slow.
_PIECE_BYTES = 1 << 20
#: Looked at once: it takes as long as a quarter of a small call.
_CORES = os.cpu_count() or 1
#: The least region that is allocated, so that tensors which grow a little do not grow it each time.
_LEAST_BYTES = 1 << 14


@dataclass(frozen=True)
class Plan:
    """How one call is carried out.

    Attributes:
        text: what must be equal on every rank, for the board.
        engine: "triton", "host" or "plain".
        algorithm: one of ``programs.ALGORITHMS`` for an all-reduce, else "direct"; over several
            domains "hierarchical", or "two_level" for an all-to-all.
        domains: the ranks of each domain, for hierarchical algorithms.
        reason: a sentence for people.
    """

    text: str
    engine: str
    algorithm: str
    domains: Domains | None
    reason: str


def plan(
    comm: Communicator,
    op: str,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    engine: str,
    details: tuple[Any, ...],
    algorithm: str = "direct",
) -> Plan:
    """The plan for one call; remembered by the communicator.

    Args:
        size: elements of the full tensor.
        engine, algorithm: what the caller asked for; "auto" leaves it to this function.
        details: whatever else must be equal on all ranks; shapes as tuples.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    key = (op, size, dtype, device, engine, details, algorithm)
    found: Plan | None = comm.plans.get(key)
    if found is None:
        found = _decide(comm, op, size, dtype, device, engine, details, algorithm)
        comm.plans[key] = found
    return found


def _decide(
    comm: Communicator,
    op: str,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    engine: str,
    details: tuple[Any, ...],
    algorithm: str,
) -> Plan:
    chosen, reason = choose_engine(comm, device, dtype, engine, across=ACROSS)
    several = chosen != "plain" and comm.inside is not None
    if algorithm == "multimem":
        lacking = _multimem_obstacle(comm, chosen, reason, dtype, details)
        if lacking:
            raise ValueError(f"algorithm='multimem' cannot be had: {lacking}")
    if chosen == "plain":
        if algorithm not in ("auto", "direct"):
            raise ValueError(
                f"algorithm={algorithm!r} cannot be had: torch.distributed chooses its own, and "
                f"it serves this call because {reason}"
            )
        algorithm = "direct"
    elif several and algorithm not in ("auto", "direct", "hierarchical"):
        raise ValueError(
            f"algorithm={algorithm!r} needs ranks that all share memory, but this group has "
            f"{len(comm.topology.domains)} domains: take 'hierarchical' or 'auto'"
        )
    elif several:
        algorithm = "two_level" if op == "all_to_all" else "hierarchical"
    elif chosen == "triton" and algorithm not in ("auto", "direct", *KERNELS):
        raise ValueError(
            f'algorithm={algorithm!r} has no kernel; engine="triton" takes {", ".join(KERNELS)}'
        )
    elif algorithm == "auto":
        algorithm, why = choose_algorithm(comm, size * dtype.itemsize, chosen)
        reason = f"{reason}; {why}"
    words = [str(list(d)) if isinstance(d, tuple) else str(d) for d in details]
    text = f"{op} {dtype} {' '.join(words)}, engine {chosen} {algorithm}"
    if chosen == "host" and size * dtype.itemsize > _PIECE_BYTES:
        text += f", in pieces of {piece_bytes(comm.world_size)} bytes"  # by the cores that it sees
    domains = comm.topology.domains if algorithm == "hierarchical" else None
    return Plan(text, chosen, algorithm, domains, reason)


def choose_algorithm(comm: Communicator, nbytes: int, engine: str) -> tuple[str, str]:
    """The all-reduce algorithm for a vector of ``nbytes``, and a sentence of reason.

    Two ranks that read each other's memory move no more in one step than in two: each writes and
    reads all of it once, be it half of x and half of the result or x alone.

    All ranks of ``comm`` share memory, so that, by any topology's costs, these two are the fastest,
    but for ``multimem``. That is to be had by name only until it has run on a switch: whether torch
    finds a multicast pointer shows when memory is allocated, and no rank may fail by default.
    """
    if engine == "host" and comm.world_size == 2:
        return "one_shot", "two ranks move no more in one step than in two"
    choice = choose("all_reduce", nbytes, comm.world_size, comm.topology, _SHARED)
    return choice.algorithm, choice.reason


def _multimem_obstacle(
    comm: Communicator, engine: str, reason: str, dtype: torch.dtype, details: tuple[Any, ...]
) -> str | None:
    """Why no switch can add for all ranks; None if one can."""
    if engine != "triton":
        return f"it is a kernel, and the {engine} engine serves this call: {reason}"
    if comm.topology.multicast != (True,):
        return "no switch with a multicast pointer reaches all ranks of this group"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the switch adds float32, float16 and bfloat16, not {dtype}"
    if "max" in details or "min" in details:
        return "the switch only adds: op must be sum or avg"
    return None


def check_algorithm(algorithm: str) -> None:
    """Raise ``ValueError`` unless ``algorithm`` may be asked for."""
    names = ("auto", *dict.fromkeys((*ALGORITHMS, *KERNELS)))
    if algorithm not in names:
        raise ValueError(f"algorithm must be one of {', '.join(names)}; got {algorithm!r}")


def region_of(nbytes: int) -> int:
    """Bytes of the region that is allocated for ``nbytes``: the next power of two, and not few."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)


def piece_bytes(world_size: int) -> int:
    """Bytes of the pieces of a large tensor.

    Ranks that share cores get the whole slot: with each piece they come to wait for each other, and
    each of them finds another one's data in the caches.
    """
    return _PIECE_BYTES if _apart(world_size) else SLOT_BYTES


def _apart(world_size: int) -> bool:
    """Whether every rank may have a core of its own."""
    return world_size <= _CORES


@functools.lru_cache(maxsize=1024)
def space(nbytes: int, world_size: int) -> Space:
    """Every rank offers ``nbytes`` in its own memory, with flags enough for any algorithm."""
    banks = SLOT_BYTES // _PIECE_BYTES if _apart(world_size) else 1
    return Space("collective", 1, region_of(nbytes), _most_messages(world_size), banks=banks)


@functools.cache
def _most_messages(world_size: int) -> int:
    """The most messages that one rank sends to another, in any algorithm."""
    programs = (all_reduce_programs(name, world_size, world_size) for name in ALGORITHMS)
    return max(map(messages_per_pair, programs))


def spaces(
    op: str, shape: Sequence[int], world_size: int, dtype: torch.dtype, backward: bool
) -> list[Space]:
    """The memory that calls of ``op``, one of ``OPS``, on this global shape take.

    The backward passes of collectives are collectives of the same bytes in the same memory.
    """
    if min(shape, default=0) < 0:
        raise ValueError(f"a global shape is not negative; got {list(shape)}")
    # Parts are as long as the longest one, whichever dimension is cut.
    total = math.prod(shape)
    cut = (-(-size // world_size) * world_size * (total // size) for size in shape if size)
    elements = max(cut, default=1) if total else 0
    return [space(min(piece_bytes(world_size), elements * dtype.itemsize), world_size)]
