"""Wrong arguments: a ``ValueError`` that names the argument, what was got and what is legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomm as fc
from fusedcomm.nn import ColumnParallelLinear, GatedMLP, RowParallelLinear
from fusedcomm.ops.checks import check_scattered, check_shard

OPS: tuple[Callable[..., Any], ...] = (
    fc.all_gather_linear,
    fc.linear_reduce_scatter,
    fc.linear_all_reduce,
    fc.replicated_linear,
)
X, W, B = torch.ones(6, 4), torch.ones(5, 4), torch.ones(5)


@pytest.fixture(scope="module", autouse=True)
def lone_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    for communicator in fc.Communicator.live():
        communicator.close()
    dist.destroy_process_group()


WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "inner dimension": (X, torch.ones(5, 3), None, r"weight is \[5, 3\], but x has 4 features"),
    "transposed weight": (X, W.t(), None, r"weight is \[4, 5\], but x has 4 features"),
    "1-D x": (X[0], W, None, r"x must be \[tokens, features\] or larger; got shape \[4\]"),
    "0-D x": (torch.tensor(1.0), W, None, "x must be"),
    "3-D weight": (X, W[None], None, r"weight must be \[out, in\]; got shape \[1, 5, 4\]"),
    "1-D weight": (X, W[0], None, r"weight must be \[out, in\]"),
    "bias too long": (X, W, torch.ones(6), r"bias must be \[5\]; got shape \[6\]"),
    "2-D bias": (X, W, B[None], r"bias must be \[5\]; got shape \[1, 5\]"),
    "integers": (X.int(), W.int(), None, "x must be float32, float16, .* got torch.int32"),
    "bools": (X.bool(), W.bool(), None, "got torch.bool"),
    "complex": (X.to(torch.complex64), W.to(torch.complex64), None, "got torch.complex64"),
    "FP8": (X.to(torch.float8_e4m3fn), W, None, "float8_e4m3fn .FP8 is not supported yet"),
    "weight's dtype": (X, W.bfloat16(), None, "weight is torch.bfloat16, but x is torch.float32"),
    "bias's dtype": (X, W, B.double(), "bias is torch.float64, but x is torch.float32"),
    "weight's device": (X, W.to("meta"), None, "weight lies on meta, but x on cpu"),
    "bias's device": (X, W, B.to("meta"), "bias lies on meta, but x on cpu"),
    "x is no tensor": ([[1.0]], W, None, "x must be a tensor; got list"),
    "weight is no tensor": (X, 3, None, "weight must be a tensor; got int"),
    "bias is no tensor": (X, W, 1.0, "bias must be a tensor; got float"),
}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_fit(op: Callable[..., Any], what: str) -> None:
    x, weight, bias, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        op(x, weight, bias)


SEVERAL: dict[str, tuple[Any, Any, str]] = {
    "none": ([], None, "weight is an empty sequence"),
    "too few biases": ([W, W], [B], "bias must be None or a sequence of 2, .* got 1"),
    "one bias": ([W, W], B, "sequence of 2, one per weight; got one tensor"),
    "biases for one weight": (W, [B], "bias is a sequence, but weight is one tensor"),
    "second weight": ([W, W[:, :3]], None, r"weight\[1\] is \[5, 3\], but x has 4 features"),
    "second bias": ([W, W], [None, B[:2]], r"bias\[1\] must be \[5\]; got shape \[2\]"),
    "second dtype": ([W, W.half()], None, r"weight\[1\] is torch.float16, but x is torch.float32"),
    "no tensor inside": ([W, None], None, "weight must be a tensor; got NoneType"),
}


@pytest.mark.parametrize("op", [OPS[0], OPS[3]], ids=lambda op: op.__name__)
@pytest.mark.parametrize("what", SEVERAL)
def test_sequences_that_do_not_fit(op: Callable[..., Any], what: str) -> None:
    weight, bias, message = SEVERAL[what]
    with pytest.raises(ValueError, match=message):
        op(X, weight, bias)


@pytest.mark.parametrize("op", OPS[1:3], ids=lambda op: op.__name__)
def test_sequences_where_one_weight_is_meant(op: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="weight must be a tensor; got list"):
        op(X, [W, W])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_an_engine_that_is_none(op: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="engine must be one of auto, .*host, plain; got 'nccl'"):
        op(X, W, engine="nccl")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("group", ["tp", 0, [0]])
def test_a_group_that_is_none(op: Callable[..., Any], group: Any) -> None:
    with pytest.raises(ValueError, match="group must be a ProcessGroup, a 1-D DeviceMesh"):
        op(X, W, group=group)


@pytest.mark.parametrize("dim", [2, -1, -4, 5])
def test_dimensions_that_cannot_be_cut(dim: int) -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=f"gather_dim={dim} is none of the token dimensions"):
        fc.all_gather_linear(x, W, gather_dim=dim)
    with pytest.raises(ValueError, match=f"scatter_dim={dim} is none of .* 0 to 1"):
        fc.linear_reduce_scatter(x, W, scatter_dim=dim)


def test_dimensions_count_from_both_ends() -> None:
    x = torch.ones(2, 3, 4)
    for dim, left in ((0, 0), (1, 1), (-3, 0), (-2, 1)):
        assert check_scattered(x, dim) == left
        assert check_shard(x, dim, None, 1, 2) == left


def test_a_shard_of_another_size_than_torch_chunks() -> None:
    # 7 rows over 3 ranks are 3, 3 and 1.
    assert check_shard(torch.ones(3, 4), 0, 7, 1, 3) == 0
    assert check_shard(torch.ones(1, 4), 0, 7, 2, 3) == 0
    assert check_shard(torch.ones(5, 0, 4), 1, 2, 2, 3) == 1
    for rows, rank, legal in ((2, 0, 3), (3, 2, 1), (4, 1, 3), (0, 2, 1)):
        message = f"x has {rows} rows in dimension 0, but of gathered_size=7 rank {rank} of 3 has "
        with pytest.raises(ValueError, match=f"{message}{legal} "):
            check_shard(torch.ones(rows, 4), 0, 7, rank, 3)
    with pytest.raises(ValueError, match="gathered_size must not be negative; got -1"):
        fc.all_gather_linear(torch.ones(0, 4), W, gathered_size=-1)
    with pytest.raises(ValueError, match="x has 6 rows"):
        fc.all_gather_linear(X, W, gathered_size=5)


@pytest.mark.parametrize("op", OPS[1:3], ids=lambda op: op.__name__)
def test_a_wire_dtype_that_is_none(op: Callable[..., Any]) -> None:
    for wire in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(
            ValueError, match=f"wire_dtype must be x's dtype or float32; got {wire}"
        ):
            op(X.bfloat16(), W.bfloat16(), wire_dtype=wire)
    with pytest.raises(ValueError, match="would narrow a float64 x"):
        op(X.double(), W.double(), wire_dtype=torch.float32)


def test_layouts_that_are_none() -> None:
    for make, name in (
        (partial(ColumnParallelLinear, 4, 4, input_layout="shard"), "input_layout"),
        (partial(RowParallelLinear, 4, 4, output_layout="shard"), "output_layout"),
        (partial(GatedMLP, 4, 4, layout="shard"), "layout"),
        (partial(ColumnParallelLinear.from_linear, nn.Linear(4, 4), input_layout=""), "input_la"),
    ):
        with pytest.raises(ValueError, match=f"{name}.* must be 'sharded' or 'replicated'"):
            make()


def test_nothing_was_sent_by_a_refused_call() -> None:
    comm = fc.Communicator.of()
    before = comm._watch.number
    for op in OPS:
        with pytest.raises(ValueError):
            op(X, W[:, :2])
    assert comm._watch.number == before
    assert fc.all_gather_linear(X, W).shape == (6, 5)


def test_time_limits_that_are_none() -> None:
    for limit in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be positive"):
            fc.Communicator.of(timeout_s=limit)


def test_meta_tensors_have_shapes_only() -> None:
    """Shapes can be asked for without memory, as ``nn.Linear`` answers them."""
    x, weight = X.to("meta"), W.to("meta")
    for op in OPS:
        y = op(x, weight)
        assert y.is_meta and y.shape == (6, 5)


def test_without_a_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for use in (fc.Communicator.of, partial(fc.all_gather_linear, X, W), partial(GatedMLP, 4, 4)):
        with pytest.raises(ValueError, match="call torch.distributed.init_process_group first"):
            use()
