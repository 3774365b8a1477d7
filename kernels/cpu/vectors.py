"""Vectors of 16 float32 in numba kernels, for loops that LLVM does not vectorise well.

LLVM does not know that scratch memory and caches do not overlap. It checks this before every loop, which takes longer
than the 32 elements of a small head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .kernel import EXP2_COEFFICIENTS, EXP2_RANGE, FASTMATH, cpu_features, cpu_name, device_function, exp2

LANES = 16
_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
VECTOR, WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
# Whether a vector is one register; the CPU then has 32 vector registers.
HAS_WIDE_VECTORS = cpu_features().get("avx512f", False)
# Whether one instruction multiplies pairs of bfloat16; it treats numbers below 2^-126 as 0.
HAS_BF16_PRODUCTS = cpu_features().get("avx512bf16", False)
# Whether x - floor(x) and a product with 2^floor(x) take one instruction each, which halves the time of `exp2_of`.
_HAS_SCALING = cpu_features().get("avx512dq", False)
_IS_ZEN = cpu_name().startswith("znver")
# Rows of a matrix in `add_outer_products`.
OUTER_ROWS = 8
# Columns of one iteration of `add_outer_products`. Four columns leave a quarter of the loop's overhead.
_OUTER_COLUMNS = 4
# Elements of an operand in `product_tile`, and its outputs per row.
OPERAND_SIZES, OUTPUTS = {torch.float32: LANES, torch.bfloat16: 2 * LANES}, 4
_FLAGS = tuple(FASTMATH)
# Names of elements in masked loads and stores.
_MASKED = {_FLOAT: "f32", ir.IntType(16): "i16", _BYTE: "i8"}
# e^x = 2^(x LOG2_E).
LOG2_E = 1.4426950408889634
# tanh rounds to 1 from here on. Below, tanh(x) = x * numerator / denominator, with the coefficients of x^8, x^6, ...
TANH_END = 8.4
_TANH_NUMERATOR = 1.4458046e-8, 2.1379920e-5, 3.5416266e-3, 1.3419588e-1, 1.0
_TANH_DENOMINATOR = 8.2200419e-7, 3.3614422e-4, 2.6051475e-2, 4.6752914e-1, 1.0
_Combine = Callable[[Any, ir.Value, ir.Value], ir.Value]


@device_function
def softplus(x):
    """log(1 + exp(x)) by arithmetic alone, so that LLVM vectorises loops of it.

    log(1 + y) = 2 atanh(y / (2 + y)), and eight terms of its series are exact to float32 for y up to 1.
    """
    y = exp2(np.float32(-LOG2_E) * np.abs(x))
    z = y / (np.float32(2) + y)
    square = z * z
    total = np.float32(1 / 15)
    for divisor in (13, 11, 9, 7, 5, 3, 1):
        total = total * square + np.float32(1 / divisor)
    return max(x, np.float32(0)) + np.float32(2) * z * total


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, VECTOR)


def emitted(result: types.Type = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic from a function that emits its code with a builder.

    Other emitting functions call it as the intrinsic's `emit`. Integers are int64, numbers float32.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def function(_typing_context: Any, *argument_types: types.Type) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
                value = emit(builder, *args)
                if result == types.void:
                    value = context.get_dummy_value()
                return value

            kinds = []
            for kind in argument_types:
                if isinstance(kind, types.Integer):
                    kind = types.int64
                elif isinstance(kind, types.Float):
                    kind = types.float32
                kinds.append(kind)
            return result(*kinds), generate

        function.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        function.__name__ = emit.__name__
        emitter = intrinsic(function)
        emitter.emit = emit
        return emitter

    return decorate


def is_number(argument: ir.Value) -> bool:
    """Return whether an argument of emitted code is a number, not None."""
    return isinstance(argument.type, ir.IntType)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call a function of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), args)


def plus(builder: ir.IRBuilder, index: ir.Value, number: int) -> ir.Value:
    """Return index + number."""
    return builder.add(index, ir.Constant(index.type, number))


def splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.Type = VECTOR) -> ir.Value:
    """Return a vector of one value in all lanes."""
    lowest = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(lowest, lowest, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count))


def at(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    """Return a pointer to 16 elements from an index on."""
    return builder.bitcast(builder.gep(pointer, [index]), ir.VectorType(element, LANES).as_pointer())


@emitted(_vector)
def fill(builder, value):
    """Return a vector of one value."""
    return splat(builder, value)


def as_floats(builder: ir.IRBuilder, elements: ir.Value) -> ir.Value:
    """Return a vector as float32; bfloat16 are converted."""
    if elements.type.element == _FLOAT:
        return elements
    count = elements.type.count
    words = ir.VectorType(_INT, count)
    shifted = builder.shl(builder.zext(elements, words), ir.Constant(words, [16] * count))
    return builder.bitcast(shifted, ir.VectorType(_FLOAT, count))


@emitted(_vector)
def load_vector(builder, pointer, index):
    """Load 16 elements of float32 or bfloat16 from an index on."""
    element = pointer.type.pointee
    return as_floats(builder, builder.load(at(builder, pointer, index, element), align=4 if element == _FLOAT else 2))


@device_function
def number_of_e4m3(code):
    """Return the number of an e4m3 code."""
    code = np.int32(code)
    magnitude = code & np.int32(0x7F)
    if magnitude == np.int32(0x7F):
        return np.float32(np.nan)
    # As in `load_e4m3`.
    word = np.int32((magnitude << np.int32(20)) | ((code & np.int32(0x80)) << np.int32(24)))
    return word.view(np.float32) * np.float32(2.0**120)


@emitted(_vector)
def load_e4m3(builder, codes, index):
    """Load 16 finite e4m3 numbers from an index on."""
    words = builder.zext(builder.load(at(builder, codes, index, _BYTE), align=1), WORDS)
    magnitudes = builder.shl(builder.and_(words, _each(0x7F)), _each(20))
    signs = builder.shl(builder.and_(words, _each(0x80)), _each(24))
    # The bits of a float32 that is 2^120 times smaller: float32's bias is 127, that of e4m3 is 7.
    small = builder.bitcast(builder.or_(magnitudes, signs), VECTOR)
    return builder.fmul(small, ir.Constant(VECTOR, [2.0**120] * LANES))


def _each(word: int) -> ir.Constant:
    return ir.Constant(WORDS, [word] * LANES)


def _first(builder: ir.IRBuilder, count: ir.Value, num_lanes: int = LANES) -> ir.Value:
    """Return a mask of the first `count` lanes; all lanes if it is larger."""
    words = ir.VectorType(_INT, num_lanes)
    lanes = ir.Constant(words, list(range(num_lanes)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, _INT), words))


def _is_whole(builder: ir.IRBuilder, count: ir.Value, num_lanes: int = LANES) -> ir.Value:
    """Return whether `count` covers all lanes. Masked loads are slow if they go element by element."""
    return builder.icmp_signed(">=", count, ir.Constant(count.type, num_lanes))


@emitted(_vector)
def load_part(builder, pointer, index, count):
    """Load the first `count` of 16 elements, or all; the others are 0 and not read."""
    source, name = at(builder, pointer, index, pointer.type.pointee), f"v{LANES}{_MASKED[pointer.type.pointee]}.p0"
    kind = source.type.pointee
    args = source, ir.Constant(_INT, 2), _first(builder, count), ir.Constant(kind, None)
    if HAS_WIDE_VECTORS:
        return as_floats(builder, call(builder, f"masked.load.{name}", kind, *args))
    loaded = cgutils.alloca_once(builder, VECTOR)
    with builder.if_else(_is_whole(builder, count)) as (if_full, if_part):
        with if_full:
            builder.store(load_vector.emit(builder, pointer, index), loaded)
        with if_part:
            builder.store(as_floats(builder, call(builder, f"masked.load.{name}", kind, *args)), loaded)
    return builder.load(loaded)


def _rounded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Round to 16 bfloat16, to nearest, ties to even."""
    halves = ir.VectorType(ir.IntType(16), LANES)
    if HAS_BF16_PRODUCTS:
        return call(builder, "x86.avx512bf16.cvtneps2bf16.512", halves, vector)
    words, sixteen = builder.bitcast(vector, WORDS), ir.Constant(WORDS, [16] * LANES)
    is_odd = builder.and_(builder.lshr(words, sixteen), ir.Constant(WORDS, [1] * LANES))
    rounded = builder.add(builder.add(words, ir.Constant(WORDS, [0x7FFF] * LANES)), is_odd)
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    rounded = builder.select(is_nan, ir.Constant(WORDS, [0x7FC0 << 16] * LANES), rounded)
    return builder.trunc(builder.lshr(rounded, sixteen), halves)


