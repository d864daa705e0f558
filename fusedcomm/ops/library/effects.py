"""Custom ops in which ranks meet, as compilers must see them.

To a compiler a plain custom op is a pure function: it is removed where its result is not used, and
may change places with others. For an op in which every rank of a group takes part that is wrong.
Were one rank's graph to drop a result that only the others need, the ranks would part ways.

So these ops are ordered effects: every compiled graph keeps them, forward and backward, in the
order of the program, threaded on a token. Eager calls are not affected.

Regions under activation checkpointing are the exception. torch's partitioner copies their nodes
from the forward into the backward graph, and cannot copy a token with them. There the ops are kept,
but not threaded: they keep the places that the data they pass on demands. The copy is made from
the same graph on every rank, so all ranks recompute in the same order.
"""

from __future__ import annotations

from torch._library.effects import EffectHolder, EffectType
from torch._library.simple_registry import singleton
from torch.fx import traceback
from torch.library import CustomOpDef
from torch.utils.checkpoint import CheckpointPolicy

from fusedcomm.ops.library.inductor import keep_order

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class _OrderedEffect(EffectHolder):
    """Ordered, except while a region is traced that is to be recomputed."""

    def __init__(self, op: CustomOpDef) -> None:
        super().__init__(op._qualname)
        self._op = op

    @property  # type: ignore[misc]  # torch sets it through register(), which nobody calls here
    def effect(self) -> EffectType | None:
        keep_order(self._op)  # compilers look here before they lower the op
        if traceback.current_meta.get("recompute") in _RECOMPUTED:
            return None
        return EffectType.ORDERED


def communicates(op: CustomOpDef) -> CustomOpDef:
    """Mark a custom op as one in which the ranks of a group meet. Stands above ``custom_op``::

        @communicates
        @torch.library.custom_op("fusedcomm::name", mutates_args=())
        def name(…) -> Tensor: …

    Raises:
        ValueError: the op writes into an argument. torch keeps no order of such ops: return the
            result, and copy it where it is wanted outside of the op.
    """
    schema = op._opoverload._schema
    if schema.is_mutable:
        raise ValueError(
            f"{schema.name} writes into an argument, so torch would not keep it in order: return "
            "the result, and copy it outside"
        )
    singleton.find(op._qualname).effect = _OrderedEffect(op)
    return op
