"""What is checked on GPUs; every function is called on all ranks, see ``running``.

Where there is no GPU, those that need no stream and no timer run on CPU ranks in Triton's
interpreter (``tests/interpreter/test_gpu_checks.py``), so that they are right when they first meet
one; a graph is then a recording of its calls, see ``recorded``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.ops.library import tensor_parallel as library
from tests.gpu import domain_checks, exchange_checks, expert_checks, layer_checks
from tests.gpu.common import DEVICE, captured, comm_of, late, settle
from tests.gpu.running import Check
from tests.ranks.cases import OPS, Case
from tests.ranks.checking import check as check_cases
from tests.ranks.checking import check_planned

#: Rounds of calls under skew, and replays of a graph.
ROUNDS, REPLAYS = 200, 12


def cases(dtype: torch.dtype) -> list[Case]:
    """One dtype's share of what every operation is tried on.

    Features are either multiples of 64 or odd, since kernels are compiled anew for other kinds; and
    only bfloat16 has odd ones.
    """
    some = []
    for op in OPS:
        some.append(Case(op, (150,), k=256, n=320))
        some.append(Case(op, (2,), k=256, n=320, values="ones"))
        if dtype == torch.bfloat16:
            some.append(Case(op, (5, 8), k=256, n=320, layout="transposed"))
            some.append(Case(op, (37,), k=51, n=35))
    some.append(Case("linear_reduce_scatter", (0,), k=256, n=320))
    if dtype == torch.bfloat16:
        options = {"return_gathered": True}
        some.append(Case("all_gather_linear", (48,), k=256, n=(320, 64), options=options))
        wide = {"wire_dtype": torch.float32}
        some.append(Case("linear_reduce_scatter", (48,), k=256, n=320, options=wide))
    return [replace(case, dtype=dtype, engine="triton", device=DEVICE) for case in some]


def float32(rank: int, world_size: int) -> None:
    check_cases(rank, cases(torch.float32), comm_of())


def float16(rank: int, world_size: int) -> None:
    check_cases(rank, cases(torch.float16), comm_of())


def bfloat16(rank: int, world_size: int) -> None:
    check_cases(rank, cases(torch.bfloat16), comm_of())


def pieces(rank: int, world_size: int) -> None:
    comm_of()
    check_planned(rank, cases(torch.bfloat16)[::3], {"pieces": 3, "one_shot_bytes": 0})


def copy_engine(rank: int, world_size: int) -> None:
    """Rows carried by copies on a second stream, beside a kernel that waits for them."""
    comm_of(timeout_s=10.0)
    moving = [c for c in cases(torch.bfloat16) if c.op in ("all_gather_linear", OPS[2])]
    check_planned(rank, moving, {"copies": True})


def symmetric_tensors(rank: int, world_size: int) -> None:
    comm = comm_of()
    tensor = comm.symmetric_empty(5, 3, dtype=torch.int32, device=DEVICE)
    assert tensor.local.device.type == DEVICE and tensor.local.shape == (5, 3)
    assert tensor.pointers.tolist() == [peer.data_ptr() for peer in tensor.peers]
    tensor.local.fill_(rank)
    settle()
    comm.barrier()
    assert [int(peer.sum()) for peer in tensor.peers] == [15 * r for r in range(world_size)]
    comm.barrier()
    tensor.peers[(rank + 1) % world_size][rank % 5] = 100 + rank
    settle()
    comm.barrier()
    left = (rank - 1) % world_size
    assert tensor.local[left % 5].tolist() == [100 + left] * 3
    comm.barrier()


def auto_takes_triton(rank: int, world_size: int) -> None:
    comm = comm_of()
    x, weight = torch.ones(4, 32, device=DEVICE), torch.ones(16, 32, device=DEVICE)
    with fc.trace() as trace:
        fc.all_gather_linear(x, weight, group=comm)
    assert [plan.engine for plan in trace.plans] == ["triton"], trace.plans


class Model:
    """An all-gather and a reduce-scatter on 0/1 data, whose results are exact."""

    def __init__(self, comm: fc.Communicator, rows: int, rank: int, world_size: int) -> None:
        self.comm, self.rows, self.world_size = comm, rows, world_size
        generator = torch.Generator().manual_seed(7)
        self.up = [self._binary(generator, 128, 64) for _ in range(world_size)]
        self.down = [self._binary(generator, 64, 128) for _ in range(world_size)]
        self.rank = rank
        self.x = torch.zeros(rows, 64, dtype=torch.bfloat16, device=DEVICE)

    @staticmethod
    def _binary(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) < 0.1).to(DEVICE, torch.bfloat16)

    def data(self, number: int) -> list[torch.Tensor]:
        """Every rank's input of a round."""
        generator = torch.Generator().manual_seed(number)
        return [self._binary(generator, self.rows, 64) for _ in range(self.world_size)]

    def gather(self) -> torch.Tensor:
        return fc.all_gather_linear(self.x, self.up[self.rank], group=self.comm, engine="triton")

    def calls(self, layers: int = 1) -> list[torch.Tensor]:
        """``layers`` times both operations on ``x``; all results."""
        found = []
        for _ in range(layers):
            h = self.gather()
            y = fc.linear_reduce_scatter(
                h.clamp(max=1), self.down[self.rank], group=self.comm, engine="triton"
            )
            found += [h, y]
        return found

    def right(self, number: int, layers: int = 1) -> list[torch.Tensor]:
        whole = torch.cat(self.data(number)).float()
        hs = [whole @ up.float().t() for up in self.up]
        parts = [h.clamp(max=1) @ down.float().t() for h, down in zip(hs, self.down, strict=True)]
        y = torch.stack(parts).sum(0).chunk(self.world_size)[self.rank]
        return [hs[self.rank].bfloat16(), y.bfloat16()] * layers

    def check(self, found: list[torch.Tensor], number: int) -> None:
        for got, right in zip(found, self.right(number, len(found) // 2), strict=True):
            assert torch.equal(got, right), f"round {number}: {(got != right).sum()} differ"

    def eager(self, number: int, layers: int = 1) -> None:
        self.x.copy_(self.data(number)[self.rank])
        self.check(self.calls(layers), number)


def _replays(rank: int, world_size: int, layers: int) -> None:
    """Replays with new data, mixed with eager calls of the same and of a larger shape."""
    comm = comm_of("graph")
    model = Model(comm, 40, rank, world_size)
    model.eager(0, layers)  # compiles, and allocates
    replay, found = captured(comm, lambda: model.calls(layers))
    larger = Model(comm, 100, rank, world_size)
    for number in range(1, REPLAYS + 1):
        model.x.copy_(model.data(number)[rank])
        for output in found:
            output.fill_(float("nan"))
        replay()
        model.check(found, number)
        if number % 3 == 1:
            model.eager(100 + number)
        if number % 4 == 2:
            larger.eager(200 + number)  # grows: the graph keeps the memory it was captured with
        if number % 5 == 0:
            replay()
            replay()
            model.check(found, number)
    settle()
    comm.close()


def graph_of_one_call(rank: int, world_size: int) -> None:
    """One slot, again and again."""
    comm = comm_of("one call")
    model = Model(comm, 40, rank, world_size)
    model.eager(0)
    replay, (h,) = captured(comm, lambda: [model.gather()])
    for number in range(1, REPLAYS + 1):
        model.x.copy_(model.data(number)[rank])
        replay()
        assert torch.equal(h, model.right(number)[0]), f"replay {number}"
        if number % 3 == 0:
            model.eager(100 + number)
    settle()
    comm.close()


def graph_of_three_layers(rank: int, world_size: int) -> None:
    _replays(rank, world_size, 3)


def graph_mixed_with_eager(rank: int, world_size: int) -> None:
    _replays(rank, world_size, 1)


def graph_of_copies(rank: int, world_size: int) -> None:
    """Copies on a second stream, captured: flags are raised by copies of the device's epoch."""
    with copied():
        _replays(rank, world_size, 1)


@contextlib.contextmanager
def copied() -> Iterator[None]:
    """Have rows carried by copies."""
    decide = library.plan
    library.plan = lambda *args, **kwargs: replace(decide(*args, **kwargs), copies=True)
    try:
        yield
    finally:
        library.plan = decide


def growth_during_capture(rank: int, world_size: int) -> None:
    """It raises and says what to do; what it says helps; the communicator stays usable."""
    comm = comm_of("growth")
    small, large = Model(comm, 8, rank, world_size), Model(comm, 300, rank, world_size)
    small.eager(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            large.calls()
    except ValueError as error:
        assert "reserve" in str(error), error
    else:
        raise AssertionError("memory grew while a graph was captured")
    small.eager(2)
    total = 300 * world_size
    shapes = {"all_gather_linear": (total, 64), "linear_reduce_scatter": (total, 64)}
    for op, shape in shapes.items():
        comm.reserve(op, shape, dtype=torch.bfloat16, device=DEVICE)
    before = comm.workspace_bytes()
    large.eager(3)
    assert comm.workspace_bytes() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = large.calls()
    large.x.copy_(large.data(4)[rank])
    graph.replay()
    large.check(found, 4)
    settle()
    comm.close()


def skew(rank: int, world_size: int) -> None:
    """Many calls while the ranks are late in turn, by more than two calls take."""
    comm = comm_of("skew")
    model = Model(comm, 24, rank, world_size)
    model.eager(0)
    inputs = [model.data(number)[rank] for number in range(4)]
    right = [model.right(number) for number in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for number in range(ROUNDS):
        if number % (7 + rank) == rank:
            late()
        model.x.copy_(inputs[number % 4])
        for got, expected in zip(model.calls(), right[number % 4], strict=True):
            wrong += (got != expected).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements of {ROUNDS} rounds are wrong"


def counters_wrap_around(rank: int, world_size: int) -> None:
    comm = comm_of("wraps")
    comm.memory.first_epoch = 2**31 - 3
    model = Model(comm, 16, rank, world_size)
    for number in range(8):
        model.eager(number)
    settle()
    comm.close()


def two_streams(rank: int, world_size: int) -> None:
    """Calls of one communicator from two streams run in the order in which they are made."""
    comm = comm_of("streams")
    model = Model(comm, 24, rank, world_size)
    other = torch.cuda.Stream()
    for number in range(6):
        model.x.copy_(model.data(number)[rank])
        other.wait_stream(torch.cuda.current_stream())
        if number % 2:
            with torch.cuda.stream(other):
                torch.cuda._sleep(1_000_000)
                found = model.calls()
            torch.cuda.current_stream().wait_stream(other)
        else:
            found = model.calls()
        model.check(found, number)
    settle()
    comm.close()


def disagreement(rank: int, world_size: int) -> None:
    """Ranks in different calls are told so, on the host."""
    if world_size == 1:
        return
    comm = comm_of("disagree")
    model = Model(comm, 16 if rank else 17, rank, world_size)
    try:
        model.calls()
        torch.cuda.synchronize()
        model.calls()
    except (fc.MismatchError, fc.AbortedError) as error:
        assert "disagree" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    comm.close()


def timeout_record(rank: int, world_size: int) -> None:
    """A rank that does not come: waits on the device end, and the host raises with all it knows."""
    if world_size == 1:
        return
    comm = comm_of("late", timeout_s=2.0)
    model = Model(comm, 16, rank, world_size)
    model.eager(1)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != 0:
        model.gather()
        for _ in range(3):  # behind the first, they do nothing and so cost no time
            with contextlib.suppress(fc.PeerTimeoutError, fc.ClosedError):
                model.calls()
        torch.cuda.synchronize()
        try:
            model.calls()
        except (fc.PeerTimeoutError, fc.ClosedError) as error:
            text = str(error)
            assert "all_gather_linear" in text and "rank 0" in text and "epoch" in text, text
        else:
            raise AssertionError("the host never heard of it")
    dist.barrier()
    comm.close()
    dist.barrier()


#: In the order in which they are run: what the others rest on first.
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        symmetric_tensors,
        auto_takes_triton,
        bfloat16,
        skew,
        graph_of_one_call,
        graph_mixed_with_eager,
        graph_of_three_layers,
        growth_during_capture,
        *exchange_checks.CHECKS,
        *domain_checks.CHECKS,
        *expert_checks.CHECKS,
        *layer_checks.CHECKS,
        float32,
        float16,
        pieces,
        counters_wrap_around,
        two_streams,
        copy_engine,
        graph_of_copies,
        disagreement,
        timeout_record,
    )
}
