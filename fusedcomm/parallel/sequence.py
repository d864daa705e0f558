"""Decoders made tensor-parallel and sequence-sharded in one call."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusedcomm.nn.sharded import ShardedModule
from fusedcomm.nn.vocabulary import VocabParallelEmbedding
from fusedcomm.ops.dispatch import communicator_of
from fusedcomm.parallel import decoder
from fusedcomm.parallel.blocks import (
    CausalLoss,
    Head,
    Region,
    SharedColumn,
    SharedGather,
    TokenRow,
)
from fusedcomm.parallel.decoder import Decoder
from fusedcomm.parallel.partial import SummedGradients
from fusedcomm.schedule import shard_bounds

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, group: Any = None, *, logits: str = "gathered") -> Model:
    """Cut a decoder over the ranks of a group, with token shards between its blocks; in place.

    For models shaped like Llama (``fusedcomm.parallel.decoder`` has the shape): Hugging Face's
    Llama, Qwen2, Qwen3, Mistral, SmolLM2 …, and hand-built ones whose parts have the same names.
    Ranks divide attention heads, feed-forward features and vocabulary; norms and residuals run on
    token shards (``torch.chunk``'s, any number of tokens). q, k and v share one gather of their
    input, as gate and up do; o and down scatter their sums; all overlap. After ``backward()`` every
    parameter's gradient is complete on every rank, norms' included.

    The model is called as before, with the same tokens on every rank, and returns the same on every
    rank. With ``labels`` (Hugging Face) its loss is :func:`vocab_parallel_cross_entropy`, and
    ``.logits`` are this rank's part of the vocabulary. Hidden states that it returns are token
    shards, except for the last one where no head follows.

    Args:
        model: materialised, the same on every rank (or on the meta device, to be loaded with
            :func:`fusedcomm.nn.load_full_state_dict`). Names of parameters stay.
        group: the ranks. With a 1-D ``DeviceMesh`` parameters become DTensors on it, as
            optimizers, FSDP2, gradient clipping and distributed checkpoints expect: call this
            before ``fully_shard``. With a ``ProcessGroup``, a ``Communicator`` or None they are
            plain tensors, this rank's shards.
        logits: what the head returns where no labels are given: "gathered", the whole vocabulary
            on every rank; "local", this rank's part, for
            :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``model``.

    Raises:
        ValueError: the model has another shape, or its heads cannot be divided; the message names
            what was expected.
    """
    if logits not in ("gathered", "local"):
        raise ValueError(f"logits must be 'gathered' or 'local'; got {logits!r}")
    found = decoder.find(model)
    comm = communicator_of(group)
    mesh = group if isinstance(group, DeviceMesh) else None
    _check_heads(found, comm.world_size, mesh is not None)
    region = Region(comm, found.has_head, logits == "local")
    _exchange_blocks(found, region)
    _exchange_vocabulary(found, region)
    for name, norm in (*found.norms(), *found.head_norms()):
        SummedGradients(comm, name).install(norm)
    found.layers[0].register_forward_pre_hook(region.split, with_kwargs=True)
    found.trunk.norm.register_forward_hook(region.join)
    if found.has_head:
        model.register_forward_pre_hook(region.begin, with_kwargs=True)
        model.register_forward_hook(region.end, always_call=True)
    if mesh is not None:
        _distribute(model, mesh)
    return model


def _check_heads(found: Decoder, world_size: int, as_dtensors: bool) -> None:
    kv_heads = found.kv_heads
    shards = shard_bounds(kv_heads, world_size)
    if any(start == stop for start, stop in shards):
        raise ValueError(
            f"{kv_heads} key-value heads leave some of {world_size} ranks without any "
            f"(torch.chunk's rule): use a group of at most {kv_heads} ranks that each get one"
        )
    if as_dtensors and kv_heads % world_size:
        raise ValueError(
            f"{kv_heads} key-value heads cannot be divided evenly over {world_size} ranks, and "
            "DTensors of uneven heads would be cut through a head: give a ProcessGroup (or None) "
            "instead of a DeviceMesh, and parameters are plain tensors"
        )


def _exchange_blocks(found: Decoder, region: Region) -> None:
    size = found.head_dim
    queries = size * (found.heads // found.kv_heads)  # those of one key-value head stay together
    units = {"q_proj": queries, "k_proj": size, "v_proj": size}
    for layer in found.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for block, names, row in (
            (attention, decoder.ATTENTION, "o_proj"),
            (mlp, decoder.MLP, "down_proj"),
        ):
            for name in names:
                linear, unit = getattr(block, name), units.get(name, 1)
                setattr(block, name, SharedColumn.from_linear(linear, group=region.comm, unit=unit))
            unit = queries if row == "o_proj" else 1
            setattr(
                block,
                row,
                TokenRow.from_linear(getattr(block, row), group=region.comm, unit=unit),
            )
            SharedGather(region, names).install(block)


def _exchange_vocabulary(found: Decoder, region: Region) -> None:
    model: Any = found.model
    embedding = VocabParallelEmbedding.from_embedding(found.trunk.embed_tokens, group=region.comm)
    found.trunk.embed_tokens = embedding
    if not found.has_head:
        return
    head: Any = Head.from_linear(model.lm_head, group=region.comm)
    head.region = region
    if found.tied:
        head.weight = embedding.weight
    model.lm_head = head
    if hasattr(type(model), "loss_function"):  # Hugging Face's
        model.loss_function = CausalLoss(region.comm, head.out_features)


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter as a DTensor: cut, or the same on every rank."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    made: dict[int, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                shape = torch.Size(parameter.shape)
                placement: Any = Replicate()
                if isinstance(module, ShardedModule) and name in module.shard_dims:
                    placement = Shard(module.shard_dims[name])
                    shape = torch.Size(module.full_shape(name))
                part: Tensor = parameter.detach()
                cut = DTensor.from_local(
                    part,
                    mesh,
                    [placement],
                    run_check=False,
                    shape=shape,
                    stride=torch.empty(shape, device="meta").stride(),
                )
                made[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
