"""Forward and backward of one layer: y, dx and dw, with dy given.

The serial paths communicate what the library does: the gathered input is not kept from forward to
backward but gathered again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

import fusedcomm as fc
from fusedcomm.benchmarks._tensor_parallel import inputs
from fusedcomm.benchmarks.harness import Options, Path, Prepared, Ranks, relative_bound

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def all_gather_linear(
    tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
) -> Prepared:
    """x [T/W, in], weight [out, in], dy [T, out] per rank.

    y = gather(x) · wᵀ; dx = this rank's rows of the sum of dy · w; dw = dyᵀ · gather(x).
    """
    world_size = ranks.world_size
    full = inputs.tokens(0, tokens, in_features, options.dtype)
    weights = [
        inputs.weight(1 + r, out_features, in_features, options.dtype) for r in range(world_size)
    ]
    gradients = [
        inputs.tokens(1 + world_size + r, tokens, out_features, options.dtype)
        for r in range(world_size)
    ]
    weight, dy = weights[ranks.rank], gradients[ranks.rank]
    own = inputs.rows_of(ranks.rank, tokens, world_size)
    x = full[own].clone()
    shard_products = [g[own].double() @ w.double() for g, w in zip(gradients, weights, strict=True)]
    expected = (
        full.double() @ weight.double().t(),
        torch.stack(shard_products).sum(0),
        dy.double().t() @ full.double(),
    )

    def serial() -> Results:
        y = F.linear(inputs.serial_all_gather(x, tokens), weight)
        dx = inputs.serial_reduce_scatter(dy @ weight)
        return y, dx, dy.t() @ inputs.serial_all_gather(x, tokens)

    return _prepared(
        alone=lambda: (F.linear(full, weight), dy @ weight, dy.t() @ full),
        overlapped=_forward_backward(
            lambda x, weight: fc.all_gather_linear(
                x, weight, gathered_size=tokens, engine=options.engine
            ),
            x,
            weight,
            dy,
        ),
        serial=serial,
        expected=expected,
        bound=relative_bound(
            options.dtype, max(tokens, in_features, out_features), roundings=1 + world_size
        ),
    )


def linear_reduce_scatter(
    tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
) -> Prepared:
    """x [T, in], weight [out, in], dy [T/W, out] per rank.

    y = this rank's rows of the sum of x · wᵀ; dx = gather(dy) · w; dw = gather(dy)ᵀ · x.
    """
    world_size = ranks.world_size
    xs = [inputs.tokens(r, tokens, in_features, options.dtype) for r in range(world_size)]
    weights = [
        inputs.weight(world_size + r, out_features, in_features, options.dtype)
        for r in range(world_size)
    ]
    full_dy = inputs.tokens(2 * world_size, tokens, out_features, options.dtype)
    x, weight = xs[ranks.rank], weights[ranks.rank]
    own = inputs.rows_of(ranks.rank, tokens, world_size)
    dy = full_dy[own].clone()
    products = [a[own].double() @ b.double().t() for a, b in zip(xs, weights, strict=True)]
    expected = (
        torch.stack(products).sum(0),
        full_dy.double() @ weight.double(),
        full_dy.double().t() @ x.double(),
    )

    def serial() -> Results:
        y = inputs.serial_reduce_scatter(F.linear(x, weight))
        gathered = inputs.serial_all_gather(dy, tokens)
        return y, gathered @ weight, gathered.t() @ x

    return _prepared(
        alone=lambda: (F.linear(x, weight), full_dy @ weight, full_dy.t() @ x),
        overlapped=_forward_backward(
            lambda x, weight: fc.linear_reduce_scatter(x, weight, engine=options.engine),
            x,
            weight,
            dy,
        ),
        serial=serial,
        expected=expected,
        bound=relative_bound(
            options.dtype, max(tokens, in_features * world_size, out_features), 1 + world_size
        ),
    )


def _forward_backward(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
) -> Callable[[], Results]:
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()

    def run() -> Results:
        y = op(x, weight)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return y.detach(), dx, dw

    return run


def _prepared(
    *,
    alone: Callable[[], Results],
    overlapped: Callable[[], Results],
    serial: Callable[[], Results],
    expected: Results,
    bound: float,
) -> Prepared:
    return Prepared(
        {
            "GEMM alone": Path(alone),
            "overlapped": Path(overlapped, expected, bound),
            "serial": Path(serial, expected, bound),
        }
    )


PREPARE = {
    "all_gather_linear": all_gather_linear,
    "linear_reduce_scatter": linear_reduce_scatter,
}
