"""Decoders cut by ``parallelize`` against the unsharded ones: outputs, gradients, decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.checking import compare
from tests.ranks.decoders import VOCABULARY, hand_built, small
from tests.ranks.test_vocabulary import Largest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[demo]")

#: What many float32 roundings in 2 layers may change.
LIMIT = 2e-4


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients, whole: the state dict of a copy that has them for parameters."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        left = [p for p in getattr(parameter.grad, "placements", ()) if p.is_partial()]
        assert not left, f"the gradient of {name} was left partial"
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)  # type: ignore[arg-type]
        found = fc.nn.full_state_dict(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    return found


def check_gradients(what: str, cut: nn.Module, right: nn.Module) -> None:
    found = gradients(cut)
    assert list(found) == list(right.state_dict())
    for name, parameter in right.named_parameters():
        assert parameter.grad is not None
        if name.endswith("k_proj.bias"):  # mathematically 0
            continue
        compare(f"{what}: gradient of {name}", found[name], parameter.grad.double(), LIMIT)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


# Hugging Face's


def check_hugging_face(rank: int, name: str, as_dtensors: bool, directory: str) -> None:
    """Losses, accumulated gradients, logits and greedy tokens of batches of every length."""
    right = small(name)
    group = mesh() if as_dtensors else None
    cut = fc.parallelize(small(name), group)
    assert all(hasattr(p, "placements") == as_dtensors for p in cut.parameters())
    assert [n for n, _ in cut.named_parameters()] == [n for n, _ in right.named_parameters()]
    for shape in ((2, 7), (1, 3), (3, 1), (1, 12)):  # of 1 token, only rank 0 has one
        ids = random_ids(*shape)
        labels = ids.clone()
        labels[:, 1:2] = -100
        count = 3 if shape == (1, 12) else None
        options = {} if count is None else {"num_items_in_batch": count}
        if shape == (3, 1):  # nothing to predict: a loss of the caller's own, of all logits
            losses = [m(input_ids=ids).logits.square().mean() for m in (right, cut)]
        else:
            losses = [m(input_ids=ids, labels=labels, **options).loss for m in (right, cut)]
        compare(f"{name}: loss of {shape}", losses[1].detach(), losses[0].detach().double(), LIMIT)
        for loss in losses:
            loss.backward()
    check_gradients(name, cut, right)

    with torch.no_grad():
        ids = random_ids(2, 7)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0  # padded on the left
        for options in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": mask},
            {"input_ids": ids, "logits_to_keep": 1},
            {"input_ids": ids, "logits_to_keep": 3},
            {"input_ids": ids, "logits_to_keep": torch.tensor([0, 5])},
            {"inputs_embeds": torch.nn.functional.embedding(ids, right.model.embed_tokens.weight)},
        ):
            expected, found = right(**options).logits, cut(**options).logits
            if "attention_mask" in options:
                expected, found = expected[:, 3:], found[:, 3:]
            compare(f"{name}: logits of {list(options)}", found, expected.double(), LIMIT)
        hidden = right.model(input_ids=ids).last_hidden_state
        found = cut.model(input_ids=ids).last_hidden_state
        compare(f"{name}: last hidden state", found, hidden.double(), LIMIT)
    for ids in (random_ids(1, 5), random_ids(2, 3)):
        tokens = [
            m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (right, cut)
        ]
        assert torch.equal(*tokens), f"{name}: {tokens}"

    state = fc.nn.full_state_dict(cut)
    if rank == 0:
        cut.save_pretrained(directory, state_dict=state)
        again = type(right).from_pretrained(directory).state_dict()
        assert list(again) == list(right.state_dict())
        assert all(torch.equal(again[key], value) for key, value in right.state_dict().items())


@pytest.mark.parametrize("as_dtensors", [True, False], ids=["dtensors", "plain"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["llama with biases, tied", "qwen3"])
def test_hugging_face(
    pools: Pools, tmp_path: Path, name: str, world_size: int, as_dtensors: bool
) -> None:
    pools(world_size).run(check_hugging_face, name, as_dtensors, str(tmp_path), timeout_s=180)


@pytest.mark.parametrize("world_size", [2, 3])
def test_heads_that_do_not_divide(pools: Pools, tmp_path: Path, world_size: int) -> None:
    """5 groups of heads are 3 and 2, or 2, 2 and 1."""
    pools(world_size).run(
        check_hugging_face, "llama of 10 heads in 5 groups", False, str(tmp_path), timeout_s=180
    )


# Activation checkpointing


def check_checkpointing(rank: int) -> None:
    """Layers recomputed in the backward pass, after a forward pass of another length."""
    for reentrant in (False, True):
        right = small("llama")
        cut = fc.parallelize(small("llama"))
        cut.gradient_checkpointing_enable({"use_reentrant": reentrant})
        cut.train(), right.train()
        batches = [random_ids(2, 7), random_ids(1, 4)]
        losses = [[m(input_ids=ids, labels=ids).loss for ids in batches] for m in (right, cut)]
        with torch.no_grad():
            cut(input_ids=random_ids(1, 2))  # and one that has nothing to do with it
        for expected, found in zip(*losses, strict=True):
            compare("loss", found.detach(), expected.detach().double(), LIMIT)
            found.backward()
            expected.backward()
        check_gradients(f"checkpointed, reentrant {reentrant}", cut, right)


def test_activation_checkpointing(pools: Pools) -> None:
    pools(2).run(check_checkpointing, timeout_s=120)


# FSDP2


def train(model: Any, batches: list[Tensor], scale: float) -> list[float]:
    """Steps of AdamW on two accumulated batches each, gradients clipped; their norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    norms = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for ids in (first, second):
            (model(input_ids=ids, labels=ids).loss * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(getattr(norm, "full_tensor", lambda norm=norm: norm)()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_fsdp(rank: int, checkpointed: bool) -> None:
    """2 x 2 ranks, data by tensor: the same weights as one process with both halves' data."""
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    cut = fc.parallelize(small("qwen3"), both["tensor"])
    if checkpointed:
        cut.gradient_checkpointing_enable({"use_reentrant": False})
        cut.train()
    for layer in cut.model.layers:
        fully_shard(layer, mesh=both["data"])
    fully_shard(cut, mesh=both["data"])
    batches = [random_ids(2, 5 + i) for i in range(6)]  # one row for each half of the data
    mine = [ids[rank // 2 : rank // 2 + 1] for ids in batches]
    norms = train(cut, mine, 0.5)
    right = small("qwen3")
    expected = train(right, batches, 0.5)
    compare("norms", torch.tensor(norms), torch.tensor(expected).double(), 1e-3)
    start = small("qwen3").state_dict()
    for name, value in right.state_dict().items():
        found = dict(cut.named_parameters())[name].full_tensor()  # type: ignore[operator]
        compare(f"step of {name}", found - start[name], (value - start[name]).double(), 0.02)


def check_fsdp_state(rank: int) -> None:
    """The whole model's state, out of and into what FSDP has cut on, DTensors or plain shards."""
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    state = hand_built().state_dict()
    for group in (both["tensor"], both["tensor"].get_group()):
        cut = fc.parallelize(hand_built(), group)
        fully_shard(cut, mesh=both["data"])
        for _ in range(2):
            found = fc.nn.full_state_dict(cut)
            assert found.keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(found[name], value), name
            with torch.no_grad():
                for parameter in cut.parameters():
                    parameter.zero_()
            fc.nn.load_full_state_dict(cut, state)


def test_state_of_a_model_that_fsdp_has_cut(pools: Pools) -> None:
    pools(4).run(check_fsdp_state, timeout_s=120)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fsdp(pools: Pools, checkpointed: bool) -> None:
    pools(4).run(check_fsdp, checkpointed, timeout_s=180)


# A model built by hand


class Recomputed(nn.Module):
    """The layers of a hand-built model under activation checkpointing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        model = self.model
        x = model.embed_tokens(ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.lm_head(model.norm(x))


def check_hand_built(rank: int) -> None:
    for as_dtensors in (True, False):
        group = mesh() if as_dtensors else fc.Communicator.of(channel="hand built")
        right = hand_built()
        cut = fc.parallelize(hand_built(), group, logits="local")
        gathered = fc.parallelize(hand_built(), group)
        for shape in ((2, 7), (5,), (1, 1), (0, 3)):
            ids = random_ids(*shape)
            expected = right(ids)
            compare(f"logits of {shape}", gathered(ids), expected.detach().double(), LIMIT)
            targets = ids.flip(-1)
            if not ids.numel():
                continue
            F.cross_entropy(expected.flatten(0, -2), targets.flatten()).backward()
            with Largest() as largest:
                loss = cut.lm_head.loss(cut(ids), targets)
                loss.backward()
            if dist.get_world_size() > 1 and shape == (2, 7):
                assert largest.numel < ids.numel() * VOCABULARY, "a rank had all logits"
            F.cross_entropy(gathered(ids).flatten(0, -2), targets.flatten()).backward()
        check_gradients("local logits", cut, right)
        check_gradients("gathered logits", gathered, right)

        again = fc.parallelize(hand_built(), group)
        checked = Recomputed(again)
        right.zero_grad()
        ids = random_ids(2, 7)
        for model in (right, checked):
            model(ids).square().mean().backward()
        check_gradients("checkpointed", again, right)

        headless, trunk = hand_built(head=False), fc.parallelize(hand_built(head=False), group)
        for model in (headless, trunk):
            model(ids).square().sum().backward()
        compare("trunk", trunk(ids), headless(ids).detach().double(), LIMIT)
        check_gradients("trunk", trunk, headless)


def check_state(rank: int) -> None:
    """State dicts in and out, copies, and a model that never was whole."""
    right = hand_built()
    state, ids = right.state_dict(), random_ids(2, 5)
    for group in (mesh(), None):
        cut = fc.parallelize(hand_built(), group)
        for name, value in fc.nn.full_state_dict(cut).items():
            assert torch.equal(value, state[name]), name
        with torch.device("meta"):
            never_whole = hand_built()
        never_whole = fc.parallelize(never_whole, group).to_empty(device="cpu")
        fc.nn.load_full_state_dict(never_whole, state)
        with torch.no_grad():
            y = cut(ids)
            assert torch.equal(never_whole(ids), y)
            copied = copy.deepcopy(cut)
            assert torch.equal(copied(ids), y)
            for parameter in copied.parameters():
                parameter.zero_()
            assert not copied(ids).any(), "the copy runs the original"
            assert torch.equal(cut(ids), y), "the copy shares its parameters"
        copied(ids).sum().backward()
        assert all(p.grad is None for p in cut.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hand_built(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_hand_built, timeout_s=120)


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_and_copies(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_state, timeout_s=120)


def check_compiled(rank: int) -> None:
    """One graph for every length, and the same bits forward and backward."""
    cut = fc.parallelize(hand_built(layers=1), mesh(), logits="local")
    compiled = torch.compile(cut, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for model in (cut, compiled):
        ids = random_ids(2, 7)
        logits = model(ids)
        cut.lm_head.loss(logits, ids).backward()
        found.append([logits, *gradients(cut).values(), model(random_ids(2, 5))])
        cut.zero_grad()
    assert all(torch.equal(eager, traced) for eager, traced in zip(*found, strict=True))


def test_compiled(pools: Pools) -> None:
    pools(2).run(check_compiled, timeout_s=200)


# Errors


def change(model: Any, path: str, value: Any) -> Any:
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    if isinstance(getattr(owner, name, None), nn.Module) and not isinstance(value, nn.Module):
        delattr(owner, name)
    setattr(owner, name, value)
    return model


def check_errors(rank: int) -> None:
    wrong: list[tuple[Any, str]] = [
        (nn.Linear(2, 2), "Linear has no decoder layers: expected an nn.ModuleList"),
        (change(hand_built(), "embed_tokens", None), "nothing at embed_tokens: .* nn.Embedding"),
        (
            change(hand_built(), "layers.1.mlp.up_proj", nn.Identity()),
            r"a Identity at layers\.1\.mlp\.up_proj: expected an nn.Linear",
        ),
        (change(hand_built(), "layers.0.self_attn.o_proj", None), r"layers\.0\.self_attn\.o_proj"),
        (change(hand_built(), "layers.0.self_attn.head_dim", None), "head_dim, an int"),
        (change(hand_built(), "layers.0.self_attn.head_dim", 5), "whole heads of 5"),
        (
            change(hand_built(), "layers.1.self_attn.k_norm", nn.RMSNorm(24)),
            r"layers\.1\.self_attn\.k_norm\.weight of HandBuilt has shape \[24\]: expected \[2\]",
        ),
        (
            change(hand_built(), "router", nn.Linear(24, 4)),
            r"a parameter router\.weight that Llama has not",
        ),
        (
            change(hand_built(), "layers.0.mlp.extra", nn.Linear(2, 2)),
            r"layers\.0\.mlp\.extra\.weight that Llama has not",
        ),
    ]
    for model, message in wrong:
        with pytest.raises(ValueError, match=message):
            fc.parallelize(model)
    with pytest.raises(ValueError, match="'gathered' or 'local'"):
        fc.parallelize(hand_built(), logits="none")
    cut = fc.parallelize(hand_built())
    with pytest.raises(RuntimeError, match="outside of its block"):
        cut.layers[0].mlp.up_proj(torch.zeros(2, 24))
    assert cut(random_ids(3)).isfinite().all()


def check_heads(rank: int) -> None:
    with pytest.raises(ValueError, match="5 key-value heads cannot be divided evenly over 2"):
        fc.parallelize(small("llama of 5 heads"), mesh())
    with pytest.raises(ValueError, match="1 key-value heads leave some of 2 ranks without any"):
        fc.parallelize(small("llama", num_key_value_heads=1))


def test_errors(pools: Pools) -> None:
    pools(1).run(check_errors)


def test_heads_in_dtensors(pools: Pools) -> None:
    pools(2).run(check_heads, timeout_s=120)
