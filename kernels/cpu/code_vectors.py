"""Rows of 8- and 4-bit caches as vectors of 16 float32 in numba kernels, 32 numbers at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from .kernel import FASTMATH, bfloats, cpu_features, floats, uint8s
from .vectors import (
    HAS_WIDE_VECTORS,
    LANES,
    VECTOR,
    WORDS,
    add_weighted,
    at,
    call,
    emitted,
    in_turn,
    load_vector,
    multiples,
    multiply_add,
    plus,
    splat,
    steps,
    store_sums,
    store_vector,
    sum_from_zero,
)

# Numbers that are read together, and that share a scale in int4.
NUMBERS = 2 * LANES
_INT, _SHORT, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_SHORTS, _HALVES = ir.VectorType(_SHORT, LANES), ir.VectorType(ir.HalfType(), LANES)
_BYTES = ir.VectorType(_BYTE, LANES)
_FLAGS = tuple(FASTMATH)
# Numbers of the 16 codes. Twice those of e2m1 are whole.
INT4_NUMBERS = tuple(range(-8, 8))
TWICE_E2M1_NUMBERS = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
# Whether one instruction converts float16 to float32. All CPUs with AVX2 have it.
HAS_FLOAT16 = HAS_WIDE_VECTORS or cpu_features().get("f16c", False)


class Codes(NamedTuple):
    """A format of rows of bytes. A row has a float32 scale, or each 32 numbers have one or two scales.

    Attributes:
        vectors: emits the two vectors of the 32 numbers from a byte on, divided by `unit` and by their scale.
        scales: makes a pointer to scales from an address.
        numbers_per_byte: 1 or 2. Of two, the first vector has the low bits, which are the even numbers.
        group_scales: emits the scales of 32 numbers, from an index on, as a factor of both vectors. None if rows have
            scales.
        num_scales: scales of 32 numbers; 0 if rows have scales.
        unit: factor of all numbers of the format. A format with groups also takes a factor for a table.
        needs_float16: whether numbers or scales are converted by way of float16.
    """

    vectors: Callable[[ir.IRBuilder, ir.Value, ir.Value], list[ir.Value]]
    scales: Any = floats
    numbers_per_byte: int = 1
    group_scales: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value] | None = None
    num_scales: int = 0
    unit: float = 1.0
    needs_float16: bool = False


def _bytes(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Load 32 bytes as two vectors."""
    second = plus(builder, index, LANES)
    return [builder.load(at(builder, codes, start, _BYTE), align=1) for start in (index, second)]


