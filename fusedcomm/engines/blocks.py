"""How many rows are worked on at once by torch operations that widen them."""

from __future__ import annotations

import torch

#: On a GPU every operation is a launch, and memory is not cached in blocks of this size.
_GPU_FACTOR = 64


def rows_at_once(device: torch.device, width: int, elements: int) -> int:
    """Rows of ``width`` elements, about ``elements`` in all on a CPU, so that its caches hold them.

    >>> rows_at_once(torch.device("cpu"), 512, 1 << 18)
    512
    >>> rows_at_once(torch.device("cuda"), 512, 1 << 18)
    32768
    """
    if device.type != "cpu":
        elements *= _GPU_FACTOR
    return max(1, elements // max(1, width))
