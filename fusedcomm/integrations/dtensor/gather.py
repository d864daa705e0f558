"""``FusedGatherParallel``: several column-parallel Linears with one input, gathered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.integrations.dtensor.linear import ColumnLinear, column_products
from fusedcomm.integrations.dtensor.styles import FusedColwiseParallel


class Sharing:
    """The outputs of some Linears of a parent module, for the time of one forward of the parent.

    The first Linear that is called computes all of them; the others find theirs. What is kept goes
    when the parent's forward ends, by an error as well.
    """

    def __init__(self, members: dict[str, ColumnLinear]) -> None:
        self.members = members
        self.open = False
        self._input: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}

    def begin(self, parent: nn.Module, args: Any) -> None:
        """Before the parent's forward."""
        self.open = True
        self._input = None
        self._outputs = {}

    def end(self, parent: nn.Module, args: Any, output: Any) -> None:
        """After the parent's forward, or when it has failed."""
        left, failed = list(self._outputs), output is None
        self.open = False
        self._input = None
        self._outputs = {}
        if left and not failed:
            raise RuntimeError(
                f"{', '.join(left)} of {list(self.members)} had no call in the forward of "
                f"{type(parent).__name__}, though computed with the others: FusedGatherParallel is "
                "for Linears that are all used; name the other ones on their own"
            )

    def take(self, module: ColumnLinear, x: Tensor) -> Tensor:
        """The module's output."""
        (name,) = (key for key, member in self.members.items() if member is module)
        if self._input is None:
            ys = column_products(list(self.members.values()), x)
            self._input = x
            self._outputs = dict(zip(self.members, ys, strict=True))
        elif self._input is not x:
            raise RuntimeError(
                f"{name} was called with another tensor than the first of {list(self.members)}: "
                "FusedGatherParallel is for Linears with one and the same input"
            )
        if name not in self._outputs:
            raise RuntimeError(
                f"{name} was called twice in one forward of its parent: FusedGatherParallel is for "
                "one call each"
            )
        return self._outputs.pop(name)


class FusedGatherParallel(ParallelStyle):
    """Cut several Linears of a module by output features; their common input is gathered once.

    For q, k and v, or gate and up: modules whose forward calls each of these Linears once, with the
    same tensor. (Where a forward does otherwise, it raises.) A replicated input has one all-reduce
    of its gradient, instead of one for each.

    Args:
        names: of the Linears within the module, as in ``("q_proj", "k_proj", "v_proj")``.
        input_layouts, output_layouts, use_local_output, engine: as in
            :class:`FusedColwiseParallel`.

    Raises:
        ValueError: there are no names, or one is none of the module's.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        if isinstance(names, str) or not names or len(set(names)) != len(names):
            raise ValueError(f"names must be a sequence of different module names; got {names!r}")
        self.names = tuple(names)
        self._column = FusedColwiseParallel(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            engine=engine,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inside = dict(module.named_modules())
        for name in self.names:
            if name not in inside:
                raise ValueError(
                    f"FusedGatherParallel names {name!r}, but {type(module).__name__} has only "
                    f"{', '.join(filter(None, inside))}"
                )
        self._column.src_data_rank = self.src_data_rank
        members: dict[str, ColumnLinear] = {}
        for name in self.names:
            members[name] = self._column._apply(inside[name], device_mesh)  # type: ignore[assignment]
        sharing = Sharing(members)
        for member in members.values():
            member.sharing = sharing
        module.register_forward_pre_hook(sharing.begin)
        module.register_forward_hook(sharing.end, always_call=True)
        return module

    def __repr__(self) -> str:
        return f"FusedGatherParallel({self.names}, {self._column})"
