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

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from transformers import AutoModelForCausalLM
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from fusedcomm.communicator import Communicator
from fusedcomm.nn.sharded import is_dtensor, local
from fusedcomm.ops.layouts import gather_features, split_features
from fusedcomm.ops.tensor_parallel import linear_all_reduce, replicated_linear
from fusedcomm.ops.vocabulary import vocab_parallel_embedding
from fusedcomm.parallel.partial import SummedGradients


class FusedColumnLinear(nn.Linear):
    """An ``nn.Linear`` whose DTensor parameters are cut by output features; see the table."""

    comm: Communicator
    gather_output: bool

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        y = replicated_linear(_plain(input), local(self.weight), bias, group=self.comm)
        if not self.gather_output:
            return y
        return gather_features(y, group=self.comm, gathered_size=self.out_features)


class FusedRowLinear(nn.Linear):
    """An ``nn.Linear`` whose DTensor weight is cut by input features; see the table."""

    comm: Communicator
    split_input: bool

    def forward(self, input: Tensor) -> Tensor:
        x = split_features(_plain(input), group=self.comm) if self.split_input else local(input)
        bias = None if self.bias is None else local(self.bias)
        return linear_all_reduce(x, local(self.weight), bias, group=self.comm)


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

    ``placements``: parameter name -> how it is cut. ``attributes`` are given to the module.
    """

    def __init__(
        self, plain: type, fused: type, placements: Mapping[str, Placement], **attributes: Any
    ) -> None:
        self.plain, self.fused = plain, fused
        self.placements = placements
        self.attributes = attributes

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        cut = distribute_tensor(whole, mesh, [self.placements[param]], src_data_rank=None)
        module._parameters[param] = nn.Parameter(cut, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if type(module) is not self.plain:
            raise ValueError(
                f"this style is for torch.nn.{self.plain.__name__}, but the plan names a "
                f"{type(module).__module__}.{type(module).__qualname__}; give that module one of "
                "transformers' own styles"
            )
        if isinstance(module, nn.Embedding) and (
            module.max_norm or module.scale_grad_by_freq or module.sparse
        ):
            raise ValueError("max_norm, scale_grad_by_freq and sparse need the whole embedding")
        module.__class__ = self.fused
        for name, value in {"comm": Communicator.of(mesh), **self.attributes}.items():
            setattr(module, name, value)
        return module


class _Replicated(TensorParallelLayer):
    """For modules with whole parameters that see this rank's features only."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        SummedGradients(Communicator.of(mesh), type(module).__name__).install(module)
        return module


_COLUMN = (nn.Linear, FusedColumnLinear, {"weight": Shard(0), "bias": Shard(0)})
_ROW = (nn.Linear, FusedRowLinear, {"weight": Shard(1), "bias": Replicate()})

#: Name of a style -> the style, and the names of transformers' styles that it stands for.
_STYLES: dict[str, tuple[TensorParallelLayer, tuple[str, ...]]] = {
    "fused_colwise": (_Exchanged(*_COLUMN, gather_output=False), ("colwise",)),
    "fused_colwise_gather_output": (
        _Exchanged(*_COLUMN, gather_output=True),
        ("colwise_gather_output", "colwise_rep"),
    ),
    "fused_rowwise": (_Exchanged(*_ROW, split_input=False), ("rowwise",)),
    "fused_rowwise_split_input": (
        _Exchanged(*_ROW, split_input=True),
        ("rowwise_split_input", "rowwise_rep"),
    ),
    "fused_embedding": (
        _Exchanged(nn.Embedding, FusedEmbedding, {"weight": Shard(0)}),
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


def _plain(x: Any) -> Tensor:
    """A replicated input as a plain tensor, whose gradient is complete on every rank."""
    if not is_dtensor(x):
        return x
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
