"""Arguments of the kernels: how rows are cut into pieces and tiles, strides, tile sizes."""

from __future__ import annotations

from torch import Tensor

from fusedcomm.engines.triton.config import Tiles, compiler_options

Bounds = list[tuple[int, int]]


def blocks(extent: int, size: int) -> int:
    return -(-extent // size)


def segments(bounds: Bounds, pieces: int, tile_rows: int) -> dict[str, int]:
    """How shards are cut into pieces, whole tiles each."""
    shard_rows = bounds[0][1]
    piece_rows = max(1, blocks(blocks(shard_rows, pieces), tile_rows)) * tile_rows
    return {"shard_rows": shard_rows, "piece_rows": piece_rows, "pieces": pieces}


def weight_strides(weight: Tensor, suffix: str = "") -> dict[str, int]:
    return {f"stride_wn{suffix}": weight.stride(0), f"stride_wk{suffix}": weight.stride(1)}


def meta(tiles: Tiles, *depths: int) -> dict[str, object]:
    return {
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "GROUP": tiles.group,
        "EVEN_K": all(depth % tiles.depth == 0 for depth in depths),
        "PRECISION": "ieee",
        **compiler_options(tiles),
    }


def product_of(weights: list[Tensor], epilogue: bool = False) -> str:
    """The kind of product, as ``config.CHIPS`` has them.

    Args:
        epilogue: whether more than the accumulator is live as a tile is stored.
    """
    if epilogue or len(weights) > 1:
        return "epilogue"
    return "large" if weights[0].stride(1) == 1 else "transposed"


def aligned(x: Tensor) -> Tensor:
    """x contiguous and on 16 bytes, as kernels read it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
