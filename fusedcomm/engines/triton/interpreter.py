"""Triton's interpreter, made right for bfloat16 and for counters that wrap around, and faster.

The interpreter holds a bfloat16 as its bit pattern, a numpy uint16, and computes on that: sums and
products are garbage, ``tl.dot`` multiplies bit patterns, the cast from float32 truncates. Only
moving data is right. Here every operation that computes first widens its bfloat16 operands to
float32, and rounds its result to nearest even, as PyTorch's CPU kernels do.

What numpy warns about is no fault in a kernel: float16 overflows to infinity, int32 counters wrap.
The interpreter's own check for overflow, which it never acts on, triples the cost of every integer
operation, and is left out. It also replaces all functions of ``triton.language`` again whenever a
device function is called, which took half of the time; here, once per launch. And it finds the
numpy dtype of a value in a table that it builds anew for each one, compares types by their names
even where they are the same object, and gives every value its shape as new constants: more than a
third of what was left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np

_installed = False


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bit patterns (uint16) of the bfloat16 values nearest to ``values``, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    # Below the half adds nothing, above it carries; the tie carries into an odd last bit only. The
    # carry out of the mantissa is the next exponent, and out of the largest one, infinity.
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def install() -> None:
    """Mend the interpreter of this process; once is enough, and more does no harm.

    For kernels that were decorated under ``TRITON_INTERPRET=1``; others are not touched.
    """
    global _installed
    if _installed:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle, bf16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16

    def is_bf16(operand: Any) -> bool:
        # What has other bits, as nearly everything, is told quickly.
        return (
            isinstance(operand, handle)
            and operand.data.dtype == np.uint16
            and operand.dtype.scalar == bf16
        )

    def wide(operand: Any) -> Any:
        return handle(widened(operand.data), tl.float32) if is_bf16(operand) else operand

    def narrow(result: Any) -> Any:
        floats = result.data.dtype == np.float32
        return handle(rounded(result.data), bf16) if floats else result

    def in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def compute(self: Any, *operands: Any) -> Any:
            if any(map(is_bf16, operands)):
                result = narrow(method(self, *map(wide, operands)))
            else:
                result = method(self, *operands)
            if result.data.dtype == np.bool_:
                # A comparison says that its result is of its operands' type. Then a scalar one, as
                # a mask, becomes a block of integers, which Triton 3.9 does not take.
                return handle(result.data, tl.int1)
            return result

        return compute

    # All other arithmetic of the builder goes through these, or is not offered for bfloat16. A
    # select only moves data, but widening and rounding give back the very same values.
    for name in ("binary_op", "ternary_op", "unary_op", "create_fma"):
        setattr(builder, name, in_float32(getattr(builder, name)))

    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp
    to_nearest = (None, interpreter._ir.ROUNDING_MODE.RTNE)

    @wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        result = dot(self, wide(a), wide(b), wide(d), *options)
        return narrow(result) if is_bf16(d) else result

    @wraps(cast)
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == bf16:
            return handle(rounded(source.data.astype(np.float32)), bf16)
        return cast(self, wide(source), target)

    @wraps(convert)
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        standard = source.dtype.scalar == tl.float32 and target.scalar in (bf16, tl.float16)
        if standard and rounding in to_nearest:
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = lambda self, value: cast_impl(self, self.get_fp32(value), bf16)

    reduce_or_scan = interpreter.ReduceScanOpInterface
    apply = reduce_or_scan.apply

    @wraps(apply)
    def apply_wide(self: Any, tensors: Any) -> Any:
        """A reduction or scan of bfloat16 runs in float32 and is rounded once, at its end."""
        if not isinstance(tensors, tuple):
            return apply_wide(self, (tensors,))[0]
        as_wide = tuple(t.to(tl.float32) if t.dtype == bf16 else t for t in tensors)
        results = apply(self, as_wide)
        return tuple(
            r.to(bf16) if t.dtype == bf16 and r.dtype == tl.float32 else r
            for t, r in zip(tensors, results, strict=False)
        )

    reduce_or_scan.apply = apply_wide

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[Any] = set()  # modules of the language, in this launch

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[Any]:
        return frozenset(m for m in function.__globals__.values() if m is tl or m is tl.core)

    @wraps(patch)
    def patch_once(function: Callable[..., Any]) -> Any:
        if languages(function) <= patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.update(languages(function))
        return patch(function)

    @wraps(launch)
    def quiet_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, quiet_launch

    find, equal = interpreter._get_np_dtype, tl.dtype.__eq__
    found: dict[str, np.dtype[Any]] = {}  # by the scalar type's name

    @wraps(find)
    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    @wraps(equal)
    def same_or_equal(self: Any, other: object) -> bool:
        return self is other or equal(self, other)

    interpreter._get_np_dtype, tl.dtype.__eq__ = numpy_dtype, same_or_equal

    make = tl.tensor.__init__
    derived: dict[tuple[int, ...], dict[str, Any]] = {}  # what follows from the shape alone

    @wraps(make)
    def make_as_before(self: Any, data: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape in derived:
            self.__dict__.update(derived[shape], handle=data, type=type, dtype=type.scalar)
            return
        make(self, data, type)
        if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            derived[shape] = {"shape": self.shape, "numel": self.numel}

    tl.tensor.__init__ = make_as_before
    shared = interpreter.interpreter_builder
    shared.options = dataclasses.replace(shared.options, sanitize_overflow=False)
    _installed = True