def _int8(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    return [builder.sitofp(builder.sext(part, WORDS), VECTOR) for part in _bytes(builder, codes, index)]


def from_e4m3(builder: ir.IRBuilder, shifted: ir.Value) -> ir.Value:
    """Return numbers / 256 by way of float16; see `decode_e4m3` for the bits. shifted: signed bytes << 7."""
    count = shifted.type.count
    halves, numbers = ir.VectorType(ir.HalfType(), count), ir.VectorType(ir.FloatType(), count)

    def constant(bits: int) -> ir.Constant:
        return ir.Constant(shifted.type, [bits] * count)

    half = builder.and_(shifted, constant(-0x4001))
    highest_of_nan = builder.and_(builder.add(half, constant(0x80)), constant(0x4000))
    return builder.fpext(builder.bitcast(builder.or_(half, highest_of_nan), halves), numbers)


def _e4m3(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    seven = ir.Constant(_SHORTS, [7] * LANES)
    return [
        from_e4m3(builder, builder.shl(builder.sext(part, _SHORTS), seven)) for part in _bytes(builder, codes, index)
    ]


def _e5m2(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Return numbers, whose bytes are the upper bytes of a float16."""
    vectors = []
    for part in _bytes(builder, codes, index):
        half = builder.shl(builder.zext(part, _SHORTS), ir.Constant(_SHORTS, [8] * LANES))
        vectors.append(builder.fpext(builder.bitcast(half, _HALVES), VECTOR))
    return vectors


def _looked_up(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value, numbers: Sequence[int]) -> list[ir.Value]:
    """Return the numbers of the low and of the high 4 bits of 16 bytes.

    AVX-512 looks up float32: `vpermps` takes the low 4 bits of each word as its index. Otherwise `pshufb`, which every
    CPU with AVX has, looks up bytes.
    """
    packed, four = builder.load(at(builder, codes, index, _BYTE), align=1), [4] * LANES
    if HAS_WIDE_VECTORS:
        low = builder.zext(packed, WORDS)
        table = ir.Constant(VECTOR, [float(number) for number in numbers])
        words = low, builder.lshr(low, ir.Constant(WORDS, four))
        return [call(builder, "x86.avx512.permvar.sf.512", VECTOR, table, word) for word in words]
    nibbles = builder.and_(packed, ir.Constant(_BYTES, [15] * LANES)), builder.lshr(packed, ir.Constant(_BYTES, four))
    table = ir.Constant(_BYTES, numbers)
    found = [call(builder, "x86.ssse3.pshuf.b.128", _BYTES, table, nibble) for nibble in nibbles]
    return [builder.sitofp(builder.sext(part, WORDS), VECTOR) for part in found]


def _int4(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Return the even and the odd numbers of 16 bytes: nibbles - 8."""
    if HAS_WIDE_VECTORS:
        return _looked_up(builder, codes, index, INT4_NUMBERS)
    words = builder.zext(builder.load(at(builder, codes, index, _BYTE), align=1), WORDS)
    nibbles = words, builder.lshr(words, ir.Constant(WORDS, [4] * LANES))
    fifteen, eight = ir.Constant(WORDS, [15] * LANES), ir.Constant(WORDS, [8] * LANES)
    return [builder.sitofp(builder.sub(builder.and_(nibble, fifteen), eight), VECTOR) for nibble in nibbles]


def _e2m1(builder: ir.IRBuilder, codes: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Return twice the even and the odd numbers of 16 bytes, which are whole."""
    return _looked_up(builder, codes, index, TWICE_E2M1_NUMBERS)


def _bfloat16_scale(builder: ir.IRBuilder, scales: ir.Value, index: ir.Value) -> ir.Value:
    """Load a bfloat16 as a vector of float32.

    All words of a vector get its bits, and a shift leaves them in the upper halves: a scalar would be widened first.
    """
    pairs = ir.VectorType(_SHORT, 2 * LANES)
    word = builder.load(builder.gep(scales, [index]), align=2)
    lowest = builder.insert_element(ir.Constant(pairs, ir.Undefined), word, ir.Constant(_INT, 0))
    words = builder.shuffle_vector(lowest, lowest, ir.Constant(ir.VectorType(_INT, 2 * LANES), [0] * 2 * LANES))
    bits = builder.shl(builder.bitcast(words, WORDS), ir.Constant(WORDS, [16] * LANES))
    return builder.bitcast(bits, VECTOR)


def _e4m3_scales(builder: ir.IRBuilder, scales: ir.Value, index: ir.Value) -> ir.Value:
    """Load two e4m3 numbers / 256, see `_pair_of_scales`."""
    pair = builder.load(builder.bitcast(builder.gep(scales, [index]), _SHORT.as_pointer()), align=1)
    return _pair_of_scales(builder, pair)


def _latent_scales(builder: ir.IRBuilder, scales: ir.Value, index: ir.Value) -> ir.Value:
    """Load two e4m3 numbers / 256 of a latent in NVFP4: scale g is byte 8 (g % 4) + g // 4. index: even."""
    eight = ir.Constant(index.type, 8)
    place = builder.mul(builder.and_(index, ir.Constant(index.type, 3)), eight)
    place = builder.add(place, number_of_steps(builder, index, 4))
    first_byte = builder.load(builder.gep(scales, [place]))
    second_byte = builder.load(builder.gep(scales, [builder.add(place, eight)]))
    first, second = builder.zext(first_byte, _SHORT), builder.zext(second_byte, _SHORT)
    return _pair_of_scales(builder, builder.or_(first, builder.shl(second, ir.Constant(_SHORT, 8))))


def _pair_of_scales(builder: ir.IRBuilder, pair: ir.Value) -> ir.Value:
    """Return e4m3 numbers / 256: eight lanes of the low byte, whose numbers lie in 8 bytes, then eight of the high."""
    pairs, both = splat(builder, pair, _SHORTS), ir.VectorType(_BYTE, 2 * LANES)
    # A scale goes to the upper byte of each of its lanes, beside a lower byte of 0, which is lane 0 of `zeros`.
    zero = 2 * LANES
    lanes = [zero, 0] * (LANES // 2) + [zero, 1] * (LANES // 2)
    zeros = ir.Constant(both, [0] * 2 * LANES)
    upper = builder.shuffle_vector(builder.bitcast(pairs, both), zeros, ir.Constant(ir.VectorType(_INT, zero), lanes))
    return from_e4m3(builder, builder.ashr(builder.bitcast(upper, _SHORTS), ir.Constant(_SHORTS, [1] * LANES)))


_E4M3 = Codes(_e4m3, unit=256.0, needs_float16=True)
# Formats of codes by names of `KvKind`.
CODES = {
    "int8": Codes(_int8),
    "e4m3": _E4M3,
    "e4m3_rows": _E4M3,
    "e5m2": Codes(_e5m2, needs_float16=True),
    "int4": Codes(_int4, bfloats, 2, _bfloat16_scale, 1),
    # Twice e2m1 numbers, times scales / 256.
    "nvfp4": Codes(_e2m1, uint8s, 2, _e4m3_scales, 2, unit=128.0, needs_float16=True),
}
# NVFP4 with the scales of a record of latents, which begin at index 0.
NVFP4_LATENT = CODES["nvfp4"]._replace(group_scales=_latent_scales)


def _row_scale(builder: ir.IRBuilder, codes: Codes, scales: ir.Value, index: ir.Value) -> ir.Value:
    """Load a row's scale times the format's unit, as a vector."""
    scale = splat(builder, builder.load(builder.gep(scales, [index]), align=4))
    if codes.unit == 1.0:
        return scale
    return builder.fmul(scale, ir.Constant(VECTOR, [codes.unit] * LANES), flags=_FLAGS)


def number_of_steps(builder: ir.IRBuilder, index: ir.Value, step: int) -> ir.Value:
    """Return index // step, for a power of two."""
    return builder.lshr(index, ir.Constant(index.type, step.bit_length() - 1))


def _scaled(builder: ir.IRBuilder, vectors: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    return [builder.fmul(vector, scale, flags=_FLAGS) for vector in vectors]


def code_products(codes: Codes, num_keys: int, num_rows: int) -> Any:
    """Return an intrinsic that stores the products of `num_rows` rows with `num_keys` rows of codes.

    The rows are float32, with `size` numbers, a multiple of 32, and follow each other from `first` on. Of two numbers
    a byte the 16 even ones of 32 come first. The rows of codes begin at `start`, `stride` bytes apart, and their scales
    at `scale_start`, `scale_stride` apart. Products of row r begin at `to` + r * `out_step`. Codes are widened once.
    """

    @emitted()
    def products(
        builder, rows, first, bytes_, start, stride, scales, scale_start, scale_stride, size, out, to, out_step
    ):
        row_pointers = multiples(builder, builder.gep(rows, [first]), size, num_rows)
        starts = multiples(builder, start, stride, num_keys)
        scale_starts = multiples(builder, scale_start, scale_stride, num_keys)
        totals = [[sum_from_zero(builder) for _ in starts] for _ in row_pointers]
        with steps(builder, size, NUMBERS) as i:
            second = plus(builder, i, LANES)
            low_rows = [load_vector.emit(builder, row, i) for row in row_pointers]
            high_rows = [load_vector.emit(builder, row, second) for row in row_pointers]
            byte = number_of_steps(builder, i, codes.numbers_per_byte)
            for key, key_start in enumerate(starts):
                vectors = codes.vectors(builder, bytes_, builder.add(key_start, byte))
                if codes.group_scales is not None:
                    group = number_of_steps(builder, i, NUMBERS // codes.num_scales)
                    scale = codes.group_scales(builder, scales, builder.add(scale_starts[key], group))
                    vectors = _scaled(builder, vectors, scale)
                low, high = vectors
                for row, row_totals in enumerate(totals):
                    total = multiply_add.emit(builder, low_rows[row], low, builder.load(row_totals[key]))
                    builder.store(multiply_add.emit(builder, high_rows[row], high, total), row_totals[key])
        for row_totals in totals:
            sums = [builder.load(total) for total in row_totals]
            if codes.group_scales is None:
                for key, scale_index in enumerate(scale_starts):
                    sums[key] = builder.fmul(sums[key], _row_scale(builder, codes, scales, scale_index), flags=_FLAGS)
            store_sums(builder, out, to, sums)
            to = builder.add(to, out_step)

    return products


def weighted_code_sums(codes: Codes, num_rows: int) -> Any:
    """Return an intrinsic that does the same as `weighted_sums` for values in codes.

    Rows of codes begin at `start`, `stride` bytes apart. Scales of 32 numbers begin at `scale_start`, `scale_stride`
    apart; weights are already multiplied by scales of rows, and by the unit. Of two numbers a byte the sums of
    the 16 even ones come first.
    """

    @emitted()
    def add(
        builder, floats, to, step, first, weight_step, bytes_, start, stride, scales, scale_start, scale_stride, count
    ):
        def values_of(key: ir.Value) -> list[ir.Value]:
            vectors = codes.vectors(builder, bytes_, builder.add(start, builder.mul(key, stride)))
            if codes.group_scales is None:
                return vectors
            place = builder.add(scale_start, builder.mul(key, scale_stride))
            return _scaled(builder, vectors, codes.group_scales(builder, scales, place))

        add_weighted(builder, num_rows, floats, (to, step, first, weight_step, count), values_of)

    return add


def widened(codes: Codes) -> Any:
    """Return an intrinsic that writes a row of codes, times its scales, as float32 from `to` on.

    size: numbers of the row, a multiple of 32.
    factor: multiplies a row with groups.
    """

    @emitted()
    def widen(builder, bytes_, start, scales, scale_start, factor, size, floats, to):
        row_scale = None
        if codes.group_scales is None:
            row_scale = _row_scale(builder, codes, scales, scale_start)
        factors = splat(builder, factor)
        with steps(builder, size, NUMBERS) as i:
            byte = builder.add(start, number_of_steps(builder, i, codes.numbers_per_byte))
            vectors = codes.vectors(builder, bytes_, byte)
            scale = row_scale
            if codes.group_scales is not None:
                group = number_of_steps(builder, i, NUMBERS // codes.num_scales)
                scale = codes.group_scales(builder, scales, builder.add(scale_start, group))
                scale = builder.fmul(scale, factors, flags=_FLAGS)
            vectors = _scaled(builder, vectors, scale)
            if codes.numbers_per_byte == 2:
                vectors = in_turn(builder, *vectors)
            place = builder.add(to, i)
            for half, vector in enumerate(vectors):
                index = plus(builder, place, half * LANES)
                store_vector.emit(builder, floats, index, vector)

    return widen
