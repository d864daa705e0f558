"""``torch.autocast``, which treats these operations as it treats ``F.linear``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def autocast(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> tuple[Any, list, list]:
    """The arguments of a linear operation in autocast's dtype, where it is enabled.

    The casts carry gradient, so weights keep their own dtype and get gradients in it. What autocast
    leaves alone stays: float64, and what is no tensor of floats (the checks say so afterwards).
    """
    # Asked about the meta device, torch raises.
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, list(weights), list(biases)
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and value.dtype != torch.float64 else value

    return cast(x), [cast(weight) for weight in weights], [cast(bias) for bias in biases]
