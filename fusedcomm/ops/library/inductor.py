"""The order of calls within Inductor's own scheduler.

Down to Inductor, an ordered effect is a token that each call hands to the next. Inductor drops the
tokens and notes the order as dependencies; but up to torch 2.13 it notes them under the name of
the call's buffer and looks for them under the name of its operation, so they are lost, and its
scheduler reorders calls by what saves memory. That may differ from rank to rank, as shards do.
Our lowering notes the order where it is found.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.library import CustomOpDef

_ordered: set[torch._ops.OpOverload] = set()


def keep_order(op: CustomOpDef) -> None:
    """Have Inductor, if it is loaded, run ``op`` after the marked ops before it in a graph."""
    lowering = sys.modules.get("torch._inductor.lowering")
    overload = op._opoverload
    # Loading Inductor takes seconds, which only those who compile should spend.
    if overload in _ordered or not hasattr(lowering, "register_lowering"):
        return
    _ordered.add(overload)
    call = lowering.fallback_handler(overload)  # type: ignore[union-attr]

    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        known = len(graph.operations)
        result = call(*args, **kwargs)
        (kernel,) = (new for new in graph.operations[known:] if isinstance(new, FallbackKernel))
        previous = getattr(graph, "_fusedcomm_previous", None)
        if previous is not None:
            # Of this kind because it does not keep the previous result alive.
            graph.additional_buffer_deps[kernel.get_operation_name()].add(previous)
        graph._fusedcomm_previous = kernel.get_name()
        return result

    lowering.register_lowering(overload, type_promotion_kind=None)(lower)  # type: ignore[union-attr]
