"""Matrix products of the CPU engines: ``x · weightᵀ`` into memory that exists already."""

from __future__ import annotations

import torch


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``out = x · weightᵀ + bias``; accumulated in float32, rounded once."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def sum_of_linears(
    out: torch.Tensor,
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    init: torch.Tensor | None = None,
) -> None:
    """``out = init + Σ xs[i] · weights[i]ᵀ``.

    Where ``out`` is of another dtype than ``xs`` (float32 on the wire), the factors are widened
    first, so that no product is rounded to the narrow dtype.
    """
    if init is not None:
        out.copy_(init)
    add_linears(out, xs, weights, beta=0.0 if init is None else 1.0)


def add_linears(
    out: torch.Tensor, xs: list[torch.Tensor], weights: list[torch.Tensor], beta: float = 1.0
) -> None:
    """``out = beta · out + Σ xs[i] · weights[i]ᵀ``; ``beta=0`` ignores what ``out`` held."""
    for x, weight in zip(xs, weights, strict=True):
        if x.dtype != out.dtype:
            x, weight = x.to(out.dtype), weight.to(out.dtype)
        if beta == 0.0:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(out, x, weight.t(), out=out)
        beta = 1.0
