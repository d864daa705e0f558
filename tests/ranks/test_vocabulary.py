"""A vocabulary cut over the ranks: embedding, head and loss against torch's, in float64."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcomm as fc
from fusedcomm.nn import VocabParallelEmbedding, VocabParallelHead
from fusedcomm.ops.library import vocabulary as library
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.checking import bound, compare
from tests.ranks.fault_calls import Record, Seen, assert_lost, die, see, survivors

#: Even, uneven and empty shards on 2 to 4 ranks.
VOCABULARIES = (12, 10, 7, 2, 1)


def part(full: Tensor, dim: int) -> Tensor:
    return shard(full, dim, dist.get_rank(), dist.get_world_size())


def limit(dtype: torch.dtype, tokens: int, vocabulary: int) -> float:
    """Exponentials, logarithms and two sums in the wide type, then one rounding of a gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    return bound(dtype, 1) * (dtype != wide) + bound(wide, 8 * (tokens + vocabulary), 8)


# The loss


def check_loss(rank: int) -> None:
    """Every shape, vocabulary, reduction and smoothing, with some targets ignored."""
    everything = product(
        ((5,), (2, 3), (0,), ()), VOCABULARIES, ("mean", "sum", "none"), (0.0, 0.2, 1.0)
    )
    for number, (shape, vocabulary, reduction, smoothing) in enumerate(everything):
        dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
        generator = torch.Generator().manual_seed(number)
        full = (3 * torch.randn(*shape, vocabulary, generator=generator)).to(dtype)
        targets = torch.randint(vocabulary, shape, generator=generator)
        ignore_index = -100 if number % 2 else 1
        if number % 2 and targets.dim() and targets.numel():
            targets[..., 0] = -100
        options: dict[str, Any] = dict(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
        )
        expected_logits = full.double().reshape(-1, vocabulary).requires_grad_()
        right = F.cross_entropy(expected_logits, targets.reshape(-1), **options)
        own = part(full, -1).clone().requires_grad_()
        loss = fc.vocab_parallel_cross_entropy(own, targets, vocabulary=vocabulary, **options)
        what = f"{shape} V={vocabulary} {dtype} {options} on rank {rank}"
        allowed = limit(dtype, 6, vocabulary)
        assert loss.dtype == torch.promote_types(dtype, torch.float32), what
        if reduction == "mean" and not (targets != ignore_index).any():
            assert loss.isnan() and right.isnan(), what
            continue
        right = right.reshape(targets.shape) if reduction == "none" else right
        compare(what, loss, right, allowed)
        everyone = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, loss.detach())
        assert all(torch.equal(everyone[0], theirs) for theirs in everyone), f"{what}: unequal"
        d_loss = torch.randn(right.shape, generator=generator, dtype=torch.float64)
        right.backward(d_loss)
        loss.backward(d_loss.to(loss.dtype))
        assert own.grad is not None and expected_logits.grad is not None
        grad = part(expected_logits.grad.reshape(full.shape), -1)
        compare(f"{what}: gradient", own.grad, grad, allowed)


def check_extremes(rank: int) -> None:
    """Large logits, whole shards masked out, equal shards, several blocks, strided logits."""
    world_size = dist.get_world_size()
    for vocabulary in (8, 9):
        torch.manual_seed(1)
        full = 1e4 * torch.randn(6, vocabulary, dtype=torch.float64)
        full[:, 1:5] = -math.inf  # on 3 ranks of 8: all that rank 1 has but one; on 4: all
        full[2, :] = -math.inf
        full[2, 7] = 3.0
        targets = torch.tensor([0, 0, 7, 6, 5, 7])
        leaf = full.clone().requires_grad_()
        right = F.cross_entropy(leaf, targets)
        right.backward()
        own = part(full, -1).t().contiguous().t().requires_grad_()
        library.BLOCK, before = 2 * own.shape[1] + 1, library.BLOCK  # two rows at a time
        try:
            loss = fc.vocab_parallel_cross_entropy(own, targets, vocabulary=vocabulary)
            loss.backward()
        finally:
            library.BLOCK = before
        assert own.grad is not None and leaf.grad is not None
        compare("loss of extremes", loss.detach(), right.detach(), 1e-14)
        compare("gradient of extremes", own.grad, part(leaf.grad, -1), 1e-14)
    full = torch.randn(4, 3 * world_size, dtype=torch.float64)
    targets = torch.arange(4) % (3 * world_size)
    dist.broadcast(full, 0)
    right = F.cross_entropy(full, targets)
    compare("equal shards", fc.vocab_parallel_cross_entropy(part(full, -1), targets), right, 1e-14)
    poisoned = full.clone()
    poisoned[1] = math.nan
    own = part(poisoned, -1).clone().requires_grad_()
    loss = fc.vocab_parallel_cross_entropy(own, torch.tensor([0, -100, 2, 1]))
    loss.backward()
    assert loss.isfinite() and own.grad is not None and own.grad.isfinite().all(), "an ignored NaN"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_loss)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_extreme_logits(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_extremes)


