"""Vectors of 16 float32 in numba's loops: what LLVM does not make of a loop itself.

It does not know that scratch and caches are apart, and asks before every loop, which takes longer than the 32 elements
of a small head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import errors
from numba.extending import intrinsic, models, register_model

LANES = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FLAGS = ("reassoc", "contract", "arcp", "nsz")


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _VECTOR)


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    lowest = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(lowest, lowest, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _at(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [index]), ir.VectorType(element, LANES).as_pointer())


@intrinsic
def fill(_typing_context: Any, value: types.Type) -> Any:
    """All 16 of one value."""
    return _vector(types.float32), lambda context, builder, _, args: _splat(builder, args[0])


@intrinsic
def load_vector(_typing_context: Any, pointer: types.Type, index: types.Type) -> Any:
    """16 elements, of float32 or bfloat16, from an index on."""
    if pointer.dtype not in (types.float32, types.uint16):
        raise errors.TypingError(f"no vectors of {pointer.dtype}")

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        if pointer.dtype == types.float32:
            return builder.load(_at(builder, args[0], args[1], _FLOAT), align=4)
        halves = builder.load(_at(builder, args[0], args[1], ir.IntType(16)), align=2)
        words = ir.VectorType(_INT, LANES)
        shifted = builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * LANES))
        return builder.bitcast(shifted, _VECTOR)

    return _vector(pointer, types.int64), generate


@intrinsic
def store_vector(_typing_context: Any, pointer: types.Type, index: types.Type, vector: types.Type) -> Any:
    """Write 16 float32 from an index on."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], _at(builder, args[0], args[1], _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.int64, _vector), generate


@intrinsic
def multiply_add(_typing_context: Any, a: types.Type, b: types.Type, c: types.Type) -> Any:
    """a * b + c."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        return builder.fadd(builder.fmul(args[0], args[1], flags=_FLAGS), args[2], flags=_FLAGS)

    return _vector(_vector, _vector, _vector), generate


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


@intrinsic
def larger(_typing_context: Any, a: types.Type, b: types.Type) -> Any:
    """The larger of each pair; a where b is NaN."""
    return _vector(_vector, _vector), lambda context, builder, _, args: _larger(builder, *args)


def _reduce(combine: Callable[[Any, ir.Value, ir.Value], ir.Value]) -> Any:
    """An intrinsic that folds a vector in halves."""

    @intrinsic
    def reduce(_typing_context: Any, vector: types.Type) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
            (folded,) = args
            while (half := folded.type.count // 2) >= 1:
                parts = [
                    builder.shuffle_vector(
                        folded, folded, ir.Constant(ir.VectorType(_INT, half), list(range(start, start + half)))
                    )
                    for start in (0, half)
                ]
                folded = combine(builder, *parts)
            return builder.extract_element(folded, ir.Constant(_INT, 0))

        return types.float32(_vector), generate

    return reduce


sum_of = _reduce(lambda builder, a, b: builder.fadd(a, b, flags=_FLAGS))
largest_of = _reduce(_larger)
