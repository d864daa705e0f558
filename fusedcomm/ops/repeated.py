"""Calls of collectives that are made again: checked and planned once, remembered by their kind.

Checks and plans depend on nothing but the arguments other than tensors, and on the shapes, dtypes
and devices of those. A small exchange takes less time than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.ops.collective_checks import may_be_written
from fusedcomm.ops.dispatch import is_plain

#: Kinds that a communicator remembers, before it begins anew.
_MOST = 1024


class Repeated:
    """A call that was made before, on tensors of the same kind."""

    __slots__ = ("shape", "in_place", "_fill")

    def __init__(
        self, shape: Sequence[int], in_place: bool, fill: Callable[[Tensor, Tensor], None]
    ) -> None:
        self.shape, self.in_place, self._fill = shape, in_place, fill

    def __call__(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Fill ``out``, or a new tensor, from x."""
        if out is None:
            out = x.new_empty(self.shape)
        elif not out.is_contiguous():
            return out.copy_(self(x, None))
        self._fill(x.contiguous(), out)
        return out


def repeated(kind: Hashable, x: Tensor, out: Tensor | None, group: Any) -> Repeated | None:
    """What carries out a call that was made before; None if it must be checked and planned.

    Args:
        kind: the operation and its arguments other than tensors and the group.
    """
    if not isinstance(x, Tensor) or not is_plain(x, out):
        return None
    if out is not None and not may_be_written(out):
        return None
    comm = Communicator.opened(group)
    if comm is None:
        return None
    try:
        found: Repeated | None = comm.repeated.get(_key(kind, x, out))
    except TypeError:  # An argument that cannot be hashed cannot be right; the checks say why.
        return None
    if found is not None and out is not None and _touch(x, out):
        same = found.in_place and out.data_ptr() == x.data_ptr()
        if not (same and x.is_contiguous() and out.is_contiguous()):
            return None
    return found


def remember(
    comm: Communicator,
    kind: Hashable | None,
    x: Tensor,
    out: Tensor | None,
    shape: Sequence[int],
    fill: Callable[[Tensor, Tensor], None],
    *,
    in_place: bool = False,
) -> Tensor:
    """Carry out a call that was checked and planned, and remember how.

    Args:
        kind: as in ``repeated``; None for a call that is not to be remembered.
        shape: of the result.
        in_place: whether out may be x.
    """
    call = Repeated(shape, in_place, fill)
    if kind is not None:
        if len(comm.repeated) >= _MOST:
            comm.repeated.clear()
        comm.repeated[_key(kind, x, out)] = call
    return call(x, out)


def _key(kind: Hashable, x: Tensor, out: Tensor | None) -> Hashable:
    if out is None:
        return kind, x.shape, x.dtype, x.device, x.layout
    return kind, x.shape, x.dtype, x.device, x.layout, out.shape, out.dtype, out.device, out.layout


def _touch(x: Tensor, out: Tensor) -> bool:
    """Whether the tensors may share memory; to be looked at more closely if so."""
    if not (x.is_contiguous() and out.is_contiguous()):
        return True
    first, second = x.data_ptr(), out.data_ptr()
    return first < second + out.nbytes and second < first + x.nbytes