@emitted()
def store_vector(builder, pointer, index, vector):
    """Store 16 float32, or round them to bfloat16, from an index on."""
    value = vector if pointer.type.pointee == _FLOAT else _rounded(builder, vector)
    builder.store(value, at(builder, pointer, index, value.type.element), align=2)


@emitted()
def store_part(builder, pointer, index, vector, count):
    """Store the first `count` of 16, or all; see `store_vector`."""
    value = vector if pointer.type.pointee == _FLOAT else _rounded(builder, vector)
    store_first(builder, builder.gep(pointer, [index]), value, count)


def store_first(builder: ir.IRBuilder, pointer: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Store the first `count` lanes of a vector, or all."""
    num_lanes, name = value.type.count, _MASKED[value.type.element]
    place, align = builder.bitcast(pointer, value.type.as_pointer()), 1 if value.type.element == _BYTE else 2
    args = value, place, ir.Constant(_INT, align), _first(builder, count, num_lanes)
    if HAS_WIDE_VECTORS:
        call(builder, f"masked.store.v{num_lanes}{name}.p0", ir.VoidType(), *args)
        return
    with builder.if_else(_is_whole(builder, count, num_lanes)) as (if_full, part):
        with if_full:
            builder.store(value, place, align=align)
        with part:
            call(builder, f"masked.store.v{num_lanes}{name}.p0", ir.VoidType(), *args)


def _sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b, flags=_FLAGS)


@emitted(_vector)
def multiply_add(builder, a, b, c):
    """Return a * b + c."""
    return _sum(builder, builder.fmul(a, b, flags=_FLAGS), c)


@emitted(_vector)
def multiply(builder, a, b):
    """Return a * b."""
    return builder.fmul(a, b, flags=_FLAGS)


@emitted(_vector)
def larger(builder, a, b):
    """Return the larger of each pair; a where b is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def sum_from_zero(builder: ir.IRBuilder, kind: ir.Type = VECTOR) -> ir.Value:
    """Return a variable for a vector of sums, set to 0."""
    zero = ir.Constant(kind, [0.0] * kind.count)
    total = cgutils.alloca_once_value(builder, zero)
    builder.store(zero, total)  # set it again for every pass of an enclosing loop
    return total


@contextmanager
def steps(builder: ir.IRBuilder, size: ir.Value, step: int) -> Iterator[ir.Value]:
    """Emit a loop from 0 to below `size`."""
    zero, increment = ir.Constant(size.type, 0), ir.Constant(size.type, step)
    with cgutils.for_range_slice(builder, zero, size, increment, size.type) as (i, _):
        yield i


def lanes_of(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Return these lanes of a, followed by b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes)))


