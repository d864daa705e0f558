"""``FusedColwiseParallel`` and ``FusedRowwiseParallel``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.communicator import Communicator
from fusedcomm.integrations.dtensor.layouts import (
    Layouts,
    check_mesh,
    check_placement,
    shard_parameter,
)
from fusedcomm.integrations.dtensor.linear import ColumnLinear, RowLinear
from fusedcomm.ops.checks import check_engine


class _FusedLinear(ParallelStyle):
    """A style that exchanges the class of an ``nn.Linear``.

    ``placements``: parameter name -> how it is cut.
    """

    placements: Mapping[str, Placement]
    _fused: type[nn.Linear]
    _input: Placement
    _output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.input_layouts = check_placement("input_layouts", input_layouts or self._input)
        self.output_layouts = check_placement("output_layouts", output_layouts or self._output)
        self.use_local_output = use_local_output
        check_engine(engine)
        self.engine = engine

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise NotImplementedError(
                f"{type(self).__name__} is for torch.nn.Linear; the plan applies it to a "
                f"{type(module).__module__}.{type(module).__qualname__}"
                + (
                    ", which was parallelized before"
                    if isinstance(module, (ColumnLinear, RowLinear))
                    else ": use torch's own style, or name the Linears inside"
                )
            )
        check_mesh(device_mesh)
        for name, placement in self.placements.items():
            shard_parameter(module, name, device_mesh, placement, self.src_data_rank)
        return self.exchange(module, device_mesh)

    def exchange(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Give its class to an ``nn.Linear`` whose parameters are cut already."""
        comm = Communicator.of(mesh)
        module.__class__ = self._fused
        module.layouts = Layouts(  # type: ignore[assignment]
            comm, self.input_layouts, self.output_layouts, self.use_local_output, self.engine
        )
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class FusedColwiseParallel(_FusedLinear):
    """Cut a Linear by output features; an input cut by tokens is gathered beside the product.

    Args:
        input_layouts: how an input lies that is no DTensor: ``Replicate()`` (default), or
            ``Shard(dim)`` of the token dimension, of which then all ranks hold equal shards. A
            DTensor says itself how it lies, and may be cut unevenly. ``Shard(-1)`` is made
            ``Replicate()`` first, without overlap.
        output_layouts: ``Shard(-1)`` (default); others are redistributed to, without overlap.
        use_local_output: return a local tensor, not a DTensor.
        engine: as in :func:`fusedcomm.all_gather_linear`.

    Raises:
        ValueError: a layout is neither ``Shard`` nor ``Replicate``.
    """

    placements = {"weight": Shard(0), "bias": Shard(0)}
    _fused = ColumnLinear
    _input, _output = Replicate(), Shard(-1)


class FusedRowwiseParallel(_FusedLinear):
    """Cut a Linear by input features; the outputs are summed over ranks beside the product.

    Args:
        input_layouts: how an input lies that is no DTensor: ``Shard(-1)`` (default); others are
            redistributed to it, without overlap.
        output_layouts: ``Replicate()`` (default: an all-reduce), or ``Shard(dim)`` of a token
            dimension (a reduce-scatter; shards of any sizes).
        use_local_output: return a local tensor, not a DTensor.
        engine: as in :func:`fusedcomm.all_gather_linear`.

    Raises:
        ValueError: a layout is neither ``Shard`` nor ``Replicate``.
    """

    placements = {"weight": Shard(1), "bias": Replicate()}
    _fused = RowLinear
    _input, _output = Shard(-1), Replicate()
