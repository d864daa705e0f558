"""Launches of the experts' products, which await their rows and send back what is finished."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedcomm.engines.experts import Experts
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.arguments import blocks, meta
from fusedcomm.engines.triton.config import Tiles, tiles_of
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.engines.triton.places import Places
from fusedcomm.kernels import grouped_linear as kernels


def up_product(
    launch: Launch,
    places: Places,
    routed: Routed,
    experts: Experts,
    a: Tensor,
    z: Tensor | None,
) -> None:
    """Queue ``z = rows · w13ᵀ + b13`` where z is kept, and ``a = activation(z)``."""
    w13 = experts.w13.transpose(1, 2) if experts.style.transposed else experts.w13
    gated = experts.width != experts.ffn
    interleaved = experts.style.layout == "interleaved"
    _launch_up(
        launch, places, routed, w13, experts.b13, a, z,
        ACTIVATION=experts.style.activation,
        GATED=gated,
        PAIRED=gated and interleaved,
        up_shift=experts.ffn,
    )  # fmt: skip


def grouped_product(
    launch: Launch, places: Places, routed: Routed, weight: Tensor, out: Tensor
) -> None:
    """Queue ``out = rows · weightᵀ``; weight ``[experts, N, K]``."""
    _launch_up(
        launch, places, routed, weight, None, out, None,
        ACTIVATION="none", GATED=False, PAIRED=False, up_shift=0,
    )  # fmt: skip


def down_product(
    launch: Launch,
    places: Places,
    routed: Routed,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> None:
    """Queue ``x · weightᵀ + bias``, back to the sources; weight ``[experts, N, K]``."""
    tiles = _tiles(launch, places, routed, weight)
    launch.run(
        kernels.down_kernel,
        launch.programs,
        "gemm",
        "experts, down",
        x=x,
        weight=weight,
        bias=x if bias is None else bias.contiguous(),
        back_WE=places.back_WE,
        tiles_W=places.row_blocks(tiles.rows),
        counters=launch.counters(launch.world_size),
        closing=places.closing,
        N=weight.shape[1],
        K=weight.shape[2],
        stride_we=weight.stride(0),
        stride_wn=weight.stride(1),
        stride_wk=weight.stride(2),
        record=launch.record,
        HAS_BIAS=bias is not None,
        **meta(tiles, weight.shape[2]),
        **places.arguments(),
        **launch.ranks,
        **launch.flags,
    )


def _launch_up(
    launch: Launch,
    places: Places,
    routed: Routed,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    z: Tensor | None,
    **how: Any,
) -> None:
    tiles = _tiles(launch, places, routed, weight, how["GATED"], how["PAIRED"])
    launch.run(
        kernels.up_kernel,
        launch.programs,
        "gemm",
        "experts, up",
        weight=weight,
        bias=a if bias is None else bias.contiguous(),
        z=a if z is None else z,
        a=a,
        N=a.shape[1],
        K=weight.shape[2],
        stride_we=weight.stride(0),
        stride_wn=weight.stride(1),
        stride_wk=weight.stride(2),
        KEEP=z is not None,
        HAS_BIAS=bias is not None,
        **how,
        **meta(tiles, weight.shape[2]),
        **places.arguments(),
        **launch.ranks,
        **launch.flags,
        **launch.waits,
    )


def _tiles(
    launch: Launch,
    places: Places,
    routed: Routed,
    weight: Tensor,
    gated: bool = False,
    paired: bool = False,
) -> Tiles:
    """Tiles for products with ``weight [experts, N, K]``, of the rows that an expert usually has.

    Args:
        gated, paired: as ``up_kernel`` has them.
    """
    rows = blocks(routed.most_received, max(1, places.experts))
    product = "large" if weight.stride(2) == 1 else "transposed"
    if gated:
        product = "gated transposed" if product == "transposed" and not paired else "epilogue"
    _, columns, depth = weight.shape
    return tiles_of(launch.device, weight.dtype, rows, columns, depth, product)
