"""Vectors of 16 float32 in numba's loops: what LLVM does not make of a loop itself.

It does not know that scratch and caches are apart, and asks before every loop, which takes longer than the 32 elements
of a small head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic, models, register_model

from paged.kernels.common.numba_ops.kernel import EXP2_COEFFICIENTS, EXP2_RANGE, FASTMATH

LANES = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
# Products of pairs of bfloat16 in one instruction, which takes numbers below 2^-126 for 0.
_HAS_BF16_PRODUCTS = llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)
# Elements of an operand of `product_tile`, and outputs of each of its rows.
OPERAND_SIZES, OUTPUTS = {torch.float32: LANES, torch.bfloat16: 2 * LANES}, 4
_FLAGS = tuple(FASTMATH)
_Combine = Callable[[Any, ir.Value, ir.Value], ir.Value]


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
        shifted = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * LANES))
        return builder.bitcast(shifted, _VECTOR)

    return _vector(pointer, types.int64), generate


@intrinsic
def store_vector(_typing_context: Any, pointer: types.Type, index: types.Type, vector: types.Type) -> Any:
    """Write 16 float32 from an index on."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], _at(builder, args[0], args[1], _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.int64, _vector), generate


def _sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b, flags=_FLAGS)


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _sum(builder, builder.fmul(a, b, flags=_FLAGS), c)


@intrinsic
def multiply_add(_typing_context: Any, a: types.Type, b: types.Type, c: types.Type) -> Any:
    """a * b + c."""
    return _vector(_vector, _vector, _vector), lambda context, builder, _, args: _multiply_add(builder, *args)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


@intrinsic
def larger(_typing_context: Any, a: types.Type, b: types.Type) -> Any:
    """The larger of each pair; a where b is NaN."""
    return _vector(_vector, _vector), lambda context, builder, _, args: _larger(builder, *args)


def _part(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Those lanes of a, then b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes)))


def _fold(builder: ir.IRBuilder, vector: ir.Value, count: int, combine: _Combine) -> ir.Value:
    """The halves of a vector combined, and those of the result, until it has `count` lanes."""
    while (half := vector.type.count // 2) >= count:
        lanes = range(half), range(half, 2 * half)
        vector = combine(builder, *(_part(builder, vector, vector, each) for each in lanes))
    return vector


def _reduction(combine: _Combine) -> Any:
    """An intrinsic that makes one float32 of a vector."""

    @intrinsic
    def reduce(_typing_context: Any, vector: types.Type) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
            return builder.extract_element(_fold(builder, args[0], 1, combine), ir.Constant(_INT, 0))

        return types.float32(_vector), generate

    return reduce


sum_of, largest_of = _reduction(_sum), _reduction(_larger)


def _store_sums(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, vectors: Sequence[ir.Value]) -> None:
    quarters = [_fold(builder, vector, 4, _sum) for vector in vectors]
    low, high = (
        _sum(builder, *(_part(builder, a, b, lanes) for lanes in ([0, 4, 1, 5], [2, 6, 3, 7])))
        for a, b in (quarters[:2], quarters[2:])
    )
    sums = _sum(builder, *(_part(builder, low, high, lanes) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])))
    builder.store(sums, builder.bitcast(builder.gep(pointer, [index]), sums.type.as_pointer()), align=4)


@intrinsic
def store_sums(
    _typing_context: Any,
    pointer: types.Type,
    index: types.Type,
    a: types.Type,
    b: types.Type,
    c: types.Type,
    d: types.Type,
) -> Any:
    """Write the sums of four vectors, one behind the other, from an index on."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        _store_sums(builder, args[0], args[1], args[2:])
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.int64, *[_vector] * 4), generate


@intrinsic
def exp2_of(_typing_context: Any, vector: types.Type) -> Any:
    """`exp2` of each."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
        def constant(value: float) -> ir.Constant:
            return ir.Constant(_VECTOR, [value] * LANES)

        (x,) = args
        for word, bound in (("<", EXP2_RANGE[0]), (">", EXP2_RANGE[1])):
            x = builder.select(builder.fcmp_ordered(word, x, constant(bound)), constant(bound), x)
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
        whole = builder.call(floor, [x])
        part, result = builder.fsub(x, whole, flags=_FLAGS), constant(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            result = _multiply_add(builder, result, part, constant(coefficient))
        exponent = builder.add(builder.fptosi(whole, _WORDS), ir.Constant(_WORDS, [127] * LANES))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(_WORDS, [23] * LANES)), _VECTOR)
        return builder.fmul(result, power, flags=_FLAGS)

    return _vector(_vector), generate


def _add_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """total + a * b, of pairs of bfloat16 both products."""
    if a.type == _VECTOR:
        return _multiply_add(builder, a, b, total)
    if _HAS_BF16_PRODUCTS:
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _WORDS, _WORDS])
        multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(multiply, [total, a, b])
    sixteen, upper = (ir.Constant(_WORDS, [bits] * LANES) for bits in (16, -1 << 16))
    for halves in ([builder.shl(each, sixteen) for each in (a, b)], [builder.and_(each, upper) for each in (a, b)]):
        own, other = (builder.bitcast(half, _VECTOR) for half in halves)
        total = _multiply_add(builder, own, other, total)
    return total


def product_tile(num_rows: int) -> Any:
    """An intrinsic: products of so many rows of x, which begin at `starts`, with `OUTPUTS` rows of the weights, from
    `weights` on and `step` apart. Row r's go to `to` + r * `stride` of out.

    x and w are float32 or bfloat16, `size` elements of each a multiple of `OPERAND_SIZES`; sums are float32.
    """

    @intrinsic
    def tile(
        _typing_context: Any,
        x: Any,
        starts: Any,
        w: Any,
        weights: Any,
        step: Any,
        size: Any,
        out: Any,
        to: Any,
        stride: Any,
    ) -> Any:
        element = _FLOAT if x.dtype == types.float32 else _INT
        index = types.int64

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> ir.Value:
            x, starts, w, weights, step, size, out, to, stride = args
            rows = [builder.gep(x, [start]) for start in cgutils.unpack_tuple(builder, starts)]
            columns = [builder.gep(w, [weights])]
            while len(columns) < OUTPUTS:
                columns.append(builder.gep(columns[-1], [step]))

            def operand(row: ir.Value, at: ir.Value) -> ir.Value:
                return builder.load(_at(builder, row, at, element), align=2)

            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in columns] for _ in rows]
            for sums in totals:
                for total in sums:
                    builder.store(zero, total)
            begin, lanes = (ir.Constant(size.type, each) for each in (0, LANES if element is _FLOAT else 2 * LANES))
            with cgutils.for_range_slice(builder, begin, size, lanes, size.type) as (at, _):
                factors = [operand(column, at) for column in columns]
                for row, sums in zip(rows, totals, strict=True):
                    own = operand(row, at)
                    for factor, total in zip(factors, sums, strict=True):
                        builder.store(_add_products(builder, own, factor, builder.load(total)), total)
            for sums in totals:
                _store_sums(builder, out, to, [builder.load(total) for total in sums])
                to = builder.add(to, stride)
            return context.get_dummy_value()

        pointers = types.CPointer(types.float32)
        return types.void(x, types.UniTuple(index, num_rows), w, index, index, index, pointers, index, index), generate

    return tile
