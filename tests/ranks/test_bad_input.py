"""Wrong arguments raise ValueError before anything is sent: the communicator works on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.fault_calls import OPS, call, right

ones = torch.ones

LINEAR: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    # what is wrong: (x, weight, bias), options, words of the message
    "x is a vector": ((ones(8), ones(6, 8)), {}, r"x must be \[tokens, features\].*\[8\]"),
    "x is a list": (([[1.0] * 8], ones(6, 8)), {}, "x must be a tensor; got list"),
    "x is None": ((None, ones(6, 8)), {}, "x must be a tensor; got NoneType"),
    "weight is None": ((ones(4, 8), None), {}, "weight must be a tensor"),
    "weight is an array": ((ones(4, 8), ones(6, 8).numpy()), {}, "weight must be a tensor"),
    "bias is a number": ((ones(4, 8), ones(6, 8), 1.0), {}, "bias must be a tensor"),
    "x of integers": (
        (ones(4, 8, dtype=torch.int64), ones(6, 8, dtype=torch.int64)),
        {},
        "x must be float32, float16, bfloat16 or float64; got torch.int64",
    ),
    "x of booleans": ((ones(4, 8).bool(), ones(6, 8).bool()), {}, "got torch.bool"),
    "x of complex numbers": (
        (ones(4, 8, dtype=torch.complex64), ones(6, 8, dtype=torch.complex64)),
        {},
        "got torch.complex64",
    ),
    "x of 8-bit floats": (
        (ones(4, 8).to(torch.float8_e4m3fn), ones(6, 8).to(torch.float8_e4m3fn)),
        {},
        "FP8 is not supported",
    ),
    "another dtype of the weight": (
        (ones(4, 8), ones(6, 8, dtype=torch.bfloat16)),
        {},
        "weight is torch.bfloat16, but x is torch.float32",
    ),
    "another dtype of the bias": (
        (ones(4, 8), ones(6, 8), ones(6, dtype=torch.float64)),
        {},
        "bias is torch.float64, but x is torch.float32",
    ),
    "another inner dimension": (
        (ones(4, 8), ones(6, 9)),
        {},
        r"weight is \[6, 9\], but x has 8 features: weight must be \[out, 8\]",
    ),
    "the weight transposed": ((ones(4, 8), ones(8, 6)), {}, r"weight must be \[out, 8\]"),
    "a weight of three dimensions": (
        (ones(4, 8), ones(2, 6, 8)),
        {},
        r"weight must be \[out, in\]",
    ),
    "a bias of another length": (
        (ones(4, 8), ones(6, 8), ones(7)),
        {},
        r"bias must be \[6\]; got shape \[7\]",
    ),
    "a bias of two dimensions": (
        (ones(4, 8), ones(6, 8), ones(1, 6)),
        {},
        r"bias must be \[6\]; got shape \[1, 6\]",
    ),
    "the weight on another device": (
        (ones(4, 8), ones(6, 8, device="meta")),
        {},
        "weight lies on meta, but x on cpu",
    ),
    "the bias on another device": (
        (ones(4, 8), ones(6, 8), ones(6, device="meta")),
        {},
        "bias lies on meta, but x on cpu",
    ),
    "an unknown engine": (
        (ones(4, 8), ones(6, 8)),
        {"engine": "nccl"},
        r"engine must be one of .*auto.*; got 'nccl'",
    ),
    "no engine": ((ones(4, 8), ones(6, 8)), {"engine": None}, "engine must be one of"),
    "a group by name": (
        (ones(4, 8), ones(6, 8)),
        {"group": "default"},
        "group must be a ProcessGroup, a 1-D DeviceMesh.* not str",
    ),
    "a group as a list of ranks": ((ones(4, 8), ones(6, 8)), {"group": [0, 1]}, "not list"),
}

GATHER: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "the features as the cut dimension": (
        (ones(4, 8), ones(6, 8)),
        {"gather_dim": 1},
        r"gather_dim=1 is none of the token dimensions of x, 0 to 0 \(shape \[4, 8\]",
    ),
    "the features from the right": ((ones(2, 4, 8), ones(6, 8)), {"gather_dim": -1}, "gather_dim"),
    "a dimension that is no number": ((ones(4, 8), ones(6, 8)), {"gather_dim": 0.0}, "be an int"),
    "a dimension too far": ((ones(2, 4, 8), ones(6, 8)), {"gather_dim": 3}, "gather_dim=3"),
    "a dimension too far left": ((ones(2, 4, 8), ones(6, 8)), {"gather_dim": -4}, "gather_dim=-4"),
    "rows that are not this rank's shard": (
        (ones(5, 8), ones(6, 8)),
        {"gathered_size": 8},
        "x has 5 rows in dimension 0, but of gathered_size=8 rank . of 2 has 4",
    ),
    "rows that are not this rank's shard, in another dimension": (
        (ones(3, 5, 8), ones(6, 8)),
        {"gathered_size": 8, "gather_dim": 1},
        "x has 5 rows in dimension 1, but of gathered_size=8 rank . of 2 has 4",
    ),
    "a negative size": ((ones(0, 8), ones(6, 8)), {"gathered_size": -4}, "must not be negative"),
    "no weights": ((ones(4, 8), []), {}, "weight is an empty sequence"),
    "one of several weights": (
        (ones(4, 8), [ones(6, 8), ones(6, 9)]),
        {},
        r"weight\[1\] is \[6, 9\], but x has 8 features",
    ),
    "one of several weights is none": ((ones(4, 8), [ones(6, 8), None]), {}, "weight must be a t"),
    "fewer biases than weights": (
        (ones(4, 8), [ones(6, 8), ones(5, 8)], [ones(6)]),
        {},
        "bias must be None or a sequence of 2, one per weight; got 1",
    ),
    "one bias for several weights": (
        (ones(4, 8), [ones(6, 8), ones(6, 8)], ones(6)),
        {},
        "one per weight; got one tensor",
    ),
    "several biases for one weight": (
        (ones(4, 8), ones(6, 8), [ones(6)]),
        {},
        "bias is a sequence, but weight is one tensor",
    ),
    "one of several biases": (
        (ones(4, 8), [ones(6, 8), ones(5, 8)], [None, ones(6)]),
        {},
        r"bias\[1\] must be \[5\]; got shape \[6\]",
    ),
}

SUM: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "several weights": ((ones(4, 8), [ones(6, 8)]), {}, "weight"),
    "several biases": ((ones(4, 8), ones(6, 8), [ones(6)]), {}, "bias"),
    "a narrower wire": (
        (ones(4, 8), ones(6, 8)),
        {"wire_dtype": torch.bfloat16},
        "wire_dtype must be x's dtype or float32; got torch.bfloat16",
    ),
    "a wire that narrows": (
        (ones(4, 8).double(), ones(6, 8).double()),
        {"wire_dtype": torch.float32},
        "wire_dtype=float32 would narrow a float64 x",
    ),
}

SCATTER: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "the features as the cut dimension": (
        (ones(4, 8), ones(6, 8)),
        {"scatter_dim": 1},
        "scatter_dim=1 is none of the token dimensions of x",
    ),
    "a dimension too far left": ((ones(4, 8), ones(6, 8)), {"scatter_dim": -3}, "scatter_dim=-3"),
}

TABLES = {
    "all_gather_linear": {**LINEAR, **GATHER},
    "replicated_linear": LINEAR,
    "linear_reduce_scatter": {**LINEAR, **SUM, **SCATTER},
    "linear_all_reduce": {**LINEAR, **SUM},
}


def refused(work: Callable[[], Any], words: str) -> str:
    """What is wrong with how ``work`` fails; "" if it raises ValueError with these words."""
    try:
        work()
    except ValueError as error:
        try:
            with pytest.raises(ValueError, match=words):
                raise error
        except AssertionError as difference:
            return str(difference)
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def give_bad_arguments(rank: int, op: str) -> dict[str, str]:
    wrong = {}
    with fc.Communicator.of(timeout_s=20) as comm:
        for name, (arguments, options, words) in TABLES[op].items():
            work = partial(getattr(fc, op), *arguments, **{"group": comm, **options})
            if fault := refused(work, words):
                wrong[name] = fault
        for form in OPS:
            assert right(form, comm, call(form, comm))
    return wrong


@pytest.mark.parametrize("op", TABLES)
def test_bad_arguments_of_operations(pools: Pools, op: str) -> None:
    assert pools(2).run(give_bad_arguments, op, timeout_s=40) == [{}, {}]


def give_one_rank_bad_arguments(rank: int) -> None:
    """The others wait for it meanwhile, and need not know."""
    with fc.Communicator.of(timeout_s=20) as comm:
        if rank == 1:
            assert not refused(lambda: fc.all_gather_linear(ones(4, 8), ones(6, 9)), "8 features")
            assert not refused(lambda: comm.reserve("matmul", (4, 8)), "no operation")
            assert not refused(lambda: comm.symmetric_empty(-1), "negative")
        for form in OPS:
            assert right(form, comm, call(form, comm))


def test_bad_arguments_on_one_rank_only(pools: Pools) -> None:
    pools(3).run(give_one_rank_bad_arguments, timeout_s=40)


def misuse_communicators(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = dist.new_group([0, 1])
    outside = line if rank >= 2 else dist.GroupMember.NON_GROUP_MEMBER
    comm = fc.Communicator.of(timeout_s=20)
    of = fc.Communicator.of
    cases: dict[str, tuple[Callable[[], Any], str]] = {
        "2-D mesh": (lambda: of(mesh), r"DeviceMesh of 2 dimensions.*mesh\['tp'\]"),
        "2-D mesh in an operation": (
            lambda: fc.all_gather_linear(ones(4, 8), ones(6, 8), group=mesh),
            "DeviceMesh of 2 dimensions",
        ),
        "group of a wrong type": (lambda: of(3), "group must be .* not int"),
        "a group without this rank": (lambda: of(outside), "no member"),
        "timeout_s=0": (lambda: of(timeout_s=0), "timeout_s must be positive; got 0"),
        "timeout_s=-1": (lambda: of(timeout_s=-1.5), "timeout_s must be positive; got -1.5"),
        "timeout_s=nan": (lambda: of(timeout_s=float("nan")), "timeout_s must be positive"),
        "timeout_s for a new one": (lambda: of(channel="new", timeout_s=0), "timeout_s"),
        "a negative shape": (lambda: comm.symmetric_empty(2, -3), r"negative.*\[2, -3\]"),
        "reserve of an unknown operation": (
            lambda: comm.reserve("matmul", (4, 8)),
            "no operation 'matmul'",
        ),
        "reserve without tokens": (
            lambda: comm.reserve("all_gather_linear", (8,)),
            r"a global shape is \[tokens, …, features\]; got \[8\]",
        ),
        "reserve of a negative shape": (
            lambda: comm.reserve("all_gather_linear", (-4, 8)),
            r"got \[-4, 8\]",
        ),
    }
    wrong = {name: fault for name, case in cases.items() if (fault := refused(*case))}
    with comm:
        for form in OPS:
            assert right(form, comm, call(form, comm))
    with fc.Communicator.of(mesh["tp"]) as tp:  # what the message recommends
        assert tp.world_size == 2
        tp.barrier()
    dist.barrier()
    dist.destroy_process_group()
    for name, work in (
        ("no torch.distributed", fc.Communicator.of),
        ("an operation without it", lambda: fc.all_gather_linear(ones(4, 8), ones(6, 8))),
    ):
        if fault := refused(work, "init_process_group first"):
            wrong[name] = fault
    return wrong


def test_misused_communicators(pools: Pools) -> None:
    pool = pools(4)
    results = pool.run(misuse_communicators, timeout_s=60)
    pool.restart()  # its ranks have left their group
    assert results == [{}] * 4