class Largest(TorchDispatchMode):
    """The most elements of any floating-point result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if type(result) is Tensor and result.is_floating_point():  # no DTensor: it has less
                self.numel = max(self.numel, result.numel())
        return out


def check_memory(rank: int) -> None:
    """From hidden states to gradients, nothing is as large as all the logits; see it measured."""
    tokens, vocabulary, hidden = 64, 512, 8
    torch.manual_seed(2)
    head = VocabParallelHead(hidden, vocabulary, bias=False)
    embedding = VocabParallelEmbedding(vocabulary, hidden)
    ids = torch.arange(tokens)
    with Largest() as largest:
        x = embedding(ids)
        logits = fc.replicated_linear(x, head.weight)
        head.loss(logits, ids, label_smoothing=0.1).backward()
    assert largest.numel == tokens * vocabulary // dist.get_world_size(), largest.numel
    with Largest() as largest:
        head.gather(logits)
    assert largest.numel == tokens * vocabulary, "the measurement does not see what is gathered"


def test_no_rank_has_all_logits(pools: Pools) -> None:
    pools(4).run(check_memory)


# The embedding


def check_embedding(rank: int) -> None:
    world_size = dist.get_world_size()
    cases = product(((5,), (2, 7), (3, 0)), VOCABULARIES, (None, 0, -1), (None, 0, -1))
    for shape, vocabulary, padding_idx, scatter_dim in cases:
        torch.manual_seed(3)
        whole = nn.Embedding(vocabulary, 6, padding_idx, dtype=torch.float64)
        torch.manual_seed(3)
        layout = "replicated" if scatter_dim is None else "sharded"
        made = VocabParallelEmbedding(
            vocabulary, 6, padding_idx, output_layout=layout, dtype=torch.float64
        )
        adopted = VocabParallelEmbedding.from_embedding(whole, output_layout=layout)
        ids = torch.randint(vocabulary, shape)
        y = whole(ids)
        dy = torch.randn_like(y)
        y.backward(dy)
        dim = 0 if scatter_dim is None else scatter_dim % len(shape)

        def cut(full: Tensor, dim: int = dim, layout: str = layout) -> Tensor:
            return part(full, dim) if layout == "sharded" else full

        for layer in (made, adopted):
            what = f"{shape} V={vocabulary} padding {padding_idx} {scatter_dim} rank {rank}"
            assert torch.equal(layer.weight, part(whole.weight, 0)), what
            out = layer(ids, scatter_dim=scatter_dim or 0)
            assert torch.equal(out, cut(y)), what
            out.backward(cut(dy))
            assert whole.weight.grad is not None and layer.weight.grad is not None
            compare(what, layer.weight.grad, part(whole.weight.grad, 0), 1e-15)
            assert "rank=" in repr(layer)
        state = fc.nn.full_state_dict(made)
        assert list(state) == ["weight"] and torch.equal(state["weight"], whole.weight)
        with torch.no_grad():
            made.weight.zero_()
        fc.nn.load_full_state_dict(made, whole.state_dict())
        assert torch.equal(made.weight, part(whole.weight, 0))
    assert world_size == dist.get_world_size()


def check_tied(rank: int) -> None:
    """One parameter for embedding and head, on token shards: both uses' gradients add up."""
    for vocabulary, tokens in ((10, 7), (3, 2)):
        torch.manual_seed(4)
        whole = nn.Embedding(vocabulary, 6, dtype=torch.float64)
        embedding = VocabParallelEmbedding.from_embedding(whole, output_layout="sharded")
        head = VocabParallelHead(6, vocabulary, bias=False, dtype=torch.float64)
        head.weight = embedding.weight
        ids, targets = (
            torch.randint(vocabulary, (2, tokens)),
            torch.randint(vocabulary, (2, tokens)),
        )
        right = F.cross_entropy(
            F.linear(whole(ids).tanh(), whole.weight).reshape(-1, vocabulary), targets.reshape(-1)
        )
        right.backward()
        x = embedding(ids, scatter_dim=1).tanh()
        logits = head(x, gather_dim=1, gathered_size=tokens)
        loss = head.loss(logits, targets)
        loss.backward()
        compare("tied: loss", loss.detach(), right.detach(), 1e-14)
        assert whole.weight.grad is not None and embedding.weight.grad is not None
        compare("tied: gradient", embedding.weight.grad, part(whole.weight.grad, 0), 1e-14)
        whole_logits = F.linear(whole(ids).tanh(), whole.weight)
        compare("gathered logits", head.gather(logits), whole_logits, 1e-14)
        module = nn.ModuleDict({"embedding": embedding, "head": head})
        state = fc.nn.full_state_dict(module)
        assert torch.equal(state["head.weight"], whole.weight)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embedding(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_embedding)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tied_weights(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_tied)