def in_turn(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> list[ir.Value]:
    """Return two vectors of the lanes of a and b in turn: a0, b0, a1, b1, ..."""
    lanes = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
    return [lanes_of(builder, a, b, lanes[:LANES]), lanes_of(builder, a, b, lanes[LANES:])]


def _fold(builder: ir.IRBuilder, vector: ir.Value, count: int, combine: _Combine) -> ir.Value:
    """Combine the halves of a vector repeatedly until it has `count` lanes."""
    while (half := vector.type.count // 2) >= count:
        low = lanes_of(builder, vector, vector, range(half))
        high = lanes_of(builder, vector, vector, range(half, 2 * half))
        vector = combine(builder, low, high)
    return vector


def _reduction(combine: _Combine) -> Any:
    """Return an intrinsic that reduces a vector to one float32."""

    @emitted(types.float32)
    def reduce(builder, vector):
        return builder.extract_element(_fold(builder, vector, 1, combine), ir.Constant(_INT, 0))

    return reduce


sum_of, largest_of = _reduction(_sum), _reduction(larger.emit)


def merged_sums(builder: ir.IRBuilder, vectors: Sequence[ir.Value], half: int) -> list[ir.Value]:
    """Merge each two vectors into one: of every 2 * `half` lanes of both, the sums of the first and the last `half`."""
    count = vectors[0].type.count
    low = [i // half * 2 * half + i % half for i in range(count)]
    high = [lane + half for lane in low]
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [_sum(builder, lanes_of(builder, a, b, low), lanes_of(builder, a, b, high)) for a, b in pairs]


def store_sums(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, vectors: Sequence[ir.Value]) -> None:
    """Store the sum of each vector's elements, as float32 or bfloat16; the number of vectors is a power of two."""
    count = half = len(vectors)
    sums = [_fold(builder, vector, count, _sum) for vector in vectors]
    while half := half // 2:
        sums = merged_sums(builder, sums, half)
    [total] = sums
    if pointer.type.pointee != _FLOAT:
        rounded = _rounded(builder, lanes_of(builder, total, total, [i % count for i in range(LANES)]))
        total = lanes_of(builder, rounded, rounded, range(count))
    builder.store(total, builder.bitcast(builder.gep(pointer, [index]), total.type.as_pointer()), align=2)


@emitted(_vector)
def exp2_of(builder, x):
    """Return `exp2` of each element."""

    def constant(value: float) -> ir.Constant:
        return ir.Constant(VECTOR, [value] * LANES)

    def in_one(name: str, *operands: ir.Value) -> ir.Value:
        unused, all_lanes = ir.Constant(VECTOR, ir.Undefined), ir.Constant(ir.IntType(16), -1)
        current_rounding = ir.Constant(_INT, 4)
        return call(builder, f"x86.avx512.mask.{name}.ps.512", VECTOR, *operands, unused, all_lanes, current_rounding)

    def polynomial(part: ir.Value) -> ir.Value:
        result = constant(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            result = multiply_add.emit(builder, result, part, constant(coefficient))
        return result

    if _HAS_SCALING:
        down = ir.Constant(_INT, 9)
        return in_one("scalef", polynomial(in_one("reduce", x, down)), x)
    for word, bound in (("<", EXP2_RANGE[0]), (">", EXP2_RANGE[1])):
        x = builder.select(builder.fcmp_ordered(word, x, constant(bound)), constant(bound), x)
    floor = call(builder, f"floor.v{LANES}f32", VECTOR, x)
    result = polynomial(builder.fsub(x, floor, flags=_FLAGS))
    exponent = builder.add(builder.fptosi(floor, WORDS), ir.Constant(WORDS, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(WORDS, [23] * LANES)), VECTOR)
    return builder.fmul(result, power, flags=_FLAGS)


@emitted(_vector)
def softcapped(builder, x, cap):
    """Return cap * tanh(x / cap) of each element, with a relative error of 4e-7.

    tanh is a minimax quotient of polynomials. 1 - 2 / (e^2x + 1) takes as many instructions, but its error is absolute,
    which is too large for small scores.
    """

    def constant(value: float) -> ir.Constant:
        return ir.Constant(VECTOR, [value] * LANES)

    def polynomial(coefficients: Sequence[float]) -> ir.Value:
        result = constant(coefficients[0])
        for coefficient in coefficients[1:]:
            result = multiply_add.emit(builder, result, square, constant(coefficient))
        return result

    x = builder.fmul(x, splat(builder, builder.fdiv(ir.Constant(_FLOAT, 1.0), cap)), flags=_FLAGS)
    for word, bound in (("<", -TANH_END), (">", TANH_END)):
        x = builder.select(builder.fcmp_ordered(word, x, constant(bound)), constant(bound), x)
    square = builder.fmul(x, x, flags=_FLAGS)
    numerator = builder.fmul(builder.fmul(splat(builder, cap), x), polynomial(_TANH_NUMERATOR), flags=_FLAGS)
    return builder.fdiv(numerator, polynomial(_TANH_DENOMINATOR), flags=_FLAGS)


@emitted(_vector)
def distances(builder, position, keys):
    """Return |position - key| of each pair."""
    return call(builder, f"fabs.v{LANES}f32", VECTOR, builder.fsub(position, keys, flags=_FLAGS))


@emitted(_vector)
def count_from(builder, first):
    """Return a vector of first, first + 1, ..."""
    lanes = ir.Constant(VECTOR, [float(lane) for lane in range(LANES)])
    return _sum(builder, splat(builder, first), lanes)


@emitted(_vector)
def silu(builder, gate, up):
    """Return gate / (1 + e^-gate) * up."""
    minus_log2_e, ones = ir.Constant(VECTOR, [-LOG2_E] * LANES), ir.Constant(VECTOR, [1.0] * LANES)
    power = exp2_of.emit(builder, builder.fmul(gate, minus_log2_e, flags=_FLAGS))
    quotient = builder.fdiv(gate, _sum(builder, ones, power), flags=_FLAGS)
    return builder.fmul(quotient, up, flags=_FLAGS)


def prefetch(builder: ir.IRBuilder, pointer: ir.Value, locality: int = 2) -> None:
    """Prefetch a line of 64 bytes, if the memory exists, to the L2 cache, or with locality 3 to the L1 cache."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    read, data = ir.Constant(_INT, 0), ir.Constant(_INT, 1)
    call(builder, "prefetch.p0", ir.VoidType(), address, read, ir.Constant(_INT, locality), data)


@emitted()
def prefetch_row(builder, pointer, index, size):
    """Prefetch `size` elements from an index on to the L2 cache."""
    row, element = builder.gep(pointer, [index]), pointer.type.pointee
    line = 2 * LANES
    if element == _FLOAT:
        line = LANES
    elif element == _BYTE:
        line = 4 * LANES
    with steps(builder, size, line) as i:
        prefetch(builder, builder.gep(row, [i]))


def _add_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """Return total + a * b; for pairs of bfloat16, both products are added."""
    if a.type == VECTOR:
        return multiply_add.emit(builder, a, b, total)
    if HAS_BF16_PRODUCTS:
        return call(builder, "x86.avx512bf16.dpbf16ps.512", VECTOR, total, a, b)
    sixteen, upper = ir.Constant(WORDS, [16] * LANES), ir.Constant(WORDS, [-1 << 16] * LANES)
    low_a = builder.bitcast(builder.shl(a, sixteen), VECTOR)
    low_b = builder.bitcast(builder.shl(b, sixteen), VECTOR)
    high_a = builder.bitcast(builder.and_(a, upper), VECTOR)
    high_b = builder.bitcast(builder.and_(b, upper), VECTOR)
    total = multiply_add.emit(builder, low_a, low_b, total)
    return multiply_add.emit(builder, high_a, high_b, total)


@emitted()
def store_products(builder, row, first, rows, start, stride, size, out, to):
    """Store the products of a row, from `first` on, with 16 rows of `size` elements, a multiple of 16.

    The rows begin at `start`, `stride` apart. If the row is bfloat16, they are too, and pairs are multiplied.
    """
    has_pairs = row.type.pointee != _FLOAT
    step = 2 * LANES if has_pairs else LANES

    def operand(pointer: ir.Value, index: ir.Value) -> ir.Value:
        if not has_pairs:
            return load_vector.emit(builder, pointer, index)
        return builder.load(at(builder, pointer, index, _INT), align=2)

    row_pointer, starts = builder.gep(row, [first]), multiples(builder, start, stride, LANES)
    totals = [sum_from_zero(builder) for _ in starts]
    end = builder.and_(size, ir.Constant(size.type, -step))
    with steps(builder, end, step) as i:
        factor = operand(row_pointer, i)
        for row_start, total in zip(starts, totals, strict=True):
            vector = operand(rows, builder.add(row_start, i))
            builder.store(_add_products(builder, factor, vector, builder.load(total)), total)
    if has_pairs:
        with builder.if_then(builder.icmp_signed("<", end, size)):  # the last LANES elements are half a step
            factor = load_vector.emit(builder, row_pointer, end)
            for row_start, total in zip(starts, totals, strict=True):
                vector = load_vector.emit(builder, rows, builder.add(row_start, end))
                builder.store(multiply_add.emit(builder, factor, vector, builder.load(total)), total)
    store_sums(builder, out, to, [builder.load(total) for total in totals])


def add_weighted(
    builder: ir.IRBuilder,
    num_rows: int,
    floats: ir.Value,
    indices: tuple[ir.Value, ...],
    values_of: Callable[[ir.Value], list[ir.Value]],
) -> None:
    """Emit what `weighted_sums` does, for values that `values_of` reads.

    indices: to, step, first, weight_step, count.
    values_of: returns the two vectors of values of a key.
    """
    to, step, first, weight_step, count = indices

    def add_values(key: ir.Value, totals: Sequence[Sequence[ir.Value]]) -> None:
        vectors = values_of(key)
        for row, halves in enumerate(totals):
            weight = splat(builder, builder.load(builder.gep(weights[row], [key])))
            for vector, total in zip(vectors, halves, strict=True):
                builder.store(multiply_add.emit(builder, weight, vector, builder.load(total)), total)

    places = multiples(builder, to, step, num_rows)
    weights = multiples(builder, builder.gep(floats, [first]), weight_step, num_rows)
    # Use two sums for each product, of even and of odd steps, so that one addition does not wait for the other.
    even, odd = ([[sum_from_zero(builder) for _ in range(2)] for _ in places] for _ in range(2))
    pairs = builder.and_(count, ir.Constant(count.type, -2))
    with steps(builder, pairs, 2) as key:
        add_values(key, even)
        add_values(plus(builder, key, 1), odd)
    with builder.if_then(builder.icmp_signed("<", pairs, count)):
        add_values(pairs, even)
    for place, evens, odds in zip(places, even, odd, strict=True):
        for half in range(2):
            index = plus(builder, place, half * LANES)
            total = _sum(builder, builder.load(evens[half]), builder.load(odds[half]))
            store_vector.emit(builder, floats, index, _sum(builder, load_vector.emit(builder, floats, index), total))


def multiples(builder: ir.IRBuilder, first: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
    """Return `count` indices or pointers, `step` apart."""
    is_pointer = isinstance(first.type, ir.PointerType)
    places = [first]
    while len(places) < count:
        if is_pointer:
            places.append(builder.gep(places[-1], [step]))
        else:
            places.append(builder.add(places[-1], step))
    return places


def weighted_sums(num_rows: int) -> Any:
    """Return an intrinsic that adds `count` vectors of 32 values, `stride` apart, to `num_rows` rows of 32 sums.

    Values are read and widened once for all rows. The sums of row r begin at `to` + r * `step`, its weights at `first`
    + r * `weight_step`. A row's bits do not depend on `num_rows`.
    """

    @emitted()
    def add(builder, floats, to, step, first, weight_step, values, start, stride, count):
        def values_of(key: ir.Value) -> list[ir.Value]:
            place = builder.add(start, builder.mul(key, stride))
            second = builder.add(place, ir.Constant(place.type, LANES))
            return [load_vector.emit(builder, values, index) for index in (place, second)]

        add_weighted(builder, num_rows, floats, (to, step, first, weight_step, count), values_of)

    return add


def round_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return words of two bfloat16 each: from a in the low bits, from b in the high bits."""
    low = builder.zext(_rounded(builder, a), WORDS)
    high = builder.zext(_rounded(builder, b), WORDS)
    return builder.or_(low, builder.shl(high, ir.Constant(WORDS, [16] * LANES)))


def product_tile(num_rows: int) -> Any:
    """Return an intrinsic for products of `num_rows` rows of x with `OUTPUTS` rows of weights.

    Rows of x begin at `starts`, weights are `step` apart from `weights` on. Results of row r go to out from `to` + r *
    `stride` on. x and w are float32 or bfloat16, with `size` elements, a multiple of `OPERAND_SIZES`. Sums are float32,
    and are rounded if out is bfloat16.
    """
    # Prefetch the next tile of weights. For up to two rows Zen 5 is faster without, see limits.md.
    has_prefetch = not (_IS_ZEN and num_rows <= 2)

    @emitted()
    def tile(builder, x, starts, w, weights, step, size, out, to, stride):
        element = _FLOAT if x.type.pointee == _FLOAT else _INT
        rows = [builder.gep(x, [start]) for start in cgutils.unpack_tuple(builder, starts)]
        columns = multiples(builder, builder.gep(w, [weights]), step, OUTPUTS)

        def operand(row: ir.Value, index: ir.Value) -> ir.Value:
            return builder.load(at(builder, row, index, element), align=2)

        ahead = builder.mul(step, ir.Constant(step.type, OUTPUTS))
        totals = [[sum_from_zero(builder) for _ in columns] for _ in rows]
        with steps(builder, size, LANES if element is _FLOAT else 2 * LANES) as i:
            factors = [operand(column, i) for column in columns]
            if has_prefetch:
                for column in columns:
                    prefetch(builder, builder.gep(column, [builder.add(i, ahead)]))
            for row, sums in zip(rows, totals, strict=True):
                elements = operand(row, i)
                for factor, total in zip(factors, sums, strict=True):
                    builder.store(_add_products(builder, elements, factor, builder.load(total)), total)
        for sums in totals:
            store_sums(builder, out, to, [builder.load(total) for total in sums])
            to = builder.add(to, stride)

    return tile


@emitted()
def copy_words(builder, source, index, target, to):
    """Copy 16 words of 32 bits between two arrays, from an index on in each."""
    builder.store(builder.load(at(builder, source, index, _INT), align=2), at(builder, target, to, _INT), align=2)


@emitted()
def store_pairs(builder, pointer, index, a, b):
    """Store pairs of bfloat16 as words, from a in the low bits and from b in the high bits, from a float32 index on.

    It rounds to nearest, ties away from 0, in half the time of `round_pairs`. NaN may become infinite.
    """
    half, sixteen, upper = (ir.Constant(WORDS, [bits] * LANES) for bits in (1 << 15, 16, -1 << 16))
    low = builder.add(builder.bitcast(a, WORDS), half)
    high = builder.add(builder.bitcast(b, WORDS), half)
    pairs = builder.or_(builder.lshr(low, sixteen), builder.and_(high, upper))
    builder.store(pairs, at(builder, pointer, index, _INT), align=4)


@emitted(_vector)
def load_half_of_pairs(builder, pointer, index, is_second):
    """Load the first or the second of 16 pairs that `store_pairs` stored from a float32 index on, as float32."""
    pairs = builder.load(at(builder, pointer, index, _INT), align=4)
    first, second = builder.shl(pairs, _each(16)), builder.and_(pairs, _each(-1 << 16))
    return builder.bitcast(builder.select(is_second, second, first), VECTOR)


@emitted(_vector)
def within(builder, vector, position, bounds, first, end, outside):
    """Return a vector with `outside` in elements whose bounds do not contain a position: first <= position < end.

    The bounds are 16 from each of two indices on.
    """
    firsts = builder.load(at(builder, bounds, first, _INT), align=4)
    ends = builder.load(at(builder, bounds, end, _INT), align=4)
    words = splat(builder, builder.trunc(position, _INT), WORDS)
    is_within = builder.and_(builder.icmp_signed("<=", firsts, words), builder.icmp_signed("<", words, ends))
    return builder.select(is_within, vector, splat(builder, outside))


@emitted()
def add_outer_products(builder, a, first, row_step, column_step, b, begin, count, out, to, is_first, following):
    """Compute out += a b, or out = a b if `is_first`: a has 8 rows and `count` columns, b as many rows of 32.

    row_step, column_step: distances between rows and columns of a, in elements. b and out are 16 x 16 tiles, two for 16
    rows. Meanwhile, 8 * `count` elements of a from `following` on are prefetched unless it is None: weights used once
    then take 0.75 of the time.
    """
    index = to.type
    ahead = None
    if is_number(following):
        ahead = builder.gep(a, [following])
    tile, lanes = ir.Constant(index, LANES * LANES), ir.Constant(index, LANES)
    rows, places = [builder.gep(a, [first])], [to]
    while len(rows) < OUTER_ROWS:
        rows.append(builder.gep(rows[-1], [row_step]))
        places.append(builder.add(places[-1], lanes))
    pointers = []
    for place in places:
        pointers.append(at(builder, out, place, _FLOAT))
        pointers.append(at(builder, out, builder.add(place, tile), _FLOAT))
    totals = [cgutils.alloca_once(builder, VECTOR) for _ in pointers]
    for pointer, total in zip(pointers, totals, strict=True):
        builder.store(ir.Constant(VECTOR, [0.0] * LANES), total)
        with builder.if_then(builder.not_(is_first)):
            builder.store(builder.load(pointer, align=4), total)
    num_unrolled = builder.and_(count, ir.Constant(index, -_OUTER_COLUMNS))
    for low, high, columns in ((ir.Constant(index, 0), num_unrolled, _OUTER_COLUMNS), (num_unrolled, count, 1)):
        with cgutils.for_range_slice(builder, low, high, ir.Constant(index, columns), index) as (i, _):
            start = builder.add(begin, builder.mul(i, lanes))
            start = builder.add(start, builder.mul(builder.lshr(i, ir.Constant(index, 4)), tile))
            column = builder.mul(i, column_step)
            if columns > 1 and ahead is not None:
                lines = builder.mul(i, ir.Constant(index, OUTER_ROWS))
                for line in range(0, OUTER_ROWS * columns, LANES):
                    prefetch(builder, builder.gep(ahead, [builder.add(lines, ir.Constant(index, line))]))
            for _ in range(columns):
                factors = [
                    builder.load(at(builder, b, start, _FLOAT), align=4),
                    builder.load(at(builder, b, builder.add(start, tile), _FLOAT), align=4),
                ]
                for number, row in enumerate(rows):
                    element = splat(builder, builder.load(builder.gep(row, [column])))
                    for factor, total in zip(factors, totals[2 * number :], strict=False):
                        builder.store(multiply_add.emit(builder, element, factor, builder.load(total)), total)
                start, column = builder.add(start, lanes), builder.add(column, column_step)
    for pointer, total in zip(pointers, totals, strict=True):
        builder.store(builder.load(total), pointer, align=4)
