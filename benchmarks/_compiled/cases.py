"""Which kernels are compiled, with which arguments and tiles, and what each must contain.

To add a kernel, add a ``Case`` below: its file and name, the dtypes of its pointers, its constants,
and how many waits and signals stand in its source. Integers are int32 and, but for those that the
kernel does not specialise, multiples of 16; ``units`` names the strides that are 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import triton.language as tl

from . import loading
from .case import Case


def _pointers(names: str, dtype: str = "bf16", **others: str) -> dict[str, str]:
    """``names`` point to ``dtype``; the workspaces' addresses, counters and the record as ever."""
    shared = {"bases": "*i64", "counters": "*i32", "record": "*i32"}
    return {**dict.fromkeys(names.split(), f"*{dtype}"), **shared, **others}


_GEMM = {"EVEN_K": True, "PRECISION": "ieee"}
_MASKED = {"EVEN_K": False}
_EPILOGUE = {"product": "epilogue", "plain": "linear_kernel, epilogue"}
_BFLOAT16, _FLOAT32 = {"WIRE": tl.bfloat16}, {"WIRE": tl.float32}
_PLAIN = Case(
    "tiles",
    "linear_kernel",
    "large",
    product="large",
    more={"HAS_BIAS": False, **_GEMM},
    units=("stride_xk", "stride_wk"),
    pointers=_pointers("x weight bias y"),
    standard=True,
)
_CONSUME = Case(
    "all_gather_linear",
    "consume_kernel",
    "large",
    product="large",
    plain="linear_kernel, large",
    waits=1,
    more={"HAS_BIAS": False, **_GEMM},
    units=("stride_wk",),
    pointers=_pointers("x weight bias y"),
    standard=True,
)
_GRADIENT = Case(
    "all_gather_linear",
    "weight_grad_kernel",
    product="gradient",
    plain="linear_kernel, gradient",
    waits=1,
    more={"PRECISION": "ieee"},
    units=("stride_on", "stride_gk"),
    pointers=_pointers("x other grad"),
    extents=("BN", "BK", "BM"),
)
_PRODUCE = Case(
    "linear_reduce_scatter",
    "produce_kernel",
    "large",
    product="large",
    plain="linear_kernel, large",
    signals=1,
    more={"PAIRS": 1, "HAS_INIT": False, **_GEMM, **_BFLOAT16},
    units=("stride_wk0", "stride_wk1"),
    pointers=_pointers("x0 weight0 x1 weight1 init"),
    standard=True,
)
_ONE_SHOT = Case(
    "linear_all_reduce",
    "one_shot_kernel",
    product="small",
    plain="linear_kernel, small",
    waits=1,
    signals=1,
    more={"PAIRS": 1, "HAS_BIAS": False, **_GEMM, **_BFLOAT16},
    units=("stride_wk0", "stride_wk1"),
    pointers=_pointers("x0 weight0 x1 weight1 bias y"),
)
_TWO_SHOT = dataclasses.replace(_ONE_SHOT, kernel="two_shot_kernel", waits=2, signals=2)
_REDUCE = Case(
    "linear_reduce_scatter",
    "reduce_kernel",
    product="reduce",
    waits=1,
    more={"HAS_BIAS": False, **_BFLOAT16},
    pointers=_pointers("bias y"),
)


_COLLECTIVE = {"maxnreg": loading.config().COLLECTIVE_REGISTERS}
_SUM = {"OP": "sum", "ACC": tl.float32, "BLOCK": 2048}
_VECTORS = _pointers("x out", scale="fp32")
_EXCHANGE = Case(
    "collectives",
    "exchange_kernel",
    waits=1,
    signals=1,
    more={"TABLE": False, "SEND_ALIGN": 16, "RECV_ALIGN": 16, "BLOCK": 2048},
    pointers=_pointers("x out", send_table="*i64", recv_table="*i64"),
    rest=True,
    options=_COLLECTIVE,
)


