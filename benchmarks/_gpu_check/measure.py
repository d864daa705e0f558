"""What waiting and signalling cost: the kernels of eight ranks' calls, on the GPU of one.

Rank 0's launches of an eight-rank all-gather and reduce-scatter run alone. All memory is this
GPU's own and every flag that is awaited is up, so what differs from the same product without flags
(``tiles.linear_kernel``, same tiles) is the waits, the signals and the order of tiles, and not a
link. ``F.linear`` (cuBLAS) is measured beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusedcomm.benchmarks.harness import SHAPES
from fusedcomm.engines.triton.arguments import blocks, meta, segments, weight_strides
from fusedcomm.engines.triton.config import Tiles, tiles_of
from fusedcomm.engines.triton.launch import DTYPES
from fusedcomm.kernels import all_gather_linear, linear_reduce_scatter, signals, tiles

RANKS = 8
FLAG_WORDS = signals.FLAG_WORDS.value
#: Bytes in front of the data: the epoch, a ready flag of every rank.
_FLAGS = 4096
_PATHS = ("cuBLAS", "plain", "waiting", "signalling")


@dataclass(frozen=True)
class Product:
    """``[M, K] · [N, K]ᵀ``, as one rank of eight multiplies it."""

    name: str
    m: int
    n: int
    k: int


def products(tokens: int = 4096) -> list[Product]:
    """Of the layers of Llama-3 at TP8, and a large square one."""
    found = []
    for name in ("llama3-8b-tp8", "llama3-70b-tp8"):
        shape = SHAPES[name]
        kv = shape.kv_heads * shape.head_dim // shape.tp
        label = name.removesuffix("-tp8")
        found += [
            Product(f"{label} q, k, v", tokens, shape.attention_shard + 2 * kv, shape.hidden),
            Product(f"{label} o", tokens, shape.hidden, shape.attention_shard),
            Product(f"{label} gate, up", tokens, 2 * shape.feed_forward_shard, shape.hidden),
            Product(f"{label} down", tokens, shape.hidden, shape.feed_forward_shard),
        ]
    return [*found, Product("8192³", 8192, 8192, 8192)]


class Setup:
    """One product's tensors, and its four paths as calls that launch once.

    ``M`` must be divisible by the number of ranks.
    """

    def __init__(self, product: Product, device: torch.device, dtype: torch.dtype) -> None:
        self.product = product
        m, n, k = product.m, product.n, product.k
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.x, self.weight = draw(m, k), draw(n, k) / k**0.5
        self.y = torch.empty(m, n, device=device, dtype=dtype)
        rows = m // RANKS
        self._region = rows * max(n, k) * dtype.itemsize
        # Every rank's memory lies on this GPU: flags, then a region for each source.
        size = _FLAGS + RANKS * self._region
        self.memory = torch.zeros(RANKS, size, dtype=torch.uint8, device=device)
        self._bases = torch.tensor(
            [part.data_ptr() for part in self.memory], dtype=torch.int64, device=device
        )
        words = self.memory[0][:_FLAGS].view(torch.int32)
        words[::FLAG_WORDS][: RANKS + 1] = 1  # the epoch, and all flags at it
        for source in range(RANKS):
            self.part(0, source, rows, k).copy_(self.x[source * rows : (source + 1) * rows])
        self._record = torch.zeros(signals.RECORD_WORDS, dtype=torch.int32, device=device)
        self._counters = torch.zeros(RANKS, dtype=torch.int32, device=device)
        self.tiles: Tiles = tiles_of(device, dtype, rows, n, k)
        self._cut = segments([(r * rows, (r + 1) * rows) for r in range(RANKS)], 1, self.tiles.rows)
        self.programs = 3
        if device.type == "cuda":
            self.programs = torch.cuda.get_device_properties(device).multi_processor_count

    def part(self, owner: int, source: int, rows: int, columns: int) -> Tensor:
        """What ``source`` wrote, or writes, into the memory of ``owner``."""
        start = _FLAGS + source * self._region
        count = rows * columns * self.x.itemsize
        return self.memory[owner][start : start + count].view(self.x.dtype).view(rows, columns)

    @property
    def paths(self) -> dict[str, Callable[[], Any]]:
        return dict(zip(_PATHS, (self.library, self.plain, self.wait, self.signal), strict=True))

    def library(self) -> Tensor:
        return F.linear(self.x, self.weight)

    def plain(self) -> None:
        """The product without flags."""
        product = self.product
        whole = blocks(product.m, self.tiles.rows) * blocks(product.n, self.tiles.columns)
        tiles.linear_kernel[(min(whole, self.programs),)](
            x=self.x,
            weight=self.weight,
            bias=self.y,
            y=self.y,
            M=product.m,
            N=product.n,
            K=product.k,
            stride_xm=product.k,
            stride_xk=1,
            stride_ym=product.n,
            HAS_BIAS=False,
            **weight_strides(self.weight),
            **meta(self.tiles, product.k),
        )

    def wait(self) -> None:
        """An all-gather's product: it awaits every rank's rows."""
        all_gather_linear.consume_kernel[(self.programs,)](
            x=self.x,
            weight=self.weight,
            bias=self.y,
            y=self.y,
            total_rows=self.product.m,
            N=self.product.n,
            K=self.product.k,
            HAS_BIAS=False,
            limit=2**20,
            **weight_strides(self.weight),
            **self._shared(),
        )

    def signal(self) -> None:
        """A reduce-scatter's product: it signals every rank's rows."""
        linear_reduce_scatter.produce_kernel[(self.programs,)](
            x0=self.x,
            weight0=self.weight,
            x1=self.x,
            weight1=self.weight,
            init=self.x,
            counters=self._counters,
            total_rows=self.product.m,
            N=self.product.n,
            K0=self.product.k,
            K1=self.product.k,
            PAIRS=1,
            HAS_INIT=False,
            WIRE=DTYPES[self.x.dtype],
            **weight_strides(self.weight, "0"),
            **weight_strides(self.weight, "1"),
            **self._shared(),
        )

    def _shared(self) -> dict[str, Any]:
        return {
            "bases": self._bases,
            "rank": 0,
            "world_size": RANKS,
            "epoch_word": 0,
            "ready_word": FLAG_WORDS,
            "chunks": 1,
            "data_offset": _FLAGS,
            "region_bytes": self._region,
            "record": self._record,
            **self._cut,
            **meta(self.tiles, self.product.k),
        }

    def problems(self) -> list[str]:
        """Runs every path once, and says which results differ from cuBLAS's, and by how much."""
        right = self.library().float()
        found = []
        for path in ("plain", "waiting"):
            self.y.fill_(float("nan"))
            self.paths[path]()
            found += self._differs(path, self.y, right)
        self.memory[:, _FLAGS:].fill_(255)
        self.signal()
        rows = self.product.m // RANKS
        for owner in range(RANKS):
            got = self.part(owner, 0, rows, self.product.n)
            found += self._differs(f"signalling rank {owner}", got, right[owner * rows :][:rows])
            flag = int(self.memory[owner][:_FLAGS].view(torch.int32)[FLAG_WORDS])
            if flag != 1:
                found.append(f"{self.product.name}: the flag on rank {owner} is {flag}")
        return found

    def _differs(self, path: str, got: Tensor, right: Tensor) -> list[str]:
        error = float((got.float() - right).norm() / right.norm())
        bound = 2 * torch.finfo(got.dtype).eps
        if error <= bound:  # so written, NaN differs
            return []
        return [f"{self.product.name}, {path}: ‖difference‖ / ‖y‖ is {error:.2g}"]


