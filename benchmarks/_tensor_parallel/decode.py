"""Few tokens: the op, the same in series, and the bare product on all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import fusedcomm as fc
from fusedcomm.benchmarks._tensor_parallel import inputs, prefill
from fusedcomm.benchmarks.harness import Options, Path, Prepared, Ranks, relative_bound


def linear_all_reduce(
    tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
) -> Prepared:
    """x [T, in] and weight [out, in] per rank; y [T, out], the sum over ranks."""
    world_size = ranks.world_size
    xs = [inputs.tokens(r, tokens, in_features, options.dtype) for r in range(world_size)]
    weights = [
        inputs.weight(world_size + r, out_features, in_features, options.dtype)
        for r in range(world_size)
    ]
    x, weight = xs[ranks.rank], weights[ranks.rank]
    products = [a.double() @ b.double().t() for a, b in zip(xs, weights, strict=True)]
    expected = torch.stack(products).sum(0)
    bound = relative_bound(options.dtype, in_features * world_size, roundings=1 + world_size)

    def serial() -> torch.Tensor:
        y = F.linear(x, weight)
        dist.all_reduce(y)
        return y

    return Prepared(
        {
            "GEMM alone": Path(lambda: F.linear(x, weight)),
            "overlapped": Path(
                lambda: fc.linear_all_reduce(x, weight, engine=options.engine), expected, bound
            ),
            "serial": Path(serial, expected, bound),
        }
    )


def _without_ceiling(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """The prefill case at few tokens; splitting the product is not what sets the time there."""

    def prepared(
        tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
    ) -> Prepared:
        paths = dict(prepare(tokens, in_features, out_features, options, ranks).paths)
        paths.pop("ceiling", None)
        return Prepared(paths)

    return prepared


PREPARE = {
    "all_gather_linear": _without_ceiling(prefill.all_gather_linear),
    "linear_reduce_scatter": _without_ceiling(prefill.linear_reduce_scatter),
    "linear_all_reduce": linear_all_reduce,
}
