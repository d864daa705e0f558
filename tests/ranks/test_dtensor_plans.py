"""Shared gathers make the exchanges they should and keep nothing; wrong plans are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.checking import calls
from tests.ranks.dtensor_models import (
    MLP,
    Decoder,
    batch,
    cut_decoder,
    loss_of,
    mesh_of,
)

# One gather for several


def issued(model: nn.Module, tokens: Tensor) -> tuple[list[str], list[str]]:
    """The operations of a forward and of a backward pass, in order."""
    with calls(fc.Communicator.of(model.head.weight.device_mesh)) as texts:
        loss = loss_of(model, tokens)
        forward = len(texts)
        loss.backward()
    names = [text.split()[0] for text in texts]
    return names[:forward], names[forward:]


def check_exchanges(rank: int) -> None:
    """Every exchange there is, per layer of the model."""
    mesh, tokens, layers = mesh_of(), batch(8), 3

    def counts(cut: bool, shared: bool) -> tuple[dict[str, int], dict[str, int]]:
        found = issued(cut_decoder(mesh, cut, layers, shared=shared), tokens)
        return tuple({name: side.count(name) for name in side} for side in found)  # type: ignore

    gathers = {True: 2, False: 5}
    for shared in (True, False):
        forward, backward = counts(True, shared)
        gathered = gathers[shared] * layers + 1  # and one for the head
        assert forward.pop("all_gather") == 1  # of the head's outputs
        assert forward == {"all_gather_linear": gathered, "linear_reduce_scatter": 2 * layers}
        norms = 3 * layers + 1  # parameters of norms: a weight, and a weight and a bias
        assert backward.pop("all_reduce") == norms
        assert backward == {
            "linear_reduce_scatter_backward": 2 * layers,
            "all_gather_weight_grad": gathered,
            "linear_reduce_scatter": gathered,
        }
        forward, backward = counts(False, shared)
        assert forward == {"linear_all_reduce": 2 * layers, "all_gather": 1}
        assert backward == {"linear_all_reduce": gathered}


class Careless(MLP):
    """An MLP that does not use its Linears as it should."""

    mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.mistake == "another input":
            return gate + self.up_proj(x * 1)
        if self.mistake == "twice":
            return gate * self.gate_proj(x)
        if self.mistake == "an error":
            raise KeyError("of the user's")
        return gate if self.mistake == "unused" else gate * self.up_proj(x)


def check_careless(rank: int) -> None:
    """Misuse raises; whatever happens, nothing is kept and the next forward is right."""
    model = Careless()
    style = fc.FusedGatherParallel(("gate_proj", "up_proj"))
    fc.parallelize_module(model, mesh_of(), style)
    sharing = model.gate_proj.sharing
    x = torch.randn(2, 3, 24)
    right = model(x)
    for mistake, message in (
        ("another input", "up_proj was called with another tensor"),
        ("twice", "gate_proj was called twice"),
        ("unused", "up_proj of .* had no call in the forward of Careless"),
        ("an error", "of the user's"),
    ):
        model.mistake = mistake
        with pytest.raises((RuntimeError, KeyError), match=message) as raised:
            model(x)
        raised.value.__traceback__ = None  # whose frames hold the input
        del raised
        assert not sharing.open and sharing._input is None and not sharing._outputs, mistake
        model.mistake = ""
        assert torch.equal(model(x), right)
    seen = weakref.ref(x)
    del x, right
    gc.collect()
    assert seen() is None, "the input outlives the forward"
    alone = model.gate_proj(torch.randn(2, 3, 24))  # not within the parent's forward
    assert alone.shape == (2, 3, model.gate_proj.weight.to_local().shape[0])


def test_exchanges_of_a_decoder(pools: Pools) -> None:
    pools(2).run(check_exchanges)


def test_a_shared_gather_cannot_leak(pools: Pools) -> None:
    pools(2).run(check_careless)


# What is wrong


def check_refusals(rank: int) -> None:
    mesh, model = mesh_of(), Decoder(1)
    column, row = fc.FusedColwiseParallel, fc.FusedRowwiseParallel

    def refused(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=match):
            call()

    def parallelize(plan: Any, on: Any = mesh, model: nn.Module = model) -> Callable[[], Any]:
        return lambda: fc.parallelize_module(model, on, plan)

    for key, message in (
        ("heads", "'heads' matches no module: the module has embedding, layers, norm, head"),
        ("layers.*.mlp.gate", r"'layers\.0\.mlp' has gate_proj, up_proj, down_proj"),
        ("head.weight", "'head' has no modules inside"),
    ):
        refused(ValueError, message, parallelize({"head": column(), key: column()}))
    assert type(model.head) is nn.Linear, "a plan was half applied"
    refused(NotImplementedError, "Embedding: use torch's own", parallelize({"embedding": row()}))
    refused(NotImplementedError, "Decoder", parallelize(column()))
    gather = fc.FusedGatherParallel(("q_proj", "w_proj"))
    refused(
        ValueError,
        "'w_proj', but Attention has only q_proj",
        parallelize({"layers.*.attention": gather}),
    )
    for names in ("q_proj", (), ("q_proj", "q_proj")):
        refused(
            ValueError, "sequence of different", lambda names=names: fc.FusedGatherParallel(names)
        )
    for style in (column, row):
        for name in ("input_layouts", "output_layouts"):
            refused(
                ValueError, f"{name} must be Shard", lambda s=style, n=name: s(**{n: Partial()})
            )
        refused(ValueError, "engine must be", lambda s=style: s(engine="fast"))
    if dist.get_world_size() % 2 == 0:
        two = mesh_of(2, dist.get_world_size() // 2)
        refused(ValueError, r"has 2 .*choose it, as in mesh\['tp'\]", parallelize(column(), two))
        refused(
            ValueError,
            r"has 2",
            lambda: torch_parallel.parallelize_module(model.head, two, column()),
        )

    model.head.weight = model.embedding.weight
    refused(
        ValueError,
        "embedding.weight and head.weight are one parameter",
        parallelize({"head": column()}),
    )
    parallelize({"layers.0.mlp.up_proj": column()})()
    refused(
        NotImplementedError, "was parallelized before", parallelize({"layers.0.mlp.up_proj": row()})
    )

    up = model.layers[0].mlp.up_proj
    other = mesh_of(1, dist.get_world_size())["data"]
    lost = distribute_tensor(torch.randn(2, 24), other, [Replicate()], src_data_rank=None)
    refused(ValueError, "the input is a DTensor on", lambda: up(lost))
    up.weight = nn.Parameter(up.weight.to_local())
    refused(
        RuntimeError,
        "weight of a parallelized ColumnLinear is no DTensor",
        lambda: up(torch.randn(2, 24)),
    )


def check_unequal_shards(rank: int) -> None:
    layer = nn.Linear(6, 6)
    fc.parallelize_module(layer, mesh_of(), fc.FusedColwiseParallel(input_layouts=Shard(0)))
    with pytest.raises(fc.MismatchError, match="ranks disagree"):
        layer(torch.randn(3 + rank, 6))
    layer.layouts.comm.close()  # unusable after such an error


def test_what_is_refused(pools: Pools) -> None:
    pools(2).run(check_refusals)


def test_unequal_local_shards(pools: Pools) -> None:
    pools(2).run(check_unequal_shards)