_BLOCKS = dict.fromkeys(("first_E", "counts_E", "first_WE", "counts_WE", "back_WE"), "*i64")
_UP = Case(
    "grouped_linear",
    "up_kernel",
    "large",
    product="large",
    plain="linear_kernel, large",
    waits=1,
    more={
        "ACTIVATION": "none",
        "GATED": False,
        "PAIRED": False,
        "KEEP": False,
        "HAS_BIAS": False,
        **_GEMM,
    },
    units=("stride_wk",),
    pointers=_pointers("weight bias z a", **_BLOCKS),
)
_DOWN = Case(
    "grouped_linear",
    "down_kernel",
    "large",
    product="large",
    plain="linear_kernel, large",
    signals=2,
    more={"HAS_BIAS": False, **_GEMM},
    units=("stride_wk",),
    pointers=_pointers("x weight bias", tiles_W="*i32", **_BLOCKS),
)
_ACTIVATION = Case(
    "activations",
    "activation_kernel",
    product="activation",
    more={"ACTIVATION": "swiglu", "GATED": True, "PAIRED": False, "EXPERTS": 32},
    pointers=_pointers("z a", first_E="*i64", counts_E="*i64"),
)
_ACTIVATION_GRAD = dataclasses.replace(
    _ACTIVATION,
    kernel="activation_grad_kernel",
    pointers=_pointers("z da a dz", first_E="*i64", counts_E="*i64"),
)
_PUSH_ROWS = Case(
    "moe_rows",
    "push_rows_kernel",
    signals=3,
    more={"INDEXED": True, "SCALED": False, "BM": 16, "BN": 512},
    pointers=_pointers("data", index="*i64", scale="*fp32", segments="*i64", pieces_W="*i32"),
)
_COUNTS = Case(
    "moe_route",
    "push_counts_kernel",
    signals=1,
    more={"BLOCK": 256},
    numbers=True,
    pointers=_pointers("", bounds="*i64"),
)
_PLACES = _pointers(
    "",
    table="*i64",
    starts_W="*i64",
    out="*i64",
    back="*i64",
    out_pieces_W="*i32",
    back_pieces_W="*i32",
    **_BLOCKS,
)
_GATED = {"ACTIVATION": "swiglu", "GATED": True, "KEEP": True}
_PAIRED = {**_GATED, "PAIRED": True}
_GROUPED_GRADIENT = Case(
    "grouped_weight_grad",
    "grouped_weight_grad_kernel",
    product="gradient",
    plain="linear_kernel, gradient",
    more={"PRECISION": "ieee"},
    units=("stride_gk",),
    pointers=_pointers("dy x grad", **_BLOCKS),
    extents=("BN", "BK", "BM"),
)


