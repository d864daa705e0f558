"""Whether kernels can work in each other's GPU memory, in every domain of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusedcomm.symmetric.devices import Domain

if TYPE_CHECKING:
    from fusedcomm.communicator.communicator import Communicator

_QUESTION = "what its GPUs allow: "
_COPIES = "copies; "


def reach(comm: Communicator, device: torch.device) -> Domain:
    """What follows from all GPUs of the group, equally on every rank; collective the first time.

    Over several domains, which find out for themselves: the first obstacle that one has, and
    whether copies can be had in all.

    Raises:
        ValueError: this communicator has had tensors on another GPU.
        MismatchError: another domain is not about to ask the same.
    """
    own = comm.gpu(device).domain
    inside, between = comm.inside, comm.between
    if inside is None or between is None:
        return own
    if comm.reached is None:
        name = "first call with tensors on GPUs of several domains"
        with comm.collective(name), inside.collective(name):
            said = f"{_COPIES * own.copies}{own.obstacle or ''}"
            begun, texts = between.describe(_QUESTION + said)
            inside.torch.run(name, lambda: begun)
            answers = between.answers(texts, _QUESTION)
        obstacles = [
            f"in domain {domain}, {text}"
            for domain, answer in enumerate(answers)
            if (text := answer.removeprefix(_COPIES))
        ]
        copies = all(answer.startswith(_COPIES) for answer in answers)
        comm.reached = Domain(obstacles[0] if obstacles else None, copies and not obstacles)
    return comm.reached
