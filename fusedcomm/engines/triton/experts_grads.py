"""Launches of the experts' gradients: of their weights and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.engines.experts import Experts
from fusedcomm.engines.triton.arguments import blocks
from fusedcomm.engines.triton.config import compiler_options, tiles_of
from fusedcomm.engines.triton.launch import Launch
from fusedcomm.engines.triton.places import Places
from fusedcomm.kernels import grouped_weight_grad as kernels

#: Rows and columns of a bias's gradient that one warp reads at once: 16 bytes a thread and row.
_ROWS, _COLUMNS = 8, 256


def experts_grads(
    launch: Launch,
    places: Places,
    dh: Tensor,
    a: Tensor,
    dz: Tensor,
    x_rows: Tensor,
    experts: Experts,
    needs: list[bool],
    wide: bool = False,
) -> list[Tensor | None]:
    """Queue the gradients of w13, w2, b13 and b2 where ``needs`` says so.

    The host reads neither counts nor places: zeros for an expert of no rows are stored as well.

    Args:
        dh: gradients of the experts' outputs ``[rows, hidden]``.
        a: the activation's outputs ``[rows, ffn]``.
        dz: gradients of the up-projection's outputs ``[rows, width]``.
        x_rows: the experts' inputs ``[rows, hidden]``.
        wide: float32 is asked for, whatever the weights' dtype is.

    Returns:
        contiguous tensors like the weights and biases; None for those not needed or not there.
    """
    like = [experts.w13, experts.w2, experts.b13, experts.b2]
    dtype = torch.float32 if wide else None
    grads = [
        torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        if needed and weight is not None
        else None
        for needed, weight in zip(needs, like, strict=True)
    ]
    dw13, dw2, db13, db2 = grads
    if dw13 is not None:
        _weights(launch, places, dz, x_rows, dw13, experts.style.transposed)
    if dw2 is not None:
        _weights(launch, places, dh, a, dw2, experts.style.transposed)
    if db13 is not None:
        _biases(launch, places, dz, db13)
    if db2 is not None:
        _biases(launch, places, dh, db2)
    return grads


def _weights(
    launch: Launch, places: Places, dy: Tensor, x: Tensor, grad: Tensor, transposed: bool
) -> None:
    """``grad[e, n, k] = Σ_r dy[r, n] · x[r, k]``, stored ``[e, k, n]`` if ``transposed``."""
    if not grad.numel():
        return
    grad_ENK = grad.transpose(1, 2) if transposed else grad  # noqa: N806
    experts, rows, columns = grad_ENK.shape
    tiles = tiles_of(launch.device, dy.dtype, rows, columns, dy.shape[0], "gradient")
    launch.run(
        kernels.grouped_weight_grad_kernel,
        experts * blocks(rows, tiles.rows) * blocks(columns, tiles.columns),
        "gemm",
        "gradient of the experts' weights",
        dy=dy,
        x=x,
        grad=grad,
        first_E=places.first_E,
        counts_E=places.counts_E,
        N=rows,
        K=columns,
        stride_ge=grad_ENK.stride(0),
        stride_gn=grad_ENK.stride(1),
        stride_gk=grad_ENK.stride(2),
        record=launch.record,
        BM=tiles.depth,
        BN=tiles.rows,
        BK=tiles.columns,
        GROUP=tiles.group,
        PRECISION="ieee",
        **compiler_options(tiles),
    )


def _biases(launch: Launch, places: Places, dy: Tensor, grad: Tensor) -> None:
    """``grad[e, n] = Σ_r dy[r, n]``."""
    if not grad.numel():
        return
    experts, columns = grad.shape
    launch.run(
        kernels.grouped_bias_grad_kernel,
        experts * blocks(columns, _COLUMNS),
        "reduce",
        "gradient of the experts' biases",
        dy=dy,
        grad=grad,
        first_E=places.first_E,
        counts_E=places.counts_E,
        N=columns,
        record=launch.record,
        BM=_ROWS,
        BN=_COLUMNS,
        num_warps=1,
    )
