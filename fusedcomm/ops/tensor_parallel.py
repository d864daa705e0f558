"""Linear layers cut over ranks, overlapped with their collective.

Tensors are ``[…, tokens, …, features]``; weights have ``nn.Linear``'s layout ``[out, in]``. W is
the world size. Shards of tokens are ``torch.chunk``'s: equal but for the last ones, which may be
shorter or empty. ``group`` is a ``ProcessGroup``, a 1-D ``DeviceMesh``, a ``Communicator`` (to
choose a channel) or None for the default group. At W = 1 every function equals the plain layer.
Under ``torch.autocast`` they compute in its dtype, as ``F.linear`` does.

Raises, all functions: ``ValueError`` for arguments that cannot be right, before anything is sent;
``MismatchError`` where ranks disagree; ``PeerLostError``, ``PeerTimeoutError``, ``AbortedError``
where a rank is gone, late or failed; ``ClosedError`` on a communicator that is unusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.ops.autocast import autocast
from fusedcomm.ops.checks import (
    check_engine,
    check_linear,
    check_scattered,
    check_shard,
    check_wire_dtype,
)
from fusedcomm.ops.dispatch import address_of, direct
from fusedcomm.ops.library import tensor_parallel as library
from fusedcomm.schedule import shard_bounds

Weights = Tensor | Sequence[Tensor]
Biases = Tensor | None | Sequence[Tensor | None]


def all_gather_linear(
    x: Tensor,
    weight: Weights,
    bias: Biases = None,
    *,
    group: Any = None,
    gather_dim: int = 0,
    gathered_size: int | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    engine: str = "auto",
) -> Any:
    """Gather x over the ranks and multiply: ``y = gathered(x) · weightᵀ + bias``.

    Args:
        x: this rank's shard of the tokens, ``[…, T/W, …, K]``, cut along ``gather_dim``.
        weight: this rank's rows ``[N/W, K]``, or a sequence of such (q, k, v, or gate and up): x is
            gathered once and a tuple comes back. N may differ from rank to rank.
        bias: ``[N/W]`` or None; a sequence of the same length for several weights.
        gather_dim: the dimension of x that is cut; not the last.
        gathered_size: T. None means that all shards are equal.
        return_gathered: return ``gathered(x)`` after the products. It carries gradient, this
            rank's part of it, which is summed over ranks as the products' is: right for further
            column-parallel use of it.
        save_gathered: keep ``gathered(x)`` for the weight's gradient instead of gathering again in
            the backward pass: W times the memory of x, one exchange less.
        engine: "host" (overlapped, CPU), "triton" (overlapped, kernels: GPUs, or CPU tensors in
            Triton's interpreter), "plain" (collective, then GEMM), or "auto" for the overlapped one
            of x's device, where it can be had.

    Returns:
        y ``[…, T, …, N/W]``; a tuple of them for a sequence of weights; with ``return_gathered``
        followed by gathered(x) ``[…, T, …, K]``.
    """
    weights, biases, several = _listed(weight, bias)
    check_engine(engine)
    x, weights, biases = autocast(x, weights, biases)
    check_linear(x, weights, biases)
    address = address_of(group)
    dim = check_shard(x, gather_dim, gathered_size, address.rank, address.world_size)
    size = x.shape[dim] * address.world_size if gathered_size is None else gathered_size
    rows, rest = _to_rows(x, dim)
    keep = return_gathered or save_gathered
    present, biased = _present(biases)
    outputs = direct(library.all_gather_linear, rows, *weights, *present)(
        rows,
        weights,
        present,
        size,
        extent(rest),
        biased,
        keep,
        address.group,
        address.channel,
        engine,
    )
    results = [_from_rows(output, size, rest, dim) for output in outputs]
    gathered = results.pop() if keep else None
    ys = tuple(results) if several else results[0]
    if not return_gathered:
        return ys
    return (*ys, gathered) if several else (ys, gathered)


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any = None,
    scatter_dim: int = 0,
    wire_dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor:
    """Multiply and sum over ranks, each keeping its rows: ``y = shard(Σ x · weightᵀ) + bias``.

    Args:
        x: all tokens, this rank's features, ``[…, T, …, K/W]``. K may be cut unevenly.
        weight: this rank's columns ``[N, K/W]``.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        scatter_dim: the dimension along which y is cut, by ``torch.chunk``'s rule; not the last.
        wire_dtype: dtype in which partials cross: x's, or float32, which rounds only once.
        engine: as in :func:`all_gather_linear`.

    Returns:
        y ``[…, T/W, …, N]``.
    """
    check_engine(engine)
    x, (weight,), (bias,) = autocast(x, [weight], [bias])
    check_linear(x, [weight], [bias])
    check_wire_dtype(x, wire_dtype)
    dim = check_scattered(x, scatter_dim)
    address = address_of(group)
    rows, rest = _to_rows(x, dim)
    y = direct(library.linear_reduce_scatter, rows, weight, bias)(
        rows,
        weight,
        bias,
        wire_dtype,
        x.shape[dim],
        extent(rest),
        address.group,
        address.channel,
        engine,
    )
    start, stop = shard_bounds(x.shape[dim], address.world_size)[address.rank]
    return _from_rows(y, stop - start, rest, dim)


def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any = None,
    wire_dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor:
    """Multiply and sum over ranks: ``y = Σ x · weightᵀ + bias``, bitwise equal on every rank.

    y is replicated: its gradient is taken to be equal on all ranks and counts once, so that
    ``dx = dy · weight`` needs no communication.

    Args:
        x: all tokens, this rank's features, ``[…, K/W]``. K may be cut unevenly.
        weight: this rank's columns ``[N, K/W]``.
        bias: ``[N]``, the same on every rank; added once, after the sum.
        wire_dtype: dtype in which partials cross: x's, or float32, which rounds only once.
        engine: as in :func:`all_gather_linear`.

    Returns:
        y ``[…, N]``.
    """
    check_engine(engine)
    x, (weight,), (bias,) = autocast(x, [weight], [bias])
    check_linear(x, [weight], [bias])
    check_wire_dtype(x, wire_dtype)
    address = address_of(group)
    rows = _flat(x)
    y = direct(library.linear_all_reduce, rows, weight, bias)(
        [rows], [weight], bias, wire_dtype, address.group, address.channel, engine
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


def replicated_linear(
    x: Tensor, weight: Weights, bias: Biases = None, *, group: Any = None, engine: str = "auto"
) -> Any:
    """Multiply an x that all ranks have: ``y = x · weightᵀ + bias``.

    Only the backward pass communicates: dx is the sum over ranks of ``dy · weight``, overlapped.

    Args:
        x: all tokens and features, equal on every rank, ``[…, K]``.
        weight: this rank's rows ``[N/W, K]``, or a sequence of such; then a tuple comes back.
        bias: ``[N/W]`` or None; a sequence of the same length for several weights.
        engine: as in :func:`all_gather_linear`.

    Returns:
        y ``[…, N/W]``.
    """
    weights, biases, several = _listed(weight, bias)
    check_engine(engine)
    x, weights, biases = autocast(x, weights, biases)
    check_linear(x, weights, biases)
    address = address_of(group)
    rows = _flat(x)
    ys = library.replicated_linear(
        rows, weights, *_present(biases), address.group, address.channel, engine
    )
    shaped = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)
    return shaped if several else shaped[0]


def _listed(weight: Weights, bias: Biases) -> tuple[list[Tensor], list[Tensor | None], bool]:
    """Weights and biases as lists, and whether the caller gave several."""
    if not isinstance(weight, (list, tuple)):
        if isinstance(bias, (list, tuple)):
            raise ValueError("bias is a sequence, but weight is one tensor")
        return [weight], [bias], False  # type: ignore[list-item]  # checked by check_linear
    weights = list(weight)
    if bias is None:
        return weights, [None] * len(weights), True
    if not isinstance(bias, (list, tuple)) or len(bias) != len(weights):
        got = f"{len(bias)} of them" if isinstance(bias, (list, tuple)) else "one tensor"
        raise ValueError(
            f"bias must be None or a sequence of {len(weights)}, one per weight; got {got}"
        )
    return weights, list(bias), True


def _present(biases: list[Tensor | None]) -> tuple[list[Tensor], int]:
    """The biases that exist, and bit i for every ``weights[i]`` that has one."""
    biased = sum(1 << i for i, bias in enumerate(biases) if bias is not None)
    return [bias for bias in biases if bias is not None], biased


def extent(shape: torch.Size) -> int:
    """``shape.numel()``, which would make a constant of it when ``torch.export`` traces."""
    product = 1
    for size in shape:
        product = product * size
    return product


def _flat(x: Tensor) -> Tensor:
    return x.reshape(extent(x.shape[:-1]), x.shape[-1])


def _to_rows(x: Tensor, dim: int) -> tuple[Tensor, torch.Size]:
    """x as a matrix whose rows run first over ``dim``, and the other extents."""
    moved = x.movedim(dim, 0)
    return _flat(moved), moved.shape[1:-1]


def _from_rows(rows: Tensor, size: int, rest: torch.Size, dim: int) -> Tensor:
    return rows.reshape(size, *rest, rows.shape[-1]).movedim(0, dim).contiguous()