# Errors


def check_errors(rank: int) -> None:
    loss, lookup = fc.vocab_parallel_cross_entropy, fc.vocab_parallel_embedding
    logits, targets, weight = torch.zeros(2, 4), torch.tensor([0, 7]), torch.zeros(4, 3)
    wrong = [
        (lambda: loss(logits, torch.tensor([0, 8])), "targets holds 8, .* 0 to 7"),
        (lambda: loss(logits, torch.tensor([-1, 0])), "targets holds -1"),
        (lambda: loss(logits, torch.zeros(3, dtype=torch.long)), "targets has shape"),
        (lambda: loss(logits, torch.zeros(2)), "must be ids"),
        (lambda: loss(logits, targets, vocabulary=11), "4 of a vocabulary of 11, but rank . of 2"),
        (lambda: loss(logits, targets, reduction="max"), "mean, sum, none"),
        (lambda: loss(logits, targets, label_smoothing=1.5), "must lie in"),
        (lambda: loss(logits.long(), targets), "floating point"),
        (lambda: lookup(torch.tensor([8]), weight), "ids holds 8, .* 0 to 7"),
        (lambda: lookup(torch.tensor([-1]), weight), "ids holds -1"),
        (lambda: lookup(torch.zeros(2), weight), "integers"),
        (lambda: lookup(targets, weight, vocabulary=11), "4 of a vocabulary of 11"),
        (lambda: lookup(targets, weight, scatter_dim=1), "no dimension of ids"),
        (
            lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(4, 3, max_norm=1.0)),
            "max_norm",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    assert loss(logits, targets).isfinite(), "the communicator is as good as before"


def disagree(rank: int) -> str:
    comm = fc.Communicator.of(channel="disagree")
    try:
        fc.vocab_parallel_cross_entropy(
            torch.zeros(2, 4), torch.tensor([0, 7]), label_smoothing=rank / 10, group=comm
        )
    except fc.MismatchError as error:
        return str(error)
    finally:
        comm.close()
    return "nothing"


def lose(rank: int) -> Seen:
    fc.vocab_parallel_embedding(torch.tensor([0]), torch.zeros(2, 3))
    if rank == 1:
        die()

    def calls() -> None:
        fc.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 7]))

    return see(fc.Communicator.of(), calls)


def test_errors(pools: Pools) -> None:
    pools(2).run(check_errors)


def test_ranks_that_disagree(pools: Pools) -> None:
    for message in pools(2).run(disagree):
        assert "label_smoothing 0.1" in message and "label_smoothing 0.0" in message


def test_a_lost_rank(pools: Pools, record_property: Record) -> None:
    outcomes = pools(3).outcomes(lose, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, "all_gather")
