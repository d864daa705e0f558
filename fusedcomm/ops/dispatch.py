"""How public functions reach the custom ops: a communicator by name, and past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator


class Address(NamedTuple):
    """A communicator as custom ops name it, and what shapes depend on."""

    group: str
    channel: str
    rank: int
    world_size: int


def communicator_of(group: Any) -> Communicator:
    """The communicator that a ``group`` argument means: of a group, or one that is given itself."""
    return group if isinstance(group, Communicator) else Communicator.of(group)


def address_of(group: Any) -> Address:
    """The address of the communicator that a ``group`` argument means, if it is usable."""
    comm = communicator_of(group)
    comm.require_usable()
    if comm.is_part:
        raise ValueError(
            "this communicator is that of one domain of a group, for engines: give the group's own"
        )
    return Address(comm.group.group_name, comm.channel, comm.rank, comm.world_size)


# What torch.compiler.assume_constant_result does, which would import all of dynamo here (2 s).
address_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(address: Address) -> Communicator:
    """The communicator at an address."""
    return Communicator.named(address.group, address.channel)


def direct(op: Any, *tensors: Tensor | None) -> Callable[..., Any]:
    """The function behind a custom op where dispatching it would change nothing, else the op.

    Dispatch costs as much as a whole exchange of a decoding step. It is needed for gradients, for
    tracing and other modes, and for subclasses of tensors.
    """
    return op._init_fn if is_plain(*tensors) else op


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing but the values of these tensors matters: no gradient, mode or subclass."""
    differentiated = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False
        if differentiated and tensor.requires_grad:
            return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None
