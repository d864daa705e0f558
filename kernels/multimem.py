"""All-reduce through a switch that adds: NVLink multicast (``multimem`` instructions, sm_90 on).

Index spaces: x is a vector in W parts of ``size`` elements, a multiple of 16, each in ``pieces``.
A region holds a rank's x, and at half of ``region_bytes`` the results. ``multicast`` is the address
through which the switch reaches the workspaces of all ranks at once: a load there returns the sum
over ranks, a store writes to all.

====== ======================================= ====================================================
role   raises                                  awaits
====== ======================================= ====================================================
copy   ready[s][me][piece] on the part's rank  –
reduce ready[s][me][pieces + piece] everywhere ready[s][source][piece] of every source and itself
take   –                                       ready[s][owner][pieces + piece] of every owner
====== ======================================= ====================================================

Roles have the order of program ids, as in ``collectives``. A half-precision sum is accumulated in
float32 inside the switch and rounded once; its order of additions is the switch's own.

The instructions are inline assembly, which the interpreter does not run: this file is compiled and
inspected without a GPU, and run only where a multicast pointer exists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .collectives import await_piece, copy_piece, part_of, span_of
from .signals import FLAG_WORDS, PLACES, memory, signal, words

_PLACES = [*PLACES, "size", "total", "piece_size", "region_bytes", "multicast"]


@triton.jit
def load_sum(address, DTYPE: tl.constexpr):
    """The sum over ranks of 16 bytes at each multicast address; four words each."""
    if DTYPE == tl.float32:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [address], (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False, pack=1,
        )  # fmt: skip
    elif DTYPE == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [address], (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [address], (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False, pack=1,
        )  # fmt: skip
    return a, b, c, d


@triton.jit
def store_everywhere(address, a, b, c, d):
    """Write 16 bytes on every rank at each multicast address."""
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r", [address, a, b, c, d], tl.uint32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def take_block(source, target, first, stop, scale, OP: tl.constexpr, SIZE: tl.constexpr):
    i = first + tl.arange(0, SIZE)
    value = tl.load(source + i, mask=i < stop)
    if OP == "avg":
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(target + i, value, mask=i < stop)


@triton.jit(do_not_specialize=_PLACES)
def multimem_kernel(
    x,
    out,
    bases,
    multicast,
    rank,
    world_size,
    size,
    total,
    scale,
    pieces,
    piece_size,
    epoch_word,
    ready_word,
    chunks,
    data_offset,
    region_bytes,
    limit,
    record,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = Σ_ranks x. Programs: ``W * pieces`` copy, ``pieces`` reduce, ``W * pieces`` take.

    out may be x. ``size`` and ``piece_size`` are multiples of 16; every rank has one region.
    """
    ok = tl.load(record) == 0
    own = words(bases, rank)
    epoch = tl.load(own + epoch_word)
    dtype: tl.constexpr = x.dtype.element_ty
    # Elements of 16 bytes.
    WIDE: tl.constexpr = 128 // dtype.primitive_bitwidth
    half = region_bytes // 2
    copies = world_size * pieces
    program = tl.program_id(0)
    piece = program % pieces
    mine = memory(bases, rank, data_offset, 0, region_bytes, dtype)
    if ok:
        if program < copies:
            owner = (rank + 1 + program // pieces) % world_size
            first, count = part_of(owner, size, size, total, total, False)
            source, target = tl.multiple_of(x + first, 16), tl.multiple_of(mine + first, 16)
            copy_piece(source, target, piece, piece_size, count, BLOCK)
            # Matched by the owner's wait, below.
            signal(words(bases, owner) + ready_word + (rank * chunks + piece) * FLAG_WORDS, epoch)
        elif program < copies + pieces:
            for step in range(0, world_size):
                if ok:
                    source = (rank + step) % world_size
                    ok = await_piece(own, source, piece, epoch, ready_word, chunks, limit, record)
            first, count = part_of(rank, size, size, total, total, False)
            start = tl.cast(piece, tl.int64) * piece_size
            stop = tl.minimum(start + piece_size, count)
            # What lies behind the last element in its 16 bytes is added as well, and not taken.
            for block in range(start, tl.where(ok, stop, start), BLOCK):
                i = block + tl.arange(0, BLOCK // WIDE) * WIDE
                # Lanes past the end repeat the first one, which changes nothing.
                i = tl.where(i < stop, i, block)
                address = multicast + data_offset + (first + i) * (16 // WIDE)
                a, b, c, d = load_sum(address, dtype)
                store_everywhere(address + half, a, b, c, d)
            if ok:
                for step in range(0, world_size):
                    peer = (rank + step) % world_size
                    flag = ready_word + (rank * chunks + pieces + piece) * FLAG_WORDS
                    signal(words(bases, peer) + flag, epoch)
        else:
            owner = (rank + (program - copies) // pieces) % world_size
            number = pieces + piece
            if await_piece(own, owner, number, epoch, ready_word, chunks, limit, record):
                first, count = part_of(owner, size, size, total, total, False)
                results = memory(bases, rank, data_offset + half, 0, region_bytes, dtype)
                source, target = (
                    tl.multiple_of(results + first, 16),
                    tl.multiple_of(out + first, 16),
                )
                start, even, stop = span_of(piece, piece_size, count)
                for block in range(start, even, BLOCK):
                    take_block(source, target, tl.multiple_of(block, 16), even, scale, OP, BLOCK)
                if even < stop:
                    take_block(source, target, even, stop, scale, OP, 16)
