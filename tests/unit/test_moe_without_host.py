"""With a capacity the Triton engine never waits for a GPU, shown where there is none.

Tensors here lie on torch's device "meta" in place of a GPU: they have shapes, and nothing in them.
So whatever needs a number out of one fails, as does a copy to the host. Kernels are not started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.engines.choices import dot_choices
from fusedcomm.engines.experts import Experts, Style
from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton import config, moe, routing
from fusedcomm.ops.moe import _ids_of
from fusedcomm.planning.moe import Plan, Terms

GPU = torch.device("meta")
RANK, WORLD_SIZE, TOKENS, TOP_K, HIDDEN, FFN, CAPACITY = 1, 3, 10, 2, 16, 8, 40
TERMS = Terms(7, TOP_K, (), 4, CAPACITY, TOKENS)
PLAN = Plan("a call", "triton", "it is a test")


class Launched:
    """A call's launches, of which only the grids are kept."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device, self.gpu = RANK, WORLD_SIZE, GPU, object()
        self.programs, self.slot = 132, 0
        self.record = torch.zeros(8, dtype=torch.int32, device=GPU)
        self.ranks: dict[str, Any] = {"bases": None, "rank": RANK, "world_size": WORLD_SIZE}
        self.flags = dict.fromkeys(
            ("epoch_word", "ready_word", "chunks", "data_offset", "region_bytes"), 64
        )
        self.waits = {"limit": 1000, "record": self.record}
        self.workspace = SimpleNamespace(pointers=None, part=self._part)
        self.beside: list[Launched] = []
        self.grids: dict[str, Any] = {}

    def run(self, kernel: Any, programs: int, kind: str, name: str, **arguments: Any) -> None:
        assert type(programs) is int
        self.grids[name] = programs

    def call(self, work: Any) -> None:
        work()

    def counters(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=GPU)

    @staticmethod
    def _part(owner: int, slot: int, writer: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=GPU)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Fake tensors from here on; the launches that are made."""
    made: list[Launched] = []

    @contextlib.contextmanager
    def launches(
        comm: Any, op: str, space: Any, text: str, device: torch.device, *beside: Any
    ) -> Iterator[Launched]:
        made.append(Launched())
        made[-1].beside = [made[-1]] * len(beside)
        yield made[-1]

    for module in (moe, routing):
        monkeypatch.setattr(module, "launches", launches)
    monkeypatch.setattr(config, "_chip", lambda device: "sm_90")
    monkeypatch.setattr(config, "_shared_bytes", lambda device: 232_448)
    yield made


COMM: Any = SimpleNamespace(rank=RANK, world_size=WORLD_SIZE)


def tensors() -> dict[str, Tensor]:
    made = {
        "x": torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=GPU),
        "weights": torch.empty(TOKENS, TOP_K, device=GPU),
        "ids": torch.empty(TOKENS, TOP_K, dtype=torch.int32, device=GPU),
        "number": torch.empty((), dtype=torch.int32, device=GPU),
    }
    shapes = {"w13": (3, 2 * FFN, HIDDEN), "w2": (3, HIDDEN, FFN)}
    shapes |= {"b13": (3, 2 * FFN), "b2": (3, HIDDEN)}  # type: ignore[dict-item]
    like = {"dtype": torch.bfloat16, "device": GPU}
    return made | {name: torch.empty(shape, **like) for name, shape in shapes.items()}


def routed(given: dict[str, Tensor], overflow: str, terms: Terms = TERMS) -> Routed:
    ids = _ids_of(given["ids"], given["number"])
    table, order, slot, *rest = routing.route(COMM, PLAN, terms, ids, overflow)
    on_gpu = [table, order, slot, *rest]
    assert all(each.device == GPU for each in on_gpu)
    return Routed(terms, RANK, WORLD_SIZE, table, order, slot)


@pytest.mark.parametrize("overflow", ["error", "drop"])
def test_no_operation_waits_for_the_gpu(launched: list[Launched], overflow: str) -> None:
    given = tensors()
    x, weights = given["x"], given["weights"]
    own = Experts(
        given["w13"], given["w2"], given["b13"], given["b2"], Style("swiglu", "gate_up", False)
    )
    route = routed(given, overflow)
    rows = moe.dispatch(COMM, PLAN, x, route.scale(weights), route)
    assert rows.shape == (CAPACITY, HIDDEN)
    y, kept = moe.combine(COMM, PLAN, rows, weights, route, True)
    assert y.shape == x.shape and kept.shape == (TOKENS, TOP_K, HIDDEN)
    y, x_rows, z, kept = moe.moe_ffn(COMM, PLAN, x, weights, own, route, True, True)
    moe.moe_ffn_choices(COMM, PLAN, z, own, route)
    found = moe.moe_ffn_backward(COMM, PLAN, y, weights, x_rows, z, own, route, True, [True] * 4)
    assert all(grad is not None for grad in found)
    dot_choices(kept, route.slot, y, torch.float32)
    kernels = {name for call in launched for name in call.grids}
    assert {"push counts", "wait for all counts", "places of rows", "push rows"} <= kernels
    assert {"experts, up", "experts, down", "gradient of the experts' weights"} <= kernels
    counted = sum("push counts" in call.grids for call in launched)
    assert counted == (2 if overflow == "drop" else 1)


def test_without_capacity_the_table_is_read(launched: list[Launched]) -> None:
    """So that the test above can fail."""
    given = tensors()
    terms = replace(TERMS, capacity=None)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        routed(given, "error", terms)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.bincount(x),
        lambda x: torch.zeros(3).copy_(x),
    ],
)
def test_looking_into_such_a_tensor_fails(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)):
        look(torch.empty(3, dtype=torch.int64, device=GPU))
