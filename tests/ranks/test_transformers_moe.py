"""ep_implementation="fusedcomm": whole models of transformers, their experts over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import fusedcomm.integrations.transformers
from tests.conftest import Pools
from tests.ranks.checking import relative_error
from tests.ranks.moe_models import CONFIGS, EXPERTS, HIDDEN, model

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers is older than 5.21"
)

from fusedcomm.integrations import transformers_moe  # noqa: E402

LIMIT = 1e-5
#: Sums of gradients over a model of two layers.
GRADIENT_LIMIT = 1e-4


def loaded(path: str, experts: str, distributed: DistributedConfig | None = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path,
        attn_implementation="eager",
        experts_implementation=experts,
        distributed_config=distributed,
    ).eval()


def expert_parallel(path: str, experts: str, **sizes: int) -> Any:
    fusedcomm.integrations.transformers.register()
    config = DistributedConfig(**sizes, ep_implementation="fusedcomm")
    return loaded(path, experts, config)


def prompts() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 60, (2, 7), generator=generator)


def greedy(model: Any) -> list[list[int]]:
    with torch.no_grad():
        return model.generate(prompts(), max_new_tokens=12, do_sample=False).tolist()


def check_model(rank: int, path: str, name: str, experts: str, world_size: int) -> None:
    """The same tokens, and the same gradients in training."""
    whole = loaded(path, "eager")
    cut = expert_parallel(path, experts, tp_size=world_size, ep_size=world_size)
    layers = cut.model.layers
    assert layers[0].mlp.experts.down_proj.to_local().shape[0] == EXPERTS // world_size
    with mock.patch.object(
        transformers_moe, "moe_ffn", side_effect=transformers_moe.moe_ffn
    ) as fused:
        assert greedy(cut) == greedy(whole)
    known = name != "mixtral with relu"
    assert fused.called == known
    logits = []
    for instance in (whole, cut):
        instance.train()
        found = instance(prompts()).logits
        (found.float() ** 2).mean().backward()
        logits.append(found)
    assert relative_error(logits[1], logits[0]) < LIMIT
    expected = dict(whole.named_parameters())
    for key, parameter in cut.named_parameters():
        grad, right = parameter.grad, expected[key].grad
        assert grad is not None and right is not None, key
        if hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        assert relative_error(grad, right) < GRADIENT_LIMIT, key


def check_separate_batches(rank: int, path: str) -> None:
    """Ranks with batches of their own (data parallel, without tensor parallelism)."""
    whole = loaded(path, "eager")
    cut = expert_parallel(path, "eager", fsdp_size=2, ep_size=2)
    mine = prompts()[rank : rank + 1, : 7 - 2 * rank]
    with torch.no_grad():
        assert relative_error(cut(mine).logits, whole(mine).logits) < LIMIT


def check_no_token_for_a_rank(rank: int, path: str) -> None:
    """All tokens choose experts of one rank: the other's have gradients of 0, not None."""
    cut = expert_parallel(path, "eager", tp_size=2, ep_size=2)
    layer = cut.model.layers[0].mlp
    implementation = transformers_moe.FusedExpertParallelism.__call__
    seen = []

    def chosen(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return implementation(self, x, ids % 2, weights)

    def recorded(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append((len(x), int(ids.min()), int(ids.max())))
        return own(module, x, ids, weights)

    own = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    cut.config._experts_implementation = "recorded"
    ALL_EXPERTS_FUNCTIONS.register("recorded", recorded)
    with mock.patch.object(transformers_moe.FusedExpertParallelism, "__call__", chosen):
        y = layer(torch.randn(1, 6, HIDDEN, generator=torch.Generator().manual_seed(0)))
        y.sum().backward()
    # Of 6 tokens, two choices of local expert 0 or 1 and no sentinel, or one row of zeros.
    assert seen == ([(18, 0, 1)] if rank == 0 else [(1, 0, 0)])
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        norms = parameter.grad.to_local().flatten(1).norm(dim=1)
        assert bool((norms[:2] > 0).all()) == (rank == 0)
        assert not norms[2:].any()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    paths: dict[str, Path] = {}

    def path(name: str) -> str:
        if name not in paths:
            paths[name] = tmp_path_factory.mktemp("model")
            model(name).save_pretrained(paths[name])
        return str(paths[name])

    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_on_two_ranks(pools: Pools, saved: Any, name: str) -> None:
    pools(2).run(check_model, saved(name), name, "eager", 2)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_unknown_activations_in_other_implementations(
    pools: Pools, saved: Any, experts: str
) -> None:
    name = "mixtral with relu"
    pools(2).run(check_model, saved(name), name, experts, 2)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_model_on_three_ranks(pools: Pools, saved: Any, name: str) -> None:
    pools(3).run(check_model, saved(name), name, "eager", 3)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral with relu"])
def test_ranks_with_batches_of_their_own(pools: Pools, saved: Any, name: str) -> None:
    pools(2).run(check_separate_batches, saved(name))


def test_no_token_for_a_rank(pools: Pools, saved: Any) -> None:
    pools(2).run(check_no_token_for_a_rank, saved("mixtral with relu"))
