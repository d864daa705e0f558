"""Launches of the experts' activations, where no product makes them on its way."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fusedcomm.engines.experts import GATED, Style
from fusedcomm.engines.triton.arguments import blocks
from fusedcomm.engines.triton.config import activation_tiles, compiler_options
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.engines.triton.places import Places
from fusedcomm.kernels import activations as kernels


def activate(launch: Launch, places: Places, z: Tensor, style: Style, a: Tensor) -> None:
    """Queue ``a = activation(z)``; z ``[rows, width]``, a ``[rows, ffn]``.

    Rows of no expert are neither read nor written.
    """
    launch.run(
        kernels.activation_kernel,
        _programs(launch, places, z),
        "reduce",
        "activation",
        z=z,
        a=a,
        **_common(launch, places, style, a),
    )


def activate_backward(
    launch: Launch, places: Places, z: Tensor, da: Tensor, style: Style, a: Tensor, dz: Tensor
) -> None:
    """Queue ``a = activation(z)`` again, and ``dz``, the gradient of z, from that of a.

    Rows of no expert are neither read nor written.

    Args:
        z, dz: ``[rows, width]``.
        da, a: ``[rows, ffn]``. ``a`` may be the same tensor as ``da``.
    """
    launch.run(
        kernels.activation_grad_kernel,
        _programs(launch, places, z),
        "reduce",
        "gradient of the activation",
        z=z,
        da=da,
        a=a,
        dz=dz,
        **_common(launch, places, style, a),
    )


def _programs(launch: Launch, places: Places, z: Tensor) -> int:
    """As many as there may be blocks of rows, each expert's last one perhaps not full."""
    return blocks(z.shape[0], activation_tiles(launch.device).rows) + places.experts


def _common(launch: Launch, places: Places, style: Style, a: Tensor) -> dict[str, Any]:
    gated = style.activation in GATED
    tiles = activation_tiles(launch.device)
    return {
        "first_E": places.first_E,
        "counts_E": places.counts_E,
        "experts": places.experts,
        "N": a.shape[1],
        "record": launch.record,
        "ACTIVATION": style.activation,
        "GATED": gated,
        "PAIRED": gated and style.layout == "interleaved",
        "BM": tiles.rows,
        "BN": tiles.columns,
        "EXPERTS": triton.next_power_of_2(max(1, places.experts)),
        **compiler_options(tiles),
    }
