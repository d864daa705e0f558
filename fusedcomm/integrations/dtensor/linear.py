"""``nn.Linear`` with DTensor parameters, whose exchange runs beside its product.

============ ======== ======== ================= =======================================
class        weight   bias     input (native)    output (native)
============ ======== ======== ================= =======================================
ColumnLinear Shard(0) Shard(0) Replicate or      Shard(-1)
                               Shard(token dim)
RowLinear    Shard(1) Replic.  Shard(-1)         Replicate or Shard(token dim)
============ ======== ======== ================= =======================================

Other layouts of input and output are exchanged before the product, or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fusedcomm.integrations.dtensor.layouts import (
    Layouts,
    enter_by_features,
    enter_by_tokens,
    leave,
    part_of,
)
from fusedcomm.ops.tensor_parallel import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)

if TYPE_CHECKING:
    from fusedcomm.integrations.dtensor.gather import Sharing


class ColumnLinear(nn.Linear):
    """Cut by output features."""

    layouts: Layouts
    #: With the Linears whose input is gathered together with this one's.
    sharing: Sharing | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.sharing is not None and self.sharing.open:
            return self.sharing.take(self, input)
        return column_products([self], input)[0]


class RowLinear(nn.Linear):
    """Cut by input features."""

    layouts: Layouts

    def forward(self, input: Tensor) -> Tensor:
        layouts = self.layouts
        weight, bias = part_of(self, "weight", Shard(1)), part_of(self, "bias", Replicate())
        assert weight is not None
        x = enter_by_features(input, layouts, self.weight.device_mesh)  # type: ignore[attr-defined]
        shape = [*x.shape[:-1], self.out_features]
        wanted = layouts.output
        if isinstance(wanted, Shard) and wanted.dim not in (-1, x.dim() - 1):
            dim = wanted.dim % x.dim()
            y = linear_reduce_scatter(
                x, weight, bias, group=layouts.comm, scatter_dim=dim, engine=layouts.engine
            )
            return leave(y, Shard(dim), shape, self)
        y = linear_all_reduce(x, weight, bias, group=layouts.comm, engine=layouts.engine)
        return leave(y, Replicate(), shape, self)


def column_products(modules: Sequence[ColumnLinear], x: Tensor) -> list[Tensor]:
    """The outputs of several modules with one input, which is gathered once."""
    layouts = modules[0].layouts
    weights = [part_of(module, "weight", Shard(0)) for module in modules]
    biases = [part_of(module, "bias", Shard(0)) for module in modules]
    mesh = modules[0].weight.device_mesh  # type: ignore[attr-defined]
    local, dim, size = enter_by_tokens(x, layouts, mesh)
    comm, engine = layouts.comm, layouts.engine
    if dim is None:
        ys = replicated_linear(local, weights, biases, group=comm, engine=engine)  # type: ignore[arg-type]
    else:
        ys = all_gather_linear(
            local,
            weights,  # type: ignore[arg-type]
            biases,
            group=comm,
            gather_dim=dim,
            gathered_size=size,
            engine=engine,
        )
    cut = Shard(local.dim() - 1)
    return [
        leave(y, cut, [*y.shape[:-1], module.out_features], module)
        for y, module in zip(ys, modules, strict=True)
    ]
