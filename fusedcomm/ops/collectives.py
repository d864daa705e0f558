"""Collectives on tensors: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast.

Tensors may have any shape, be empty or non-contiguous; every rank passes the same shape unless the
function says otherwise. Shards are ``torch.chunk``'s: equal but for the last ones, which may be
shorter or empty. W is the world size. ``group`` is a ``ProcessGroup``, a 1-D ``DeviceMesh``, a
``Communicator`` (to choose a channel) or None for the default group.

Reductions take float32, float16, bfloat16, float64 and integers (which wrap around); "avg" needs a
floating dtype; "max" and "min" also take bool, and pass NaN on. Everything else moves any dtype.
Sums of half types are added in float32, in the order of ranks, and rounded once, except where an
algorithm says otherwise. Results are equal on all ranks that hold them and from run to run, bitwise
(engine "plain" promises what torch.distributed's backend promises).

**Derivatives** are those of torch's functional collectives: the result is taken to be a different
value on every rank, whose gradients are added up. So ``all_reduce``'s derivative is an all-reduce
of the ranks' gradients. (The tensor-parallel operations follow DTensor instead, where a replicated
tensor is one value, with one gradient.) With L the *sum over all ranks* of their losses::

    y = fc.all_reduce(x)                 # every rank: y = Σ x
    y.square().sum().backward()          # x.grad = 2 W y:  dL/dx, all W ranks' losses counted
    y = fc.linear_all_reduce(x, weight)  # its gradient is dy · weight: one loss, counted once

**In place**: ``out=`` takes the result; where it says so, ``out=x`` is allowed. Such calls have no
derivative.

Raises, all functions: ``ValueError`` for arguments that cannot be right, before anything is sent;
``MismatchError`` where ranks disagree; ``PeerLostError``, ``PeerTimeoutError``, ``AbortedError``
where a rank is gone, late or failed; ``ClosedError`` on a communicator that is unusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedcomm.ops.checks import check_engine, check_int
from fusedcomm.ops.collective_checks import (
    check_counts,
    check_dim,
    check_out,
    check_rank,
    check_reduction,
    check_tensor,
    whole_numbers,
)
from fusedcomm.ops.dispatch import address_of, is_plain, named
from fusedcomm.ops.library import collectives as library
from fusedcomm.ops.repeated import remember, repeated
from fusedcomm.planning.collectives import check_algorithm
from fusedcomm.schedule import shard_bounds


def all_reduce(
    x: Tensor,
    *,
    group: Any = None,
    op: str = "sum",
    algorithm: str = "auto",
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """Reduce x over the ranks; every rank gets the result.

    Args:
        x: any shape, the same on every rank.
        op: "sum", "avg", "max" or "min".
        algorithm: "auto", or one by name; see ``docs/collectives.md`` for what each costs.
            "one_shot", "pairwise", "two_shot" and "parameter_server" round once. "ring",
            "halving_doubling" and "hierarchical" pass partial results on and round them to x's
            dtype at each hop. On the CPU's shared memory "pairwise" and "one_shot" are the same.
        out: where the result goes; may be x itself.
        engine: "auto", "host" (CPU ranks that share memory), "triton" (kernels) or "plain"
            (torch.distributed's).

    Returns:
        The result, of x's shape and dtype; ``out`` if that is given. Its derivative ("sum" and
        "avg") is the all-reduce of its gradients; see the module's text.
    """
    kind = ("all_reduce", op, algorithm, engine)
    again = repeated(kind, x, out, group)
    if again is not None:
        return again(x, out)
    check_tensor(x)
    check_reduction(x, op)
    check_algorithm(algorithm)
    check_engine(engine)
    address = address_of(group)
    if out is not None:
        check_out(x, out, x.shape, in_place=True)
    if is_plain(x, out):
        comm = named(address)
        fill = library.fill_all_reduce(comm, x, op, algorithm, engine)
        return remember(comm, kind, x, out, x.shape, fill, in_place=True)
    return _placed(
        library.all_reduce(x, op, algorithm, address.group, address.channel, engine), out
    )


def all_gather(
    x: Tensor,
    *,
    group: Any = None,
    dim: int = 0,
    gathered_size: int | None = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """Join the ranks' shards along a dimension; every rank gets the whole.

    Args:
        x: this rank's shard.
        dim: the dimension that is cut.
        gathered_size: the whole's extent along ``dim``; None means that all shards are equal.
        out: where the result goes; apart from x.
        engine: as in :func:`all_reduce`.

    Returns:
        The whole, of x's dtype. Its derivative is the reduce-scatter of its gradients.
    """
    kind = ("all_gather", dim, gathered_size, engine)
    again = repeated(kind, x, out, group)
    if again is not None:
        return again(x, out)
    check_tensor(x)
    check_engine(engine)
    dim = check_dim(x, dim)
    address = address_of(group)
    if gathered_size is None:
        size = x.shape[dim] * address.world_size
    else:
        check_int("gathered_size", gathered_size)
        size = gathered_size
        if size < 0:
            raise ValueError(f"gathered_size must not be negative; got {size}")
        start, stop = shard_bounds(size, address.world_size)[address.rank]
        if x.shape[dim] != stop - start:
            raise ValueError(
                f"x is {x.shape[dim]} long in dimension {dim}, but of gathered_size={size} rank "
                f"{address.rank} of {address.world_size} has {stop - start} (torch.chunk's rule)"
            )
    shape = library.gathered_shape(x.shape, dim, size)
    if out is not None:
        check_out(x, out, shape, in_place=False)
    if is_plain(x, out):
        comm = named(address)
        fill = library.fill_all_gather(comm, x, dim, size, engine)
        return remember(comm, kind, x, out, shape, fill)
    return _placed(library.all_gather(x, dim, size, address.group, address.channel, engine), out)


def reduce_scatter(
    x: Tensor,
    *,
    group: Any = None,
    dim: int = 0,
    op: str = "sum",
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """Reduce x over the ranks; each gets its shard of the result.

    Args:
        x: any shape, the same on every rank.
        dim: the dimension along which the result is cut, by ``torch.chunk``'s rule.
        op: "sum", "avg", "max" or "min"; the ranks' values are reduced in one go and rounded once.
        out: where the result goes; apart from x.
        engine: as in :func:`all_reduce`.

    Returns:
        This rank's shard. Its derivative ("sum" and "avg") is the all-gather of the gradients.
    """
    kind = ("reduce_scatter", dim, op, engine)
    again = repeated(kind, x, out, group)
    if again is not None:
        return again(x, out)
    check_tensor(x)
    check_reduction(x, op)
    check_engine(engine)
    dim = check_dim(x, dim)
    address = address_of(group)
    shape = library.scattered_shape(x.shape, dim, address.rank, address.world_size)
    if out is not None:
        check_out(x, out, shape, in_place=False)
    if is_plain(x, out):
        comm = named(address)
        fill = library.fill_reduce_scatter(comm, x, dim, op, engine)
        return remember(comm, kind, x, out, shape, fill)
    return _placed(library.reduce_scatter(x, dim, op, address.group, address.channel, engine), out)


def all_to_all(
    x: Tensor,
    *,
    group: Any = None,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """Send every rank its rows of x; get from every rank the rows that it has for this one.

    Args:
        x: rows along dimension 0, first those for rank 0, then those for rank 1, …
        send_counts, recv_counts: how many rows go to and come from each rank; W numbers each. Both
            are left out where every rank's share is the same, ``x.shape[0] / W`` rows.
        out: where the result goes; apart from x.
        engine: as in :func:`all_reduce`.

    Returns:
        The rows received, in the order of the ranks they come from. The derivative is the
        all-to-all that sends the gradients back.
    """
    equal = send_counts is None and recv_counts is None
    kind = ("all_to_all", engine)
    again = repeated(kind, x, out, group) if equal else None
    if again is not None:
        return again(x, out)
    check_tensor(x)
    check_engine(engine)
    address = address_of(group)
    sends = whole_numbers("send_counts", send_counts)
    receives = whole_numbers("recv_counts", recv_counts)
    check_counts(x, sends, receives, address.rank, address.world_size)
    shape = [x.shape[0] if receives is None else sum(receives), *x.shape[1:]]
    if out is not None:
        check_out(x, out, shape, in_place=False)
    if is_plain(x, out):
        comm = named(address)
        fill = library.fill_all_to_all(comm, x, sends, receives, engine)
        return remember(comm, kind if equal else None, x, out, shape, fill)
    return _placed(
        library.all_to_all(x, sends, receives, address.group, address.channel, engine), out
    )


def broadcast(
    x: Tensor,
    src: int,
    *,
    group: Any = None,
    out: Tensor | None = None,
    engine: str = "auto",
) -> Tensor:
    """Every rank gets x of rank ``src``.

    Args:
        x: of the same shape and dtype on every rank; only ``src``'s values matter.
        src: a rank of the group.
        out: where the result goes; may be x itself.
        engine: as in :func:`all_reduce`.

    Returns:
        What ``src`` has in x. The derivative on ``src`` is the sum of all ranks' gradients, on the
        other ranks zero. ``src`` may go on before the others have come.
    """
    kind = ("broadcast", src, engine)
    again = repeated(kind, x, out, group)
    if again is not None:
        return again(x, out)
    check_tensor(x)
    check_engine(engine)
    address = address_of(group)
    check_rank("src", src, address.world_size)
    if out is not None:
        check_out(x, out, x.shape, in_place=True)
    if is_plain(x, out):
        comm = named(address)
        fill = library.fill_broadcast(comm, x, src, engine)
        return remember(comm, kind, x, out, x.shape, fill, in_place=True)
    return _placed(library.broadcast(x, src, address.group, address.channel, engine), out)


def _placed(result: Tensor, out: Tensor | None) -> Tensor:
    """A traced operation's result, in ``out`` if that is given."""
    return result if out is None else out.copy_(result)
