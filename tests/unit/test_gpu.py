"""What calls on GPU tensors decide and say, as far as no GPU is needed for it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fusedcomm as fc
from fusedcomm.engines.across.parts import Part
from fusedcomm.engines.triton.config import Tiles, fitting
from fusedcomm.gpu import GpuSide
from fusedcomm.kernels.signals import CAPACITY, CONSUMED, FAILED, READY
from fusedcomm.planning import exchanges, spaces, spaces_inside
from fusedcomm.planning import tensor_parallel as planning
from fusedcomm.protocol import Space
from fusedcomm.symmetric import cuda
from fusedcomm.symmetric.devices import Domain, Facts, judge
from fusedcomm.symmetric.groups import TorchGroup
from tests.unit.test_planning import Ranks, decide

GPU = torch.device("cuda", 0)


# What the ranks' GPUs allow


def facts(number: int, **changes: Any) -> Facts:
    given: dict[str, Any] = {"uuid": f"gpu {number}", "name": "H100", "capability": (9, 0)}
    return Facts(**(given | changes))


def test_a_gpu_each_reached_by_all() -> None:
    assert judge([facts(0), facts(1), facts(2)]) == Domain(None, copies=True)


def test_one_gpu_shared_where_torch_allows_it() -> None:
    """Copies could need the multiprocessors of the kernel that waits for them."""
    shared = [facts(0, overlapping=True), facts(0, overlapping=True)]
    assert judge(shared) == Domain(None, copies=False)
    found = judge([facts(0), facts(0)])
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in str(found.obstacle)


def test_one_queue_for_all_streams_allows_no_copies() -> None:
    assert judge([facts(0), facts(1, one_queue=True)]) == Domain(None, copies=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capability": (7, 5), "name": "T4"}, "rank 1 has a T4 of compute capability 7.5"),
        ({"hip": True}, "ROCm"),
        ({"unreachable": ("gpu 2",)}, "the GPU of rank 1 cannot address that of rank 2"),
    ],
)
def test_obstacles(changes: dict[str, Any], said: str) -> None:
    found = judge([facts(0), facts(1, **changes), facts(2)])
    assert said in str(found.obstacle) and not found.copies


def test_facts_travel() -> None:
    for each in (facts(0), facts(1, hip=True, unreachable=("a", "b"))):
        assert Facts.from_bytes(each.to_bytes()) == each


# Plans


def ranks(obstacle: str | None = None, copies: bool = True, world_size: int = 2) -> Ranks:
    return Ranks(world_size, domain=Domain(obstacle, copies))


def test_gpu_tensors_take_the_kernels() -> None:
    assert decide(ranks(), device=GPU).engine == "triton"
    assert decide(ranks(), device=GPU, engine="triton").engine == "triton"


def test_kernels_serve_domains_of_gpus() -> None:
    """In each, with torch.distributed between them, where no domain has an obstacle."""
    one = Ranks(2, domain=Domain(None, copies=True))
    group = Ranks(4, shares_memory=False, inside=one, domain=Domain(None, copies=True))
    chosen = decide(group, device=GPU)
    assert (chosen.engine, chosen.one_shot) == ("triton", False) and "each domain" in chosen.reason
    told = Domain("in domain 1, several ranks share one GPU", copies=False)
    blocked = Ranks(4, shares_memory=False, inside=one, domain=told)
    with pytest.warns(UserWarning, match="in domain 1, several ranks share one GPU"):
        assert decide(blocked, device=GPU).engine == "plain"
    with pytest.raises(ValueError, match="in domain 1"):
        decide(blocked, device=GPU, engine="triton")


@pytest.mark.parametrize(
    ("changes", "env", "why"),
    [
        ({"engine": "host"}, "0", "host engine serves CPU tensors"),
        ({"dtype": torch.float64, "wire": torch.float64}, "0", "float32, float16 and bfloat16"),
        ({}, "1", "TRITON_INTERPRET=1"),
        ({}, "0", "cannot address"),
    ],
)
def test_kernels_that_cannot_be_had(
    changes: dict[str, Any], env: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", env)
    group = ranks("the GPU of rank 0 cannot address that of rank 1")
    with pytest.raises(ValueError, match=why):
        decide(group, device=GPU, **({"engine": "triton"} | changes))
    if "engine" not in changes:
        with pytest.warns(UserWarning, match=why):
            assert decide(group, device=GPU, **changes).engine == "plain"


def test_copy_engines_carry_large_chunks_between_gpus() -> None:
    large: dict[str, Any] = {"device": GPU, "features": 4096, "dtype": torch.bfloat16}
    large["wire"] = torch.bfloat16
    gather = "all_gather_linear"
    chosen = decide(ranks(), gather, 2048, **large)
    assert chosen.copies and "copied" in chosen.text and "copy engines" in chosen.reason
    rows = planning.COPIED_BYTES // (4096 * 2)
    assert decide(ranks(), gather, 2 * rows, **large).copies
    assert not decide(ranks(), gather, 2 * rows - 2, **large).copies
    assert not decide(ranks(copies=False), gather, 2048, **large).copies
    assert not decide(ranks(world_size=1), gather, 2048, **large).copies
    # What goes out of a product, and few rows, are stored by the kernels.
    assert not decide(ranks(), "linear_reduce_scatter", 2048, **large).copies
    assert not decide(ranks(), "linear_all_reduce", 2048, **large).copies
    for op in ("all_gather_weight_grad", "linear_reduce_scatter_backward"):
        assert decide(ranks(), op, 2048, **large).copies


def test_what_is_reserved_is_what_the_kernels_take() -> None:
    """On a GPU all rows are pushed, into a region for each source."""
    for op in ("all_gather_linear", "linear_reduce_scatter"):
        (space,) = spaces(op, (13, 2, 24), 3, torch.bfloat16, True, GPU)
        bounds = planning.scaled_bounds(13, 3, 2)
        assert space == planning.scatter_space(bounds, 24 * 2)
    (space,) = spaces("linear_all_reduce", (5, 8, 100), 4, torch.float32, False, GPU)
    for shots in (1, 2):
        for tile in ((64, 128), (64, 64)):
            tiles = -(-40 // tile[0]) * -(-100 // tile[1])
            taken = planning.exchange_space(40, 100, 4, 4, shots, tiles)
            assert space.region_bytes >= taken.region_bytes and space.chunks >= taken.chunks
    with pytest.raises(ValueError, match="on cuda"):
        spaces("dispatch", (4, 4), 2, torch.float32, False, GPU)


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 13])
@pytest.mark.parametrize("domains", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
def test_what_is_reserved_in_domains_is_what_the_kernels_take(
    rows: int, domains: tuple[tuple[int, ...], ...]
) -> None:
    """A domain's kernels take what its ranks' parts of the tensor take."""
    bounds = planning.scaled_bounds(rows, 4, 1)

    def reserved(op: str) -> list[Space]:
        return spaces_inside(op, (rows, 24), 2, 2, torch.bfloat16, True, GPU)

    for ranks_of_one in domains:
        inner = Part(bounds, ranks_of_one, 0).inner
        taken = planning.scatter_space(inner, 24 * 2)
        for op in planning.OPS:
            assert any(_covers(held, taken) for held in reserved(op)), op
        part = inner[0][1] * 24
        pieces = exchanges.pieces_of(GPU, part).number
        gathered = exchanges.exchange_space(2, part * 2, pieces)
        for op in ("linear_all_reduce", "all_gather"):
            assert any(_covers(held, gathered) for held in reserved(op)), op
    with pytest.raises(ValueError, match="'dispatch' of several domains"):
        spaces_inside("dispatch", (4, 4, 4), 2, 2, torch.float32, False, GPU)


def _covers(held: Space, taken: Space) -> bool:
    return (
        held.kind == taken.kind
        and held.regions >= taken.regions
        and held.region_bytes >= taken.region_bytes
        and held.chunks >= taken.chunks
    )


def test_stages_fit_into_shared_memory() -> None:
    tiles = Tiles(128, 256, 64, 8, 8, 4)
    assert fitting(tiles, 2, 232_448).stages == 4
    assert fitting(tiles, 2, 166_912).stages == 3
    assert fitting(tiles, 2, 101_376).stages == 2


# The record


def side(record: list[int]) -> Any:
    found: Any = GpuSide.__new__(GpuSide)
    found.host_record = torch.tensor(record, dtype=torch.int32)
    found._watch = mock.Mock(rank=1, timeout_s=5.0)
    found._ops = ["", "all_gather_linear"]
    return found


def test_a_record_becomes_an_error() -> None:
    side([0] * 8).raise_recorded()
    found = side([1, READY.value, 3, 2, 7, 6, 1, 0])
    with pytest.raises(fc.PeerTimeoutError) as caught:
        found.raise_recorded()
    for part in ("rank 1 waited 5 s", "all_gather_linear", "epoch 7", "chunk 2", "of rank 3"):
        assert part in str(caught.value)
    found._watch.fail.assert_called_once_with(caught.value)
    with pytest.raises(fc.PeerTimeoutError, match=r"epoch -2147483648\) of rank 0"):
        side([1, CONSUMED.value, 0, -1, 2**31 - 1, 5, 1, 0]).raise_recorded()
    with pytest.raises(fc.CapacityError, match="rank 2 would receive 90 rows.*capacity is 64"):
        side([1, CAPACITY.value, 2, -1, 64, 90, 1, 0]).raise_recorded()
    with pytest.raises(fc.PeerTimeoutError, match="another rank gave up"):
        side([1, FAILED.value, -1, -1, 1, 1, 1, 0]).raise_recorded()


# Memory on torch's symmetric memory, with a stand-in for it


class Torch:
    """One process's view of a group: what it allocates, and what the peers have."""

    def __init__(
        self, rank: int, peers: dict[int, torch.Tensor], offset: int = 0, remote: bool = False
    ) -> None:
        self.rank, self.peers, self.offset, self.remote = rank, peers, offset, remote

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.own = torch.full((size,), 77, dtype=dtype)
        self.peers.setdefault(1 - self.rank, self.own)  # whoever is first sees itself
        return self.own

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Any:
        assert group == "a group"

        def get_buffer(
            rank: int, shape: tuple[int], dtype: torch.dtype, offset: int = self.offset
        ) -> torch.Tensor:
            whole = self.own if rank == self.rank else self.peers[rank]
            assert len(whole) == shape[0] and dtype == torch.uint8
            return whole[offset:]

        def get_remote_tensor(rank: int, shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
            return get_buffer(rank, shape, dtype, 0)

        more = {"get_remote_tensor": get_remote_tensor} if self.remote else {}
        return SimpleNamespace(get_buffer=get_buffer, multicast_ptr=0, **more)


def allocate(stand_in: Torch, label: str = "x", **first: Any) -> list[cuda.CudaSegment]:
    with contextlib.ExitStack() as stack:
        module = "torch.distributed._symmetric_memory"
        for name in ("empty", "rendezvous"):
            stack.enter_context(mock.patch(f"{module}.{name}", getattr(stand_in, name)))
        stack.enter_context(mock.patch("torch.cuda.device", lambda _: contextlib.nullcontext()))
        stack.enter_context(mock.patch("torch.cuda.synchronize"))
        group = TorchGroup("a group", stand_in.rank, 2)
        return cuda.allocate(group, label, 1000, torch.device("cpu"), **first)


def memory_of_rank_0(label: str = "x") -> torch.Tensor:
    first = Torch(0, {})
    allocate(first, label)
    return first.own


def test_allocations_are_paired_and_zero() -> None:
    stand_in = Torch(1, {0: memory_of_rank_0()})
    segments = allocate(stand_in, first_words=[0, 64], first_value=5)
    assert [segment.size for segment in segments] == [1024, 1024]
    words = segments[1].tensor(0, (256,), torch.int32)
    assert words[0] == words[64] == 5 and words.sum() == 10
    assert not segments[0].tensor(0, (1024,), torch.uint8).any()
    assert segments[0].multicast is None
    segments[0].copy_word(3, segments[1], 64)
    assert stand_in.peers[0][:1024].view(torch.int32)[3] == 5
    with pytest.raises(TypeError, match="kernels and stream copies only"):
        segments[0].words  # noqa: B018


def test_allocations_paired_crosswise_are_noticed() -> None:
    with pytest.raises(fc.MismatchError, match="rank 1 got memory of rank 0 that is not for"):
        allocate(Torch(1, {0: memory_of_rank_0("channel a")}), "channel b")


def test_an_unknown_layout_is_noticed() -> None:
    stand_in = Torch(1, {0: memory_of_rank_0()}, offset=128)
    with pytest.raises(fc.SharedMemoryError, match="at an offset"):
        allocate(stand_in)
    stand_in = Torch(1, {0: memory_of_rank_0()}, offset=128, remote=True)
    assert [segment.size for segment in allocate(stand_in)] == [1024, 1024]