def _of(case: Case, variant: str, more: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    """``case`` with other constants; not held to the absolute bounds."""
    merged = {**case.more, **(more or {})}
    return dataclasses.replace(case, variant=variant, more=merged, standard=False, **changes)


def _float32(case: Case) -> Case:
    pointers = {name: kind.replace("bf16", "fp32") for name, kind in case.pointers.items()}
    plain = case.plain and "linear_kernel, float32"
    wire = _FLOAT32 if "WIRE" in case.more else {}
    return _of(case, "float32", wire, pointers=pointers, product="float32", plain=plain)


def _float16(case: Case) -> Case:
    pointers = {name: kind.replace("bf16", "fp16") for name, kind in case.pointers.items()}
    wire = {"WIRE": tl.float16} if "WIRE" in case.more else {}
    return _of(case, "float16", wire, pointers=pointers)


CASES: list[Case] = [
    # What the others are compared with.
    _PLAIN,
    _of(_PLAIN, "small", product="small"),
    _of(_PLAIN, "masked", _MASKED),
    _of(_PLAIN, "epilogue", product="epilogue"),
    _of(_PLAIN, "transposed weight", product="transposed", units=("stride_xk", "stride_wn")),
    _of(_PLAIN, "transposed weight, epilogue", product="epilogue",
        units=("stride_xk", "stride_wn")),
    _of(_PLAIN, "gated transposed", product="gated transposed",
        units=("stride_xk", "stride_wn")),
    _of(_PLAIN, "gradient", product="gradient", units=("stride_xm", "stride_wn")),
    _float32(_PLAIN),
    _of(_float32(_PLAIN), "float32, gradient", units=("stride_xm", "stride_wn")),
    # Gathered rows times a weight.
    _CONSUME,
    _of(_CONSUME, "bias", {"HAS_BIAS": True}),
    _of(_CONSUME, "masked", _MASKED, plain="linear_kernel, masked"),
    _of(_CONSUME, "transposed weight", product="transposed", units=("stride_wn",),
        plain="linear_kernel, transposed weight"),
    _of(_CONSUME, "small", product="small", plain="linear_kernel, small"),
    _float16(_CONSUME),
    _float32(_CONSUME),
    Case("all_gather_linear", "push_kernel", signals=1, more={"BM": 64, "BK": 64},
         pointers=_pointers("x")),
    # Weight gradients.
    _GRADIENT,
    _of(_GRADIENT, "transposed result", units=("stride_on", "stride_gn")),
    # A weight's products into their owners' memory.
    _PRODUCE,
    _of(_PRODUCE, "init", {"HAS_INIT": True}, **_EPILOGUE),
    _of(_PRODUCE, "two pairs", {"PAIRS": 2}, **_EPILOGUE),
    _of(_PRODUCE, "two pairs, init", {"PAIRS": 2, "HAS_INIT": True}, **_EPILOGUE),
    _of(_PRODUCE, "masked", _MASKED, plain="linear_kernel, masked"),
    _of(_PRODUCE, "transposed weight", product="transposed", units=("stride_wn0", "stride_wn1"),
        plain="linear_kernel, transposed weight"),
    _of(_PRODUCE, "transposed weight, two pairs", {"PAIRS": 2},
        product="epilogue", units=("stride_wn0", "stride_wn1"),
        plain="linear_kernel, transposed weight, epilogue"),
    _of(_PRODUCE, "transposed weight, two pairs, init", {"PAIRS": 2, "HAS_INIT": True},
        product="epilogue", units=("stride_wn0", "stride_wn1"),
        plain="linear_kernel, transposed weight, epilogue"),
    _of(_PRODUCE, "small", product="small", plain="linear_kernel, small"),
    _of(_PRODUCE, "wire float32", _FLOAT32, **_EPILOGUE),
    _float32(_PRODUCE),
    _REDUCE,
    _of(_REDUCE, "bias", {"HAS_BIAS": True}),
    _of(_REDUCE, "bias, wire float32", {"HAS_BIAS": True, **_FLOAT32}),
    # Few rows.
    _ONE_SHOT,
    _of(_ONE_SHOT, "two pairs, bias", {"PAIRS": 2, "HAS_BIAS": True}),
    _of(_ONE_SHOT, "wire float32", _FLOAT32),
    _TWO_SHOT,
    _of(_TWO_SHOT, "two pairs, bias", {"PAIRS": 2, "HAS_BIAS": True}),
    _of(_TWO_SHOT, "wire float32", _FLOAT32),
    # Collectives.
    _EXCHANGE,
    Case("collectives", "reduce_kernel", "collective", waits=1, signals=1,
         more={**_SUM, "ALIGN": 16}, pointers=_VECTORS, rest=True, options=_COLLECTIVE),
    Case("collectives", "two_shot_kernel", "collective", waits=2, signals=2,
         more={**_SUM, "ALIGN": 16}, pointers=_VECTORS, rest=True, options=_COLLECTIVE),
    Case("ring_all_reduce", "ring_kernel", waits=2, signals=2, more=_SUM, pointers=_VECTORS,
         rest=True, options=_COLLECTIVE),
    Case("multimem", "multimem_kernel", waits=2, signals=2, more={"OP": "sum", "BLOCK": 2048},
         pointers={**_VECTORS, "multicast": "i64"}, rest=True, chips=("sm_90", "sm_100"),
         options=_COLLECTIVE),
    # Mixture of experts.
    _UP,
    _of(_UP, "gated", _GATED, **_EPILOGUE),
    _of(_UP, "gated, bias", {**_GATED, "HAS_BIAS": True}, **_EPILOGUE),
    _of(_UP, "small", product="small", plain="linear_kernel, small"),
    _of(_UP, "gated, transposed weight", _GATED, product="gated transposed", units=("stride_wn",),
        plain="linear_kernel, gated transposed"),
    _of(_UP, "gated in pairs", _PAIRED, **_EPILOGUE),
    _of(_UP, "gated in pairs, bias", {**_PAIRED, "HAS_BIAS": True}, **_EPILOGUE),
    _of(_UP, "gated in pairs, transposed weight", _PAIRED, product="epilogue",
        units=("stride_wn",), plain="linear_kernel, transposed weight, epilogue"),
    _of(_UP, "gated in pairs, transposed weight, bias", {**_PAIRED, "HAS_BIAS": True},
        product="epilogue", units=("stride_wn",),
        plain="linear_kernel, transposed weight, epilogue"),
    _of(_UP, "transposed weight", product="transposed", units=("stride_wn",),
        plain="linear_kernel, transposed weight"),
    _DOWN,
    _of(_DOWN, "bias", {"HAS_BIAS": True}),
    _of(_DOWN, "small", product="small", plain="linear_kernel, small"),
    _of(_DOWN, "transposed weight", product="transposed", units=("stride_wn",),
        plain="linear_kernel, transposed weight"),
    _GROUPED_GRADIENT,
    _of(_GROUPED_GRADIENT, "transposed result", units=("stride_gn",)),
    _of(_GROUPED_GRADIENT, "float32 result",
        pointers={**_GROUPED_GRADIENT.pointers, "grad": "*fp32"}),
    _of(_GROUPED_GRADIENT, "float32 transposed result", units=("stride_gn",),
        pointers={**_GROUPED_GRADIENT.pointers, "grad": "*fp32"}),
    _float16(_GROUPED_GRADIENT),
    dataclasses.replace(_float32(_GROUPED_GRADIENT), plain="linear_kernel, float32, gradient"),
    Case("grouped_weight_grad", "grouped_bias_grad_kernel", more={"BM": 8, "BN": 256}, warps=1,
         pointers=_pointers("dy grad", **_BLOCKS)),
    _ACTIVATION,
    _of(_ACTIVATION, "in pairs", {"PAIRED": True}),
    _ACTIVATION_GRAD,
    *(_of(_ACTIVATION_GRAD, kind, {"ACTIVATION": kind})
      for kind in ("geglu", "geglu_tanh")),
    _of(_ACTIVATION_GRAD, "gpt_oss in pairs", {"ACTIVATION": "gpt_oss", "PAIRED": True}),
    _of(_ACTIVATION_GRAD, "relu2", {"ACTIVATION": "relu2", "GATED": False}),
    _of(_ACTIVATION_GRAD, "256 experts", {"EXPERTS": 256}),
    dataclasses.replace(_float32(_ACTIVATION_GRAD), product="activation"),
    _PUSH_ROWS,
    _of(_PUSH_ROWS, "scaled", {"SCALED": True}),
    Case("moe_rows", "await_kernel", waits=1, pointers=_pointers("")),
    Case("moe_rows", "take_kernel", more={"BM": 16, "BN": 512},
         pointers=_pointers("out", first_E="*i64", counts_E="*i64")),
    Case("moe_rows", "sum_kernel",
         more={"K": 8, "WEIGHTED": True, "KEEP": True, "BN": 1024},
         pointers=_pointers("y kept", slot="*i64", weights="*fp32")),
    _COUNTS,
    dataclasses.replace(_COUNTS, kernel="collect_kernel", waits=1, signals=0,
                        pointers=_pointers("", table="*i64")),
    Case("moe_route", "places_kernel", "256 experts", more={"BLOCK": 256},
         numbers=True, pointers=_PLACES),
    Case("moe_route", "places_kernel", "8 experts", more={"BLOCK": 8}, numbers=True,
         pointers=_PLACES),
    Case("moe_route", "row_blocks_kernel", more={"BLOCK": 32}, warps=1, numbers=True,
         pointers=_pointers("", blocks_W="*i32", **_BLOCKS)),
    # Before and after every operation.
    Case("signals", "begin", waits=1, pointers=_pointers("")),
    Case("signals", "end", signals=1, pointers=_pointers("", host_record="*i32")),
]  # fmt: skip


def named(name: str) -> Case:
    """The case of this name.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for case in CASES}[name]
