"""Hugging Face transformers (5 and later): this library's products in tensor-parallel plans.

``register()`` adds styles to transformers' own, by which ``from_pretrained`` cuts a model as it
loads it::

    fc.integrations.transformers.register()
    config = AutoConfig.from_pretrained(path)
    plan = fc.integrations.transformers.plan(config, tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))

===================== ======================= ============================== ====================
style                 stands for              forward                        its backward pass
===================== ======================= ============================== ====================
fused_colwise         colwise                 ``replicated_linear``          all-reduce beside the
                                                                             product
…_gather_output       colwise_gather_output   the same, then all-gather      the same
fused_rowwise         rowwise                 ``linear_all_reduce``, beside  nothing to exchange
                                              the product
…_split_input         rowwise_split_input     own features, then the same    all-gather
fused_embedding       embedding_rowwise       ``vocab_parallel_embedding``   nothing to exchange
fused_replicated      replicated_with_grad_   the module itself              all-reduce of the
                      allreduce                                              parameters' gradients
fused_unchanged       no rule                 the module itself              nothing to exchange
===================== ======================= ============================== ====================

transformers keeps activations replicated between these. Parameters are DTensors as with its own
styles, so that loading, saving, optimizers and FSDP2 work on them as they do there. The form that
keeps activations on token shards is :func:`fusedcomm.parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers import AutoModelForCausalLM
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from fusedcomm.communicator import Communicator
from fusedcomm.integrations.dtensor.layouts import shard_parameter
from fusedcomm.integrations.dtensor.styles import FusedColwiseParallel, FusedRowwiseParallel
from fusedcomm.nn.sharded import local
from fusedcomm.ops.vocabulary import vocab_parallel_embedding
from fusedcomm.parallel.partial import SummedGradients


class FusedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose DTensor weight is cut by rows; see the table."""

    comm: Communicator

    def forward(self, input: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            input,
            local(self.weight),
            vocabulary=self.num_embeddings,
            padding_idx=self.padding_idx,
            group=self.comm,
        )


class _Exchanged(TensorParallelLayer):
    """A style that exchanges a module's class, so that copies and pickles go on working.

    ``placements``: parameter name -> how it is cut.
    """

    def __init__(
        self,
        plain: type,
        placements: Mapping[str, Placement],
        exchange: Callable[[Any, DeviceMesh], nn.Module],
    ) -> None:
        self.plain, self.placements, self.exchange = plain, placements, exchange

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        shard_parameter(module, param, mesh, self.placements[param], None)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if type(module) is not self.plain:
            raise ValueError(
                f"this style is for torch.nn.{self.plain.__name__}, but the plan names a "
                f"{type(module).__module__}.{type(module).__qualname__}; give that module one of "
                "transformers' own styles"
            )
        return self.exchange(module, mesh)


def _linear(style: FusedColwiseParallel | FusedRowwiseParallel) -> _Exchanged:
    return _Exchanged(nn.Linear, style.placements, style.exchange)


def _exchange_embedding(module: nn.Embedding, mesh: DeviceMesh) -> nn.Module:
    if module.max_norm or module.scale_grad_by_freq or module.sparse:
        raise ValueError("max_norm, scale_grad_by_freq and sparse need the whole embedding")
    module.__class__ = FusedEmbedding
    module.comm = Communicator.of(mesh)  # type: ignore[assignment]
    return module


class _Replicated(TensorParallelLayer):
    """For modules with whole parameters that see this rank's features only."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        SummedGradients(Communicator.of(mesh), type(module).__name__).install(module)
        return module


#: Name of a style -> the style, and the names of transformers' styles that it stands for.
_STYLES: dict[str, tuple[TensorParallelLayer, tuple[str, ...]]] = {
    "fused_colwise": (_linear(FusedColwiseParallel()), ("colwise",)),
    "fused_colwise_gather_output": (
        _linear(FusedColwiseParallel(output_layouts=Replicate())),
        ("colwise_gather_output", "colwise_rep"),
    ),
    "fused_rowwise": (_linear(FusedRowwiseParallel()), ("rowwise",)),
    "fused_rowwise_split_input": (
        _linear(FusedRowwiseParallel(input_layouts=Replicate())),
        ("rowwise_split_input", "rowwise_rep"),
    ),
    "fused_embedding": (
        _Exchanged(nn.Embedding, {"weight": Shard(0)}, _exchange_embedding),
        ("embedding_rowwise",),
    ),
    "fused_replicated": (_Replicated(), ("replicated_with_grad_allreduce",)),
    "fused_unchanged": (TensorParallelLayer(), ()),
}


def register() -> None:
    """Make this library's styles known to transformers; call it before ``from_pretrained``.

    With transformers 5.21 or later also ``ep_implementation="fusedcomm"``, for mixtures of experts;
    see ``fusedcomm.integrations.transformers_moe``.
    """
    styles: Any = ALL_PARALLEL_STYLES
    for name, (style, _) in _STYLES.items():
        styles.register(name, style)
    if find_spec("transformers.distributed.expert_parallel"):
        from fusedcomm.integrations.transformers_moe import register_expert_parallelism

        register_expert_parallelism()


def plan(config: Any, tp_size: int, *, auto_class: Any = AutoModelForCausalLM) -> dict[str, str]:
    """A model's own tensor-parallel plan with this library's styles in it, for ``tp_size`` ranks.

    Where the ranks cannot share out the attention heads evenly, each computes the whole attention:
    the projections around it stay cut, with their outputs gathered and inputs split.

    Args:
        config: of the model, as ``AutoConfig.from_pretrained`` gives it.
        auto_class: builds the model from it: ``AutoModelForCausalLM``, ``AutoModel``, ….

    Returns:
        For ``DistributedConfig(tp_plan=…)``. Rules for which there is no style of ours (experts,
        say) are left out: transformers merges the plan into the model's own.

    Raises:
        ValueError: transformers has no plan for this model. Write one: module names with ``*`` for
            layer numbers, and styles.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config)
    ours = {theirs: name for name, (_, stands_for) in _STYLES.items() for theirs in stands_for}
    found = {key: ours[style] for key, style in (model.tp_plan or {}).items() if style in ours}
    if not found:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; write one, as "
            "in {'encoder.layer.*.attention.self.query': 'fused_colwise', …}"
        )
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:  # Older releases have no rule for it.
        name = next(name for name, module in model.named_modules() if module is embedding)
        if name not in model.tp_plan:
            found[name] = "fused_embedding"
    text = config.get_text_config()
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None))
    if all(count is None or count % tp_size == 0 for count in heads):
        return found
    for key, style in found.items():
        if ".self_attn." in key or ".attention." in key:
            found[key] = _WHOLE_ATTENTION[style]
    return found


_WHOLE_ATTENTION = {
    "fused_colwise": "fused_colwise_gather_output",
    "fused_rowwise": "fused_rowwise_split_input",
    "fused_replicated": "fused_unchanged",
}