def microseconds(paths: dict[str, Callable[[], Any]], calls: int = 15) -> dict[str, float]:
    """Medians of each path, in turn, the second-level cache overwritten before each call."""
    trash = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in paths}
    for call in range(calls + 2):
        for name, run in paths.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            trash.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            if call >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def row(product: Product, times: dict[str, float]) -> dict[str, Any]:
    """One product's measurements, as JSON values."""
    flops = 2 * product.m * product.n * product.k
    return {
        "product": product.name,
        "m, n, k": [product.m, product.n, product.k],
        "microseconds": {name: round(value, 2) for name, value in times.items()},
        "tflops": {name: round(flops / value * 1e-6, 1) for name, value in times.items()},
        "of cuBLAS": {n: round(times["cuBLAS"] / times[n], 3) for n in times if n != "cuBLAS"},
        "waiting costs, us": round(times["waiting"] - times["plain"], 2),
        "signalling costs, us": round(times["signalling"] - times["plain"], 2),
    }


def measure(rank: int, emit: Callable[[Any], None]) -> None:
    """Measures every product on this process's GPU; emits ``("row", …)`` and ``("problem", …)``."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        for product in products():
            setup = Setup(product, device, torch.bfloat16)
            for problem in setup.problems():
                emit(("problem", problem))
            emit(("row", row(product, microseconds(setup.paths))))
            del setup
            torch.cuda.empty_cache()
        emit(("calls", _call_costs(device)))


def _call_costs(device: torch.device) -> dict[str, float]:
    """Microseconds of what a call adds besides its work: ``begin`` and ``end`` with eight ranks."""
    setup = Setup(Product("", 8 * 16, 16, 16), device, torch.bfloat16)
    host_record = torch.zeros(signals.RECORD_WORDS, dtype=torch.int32, pin_memory=True)
    words = {"epoch_word": 0, "consumed_word": FLAG_WORDS, "failed_word": 12 * FLAG_WORDS}
    common = {"bases": setup._bases, "rank": 0, "world_size": RANKS, **words}
    common |= {"record": setup._record, "num_warps": 1}

    def begin() -> None:
        flags = setup.memory[0][:_FLAGS].view(torch.int32)
        flags[::FLAG_WORDS][1 : RANKS + 1] = flags[0]
        signals.begin[(1,)](limit=2**20, **common)

    def end() -> None:
        signals.end[(1,)](op=0, host_record=host_record, **common)

    def nothing() -> None:
        flags = setup.memory[0][:_FLAGS].view(torch.int32)
        flags[::FLAG_WORDS][1 : RANKS + 1] = flags[0]

    times = microseconds({"nothing": nothing, "begin": begin, "end": end})
    return {"begin": round(times["begin"] - times["nothing"], 2), "end": round(times["end"], 2)}
