"""Parameters that every rank has, of modules that see a part: their gradients are summed.

A norm between the parallel layers of a sequence-sharded model sees this rank's tokens; a norm of
queries and keys sees this rank's heads. For the time of such a module's forward its parameters
stand in as the results of ``sum_gradient``: the sum over ranks is part of the graph, so that it is
right under gradient accumulation and checkpointing, and when parameters are exchanged after the
hooks were installed, as loaders and FSDP do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedcomm.communicator import Communicator
from fusedcomm.nn.sharded import local
from fusedcomm.ops.layouts import sum_gradient


class SummedGradients:
    """The two hooks of one module.

    Args:
        comm: the ranks over which the module's input is cut.
        name: the module's, for messages.
        summed: False where the module sees all there is, and only DTensor parameters have to stand
            in as local ones.
    """

    def __init__(self, comm: Communicator, name: str, *, summed: bool = True) -> None:
        self.comm = comm
        self.name = name
        self.summed = summed
        self._held: dict[str, Tensor | None] = {}

    def install(self, module: nn.Module) -> None:
        """From now on, the gradients of the module's own parameters are summed over the ranks."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: Any) -> None:
        """Exchange the parameters."""
        summed = self.summed and torch.is_grad_enabled() and self.comm.world_size > 1
        self._held = dict(module._parameters)
        for name, parameter in self._held.items():
            if parameter is None:
                continue
            part = local(parameter)
            if summed and part.requires_grad:
                part = sum_gradient(part, group=self.comm, what=f"{self.name}.{name}")
            module._parameters[name] = part  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back."""
        module._parameters.update(self._held)  # type: ignore[arg-type]
        self._held = {}
