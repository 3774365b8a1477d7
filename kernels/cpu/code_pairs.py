"""Rows of 4-bit caches as pairs of bfloat16 in numba kernels, for CPUs that multiply pairs in one instruction.

A word of 16 bits holds four numbers. `vpermw` looks up a word's lowest bits in a table of bfloat16 and ignores the
others: three shifts and four lookups widen 64 bytes, to four vectors of every fourth number. Of 128 numbers, widening
takes 8 instructions and products with a row take 5; with float32 these are 22 and 8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from .code_vectors import CODES, INT4_NUMBERS, NUMBERS, TWICE_E2M1_NUMBERS, Codes, from_e4m3, number_of_steps
from .kernel import FASTMATH
from .vectors import (
    LANES,
    as_floats,
    call,
    emitted,
    lanes_of,
    multiples,
    plus,
    splat,
    steps,
    store_sums,
    sum_from_zero,
)

# Numbers of a word of 16 bits.
NUMBERS_PER_WORD = 4
_INT, _SHORT, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOAT = ir.FloatType()
_FLAGS = tuple(FASTMATH)


def _loaded(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a vector from an element on."""
    place = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    return builder.load(place, align=1)


def _bfloat16_bits(number: float) -> int:
    """Return the bits of a number that bfloat16 has."""
    [bits] = struct.unpack("I", struct.pack("f", number))
    return bits >> 16


def _bfloat16_scales(builder: ir.IRBuilder, scales: ir.Value, index: ir.Value, count: int) -> ir.Value:
    """Load bfloat16 as float32."""
    return as_floats(builder, _loaded(builder, scales, index, ir.VectorType(_SHORT, count)))


def _e4m3_scales(builder: ir.IRBuilder, scales: ir.Value, index: ir.Value, count: int) -> ir.Value:
    """Load e4m3 numbers / 256 as float32."""
    shorts = ir.VectorType(_SHORT, count)
    widened = builder.sext(_loaded(builder, scales, index, ir.VectorType(_BYTE, count)), shorts)
    return from_e4m3(builder, builder.shl(widened, ir.Constant(shorts, [7] * count)))


class PairCodes(NamedTuple):
    """A format with four numbers in a word of 16 bits, the first in its lowest bits, and scales of groups.

    Attributes:
        codes: the format, as rows that are read as float32.
        numbers: numbers of the 16 codes, divided by its unit; exact in bfloat16.
        group_scales: emits a number of scales, from an index on, as float32.
    """

    codes: Codes
    numbers: Sequence[float]
    group_scales: Callable[[ir.IRBuilder, ir.Value, ir.Value, int], ir.Value]


# Formats by names of `KvKind`.
PAIR_CODES = {
    "int4": PairCodes(CODES["int4"], INT4_NUMBERS, _bfloat16_scales),
    "nvfp4": PairCodes(CODES["nvfp4"], TWICE_E2M1_NUMBERS, _e4m3_scales),
}


class _Step:
    """Code for a step of 64 or 128 numbers of a row, whose words fill a vector register of 256 or 512 bits.

    Attributes:
        words: type of a vector of words.
        pairs: type of a vector of pairs of bfloat16.
        sums: type of a vector of float32, one of each pair.
    """

    def __init__(self, pair_codes: PairCodes, numbers: int) -> None:
        count = numbers // NUMBERS_PER_WORD
        self.words = ir.VectorType(_SHORT, count)
        self.pairs = ir.VectorType(_INT, count // 2)
        self.sums = ir.VectorType(_FLOAT, count // 2)
        self._pair_codes = pair_codes
        self._numbers = numbers
        self._bits = 16 * count

    def zero(self) -> ir.Constant:
        return ir.Constant(self.sums, [0.0] * self.sums.count)

    def widen(self, builder: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
        """Return four vectors of bfloat16: the first number of each word, the second, the third and the fourth."""
        count = self.words.count
        table = ir.Constant(self.words, [_bfloat16_bits(number) for number in self._pair_codes.numbers] * (count // 16))
        vectors = []
        for place in range(NUMBERS_PER_WORD):
            codes = builder.lshr(words, ir.Constant(self.words, [4 * place] * count))
            numbers = call(builder, f"x86.avx512.permvar.hi.{self._bits}", self.words, table, codes)
            vectors.append(builder.bitcast(numbers, self.pairs))
        return vectors

    def load_scales(self, builder: ir.IRBuilder, scales: ir.Value, index: ir.Value) -> ir.Value:
        """Load the scales of a step's groups."""
        num_groups = self._numbers // NUMBERS * self._pair_codes.codes.num_scales
        return self._pair_codes.group_scales(builder, scales, index, num_groups)

    def scales_of(self, builder: ir.IRBuilder, scales: ir.Value, first_words: Sequence[int]) -> ir.Value:
        """Return the scale of each sum. scales: of groups. first_words: first of the words that are added to a sum."""
        words_per_group = self.words.count // scales.type.count
        lanes = [word // words_per_group for word in first_words]
        return lanes_of(builder, scales, scales, lanes)

    def add_products(self, builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return total + the sums of products of pairs."""
        return call(builder, f"x86.avx512bf16.dpbf16ps.{self._bits}", self.sums, total, a, b)

    def round_in_turn(self, builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return pairs of bfloat16 of the lanes of a and b."""
        count = self.sums.count
        rounded = call(builder, f"x86.avx512bf16.cvtne2ps2bf16.{self._bits}", self.words, b, a)
        lanes = [lane for pair in range(count) for lane in (pair, pair + count)]
        return builder.bitcast(lanes_of(builder, rounded, rounded, lanes), self.pairs)

    def words_of_half(self, half: int) -> list[int]:
        """Return which words of a row are interleaved with another row's: of each 8, the first or the last 4."""
        words: list[int] = []
        for first in range(4 * half, self.words.count, 8):
            words += range(first, first + 4)
        return words

    def interleave(self, builder: ir.IRBuilder, a: ir.Value, b: ir.Value, half: int) -> ir.Value:
        """Return words of two rows in turn, in one instruction (`vpunpcklwd` or `vpunpckhwd`)."""
        lanes = []
        for word in self.words_of_half(half):
            lanes += [word, word + self.words.count]
        return lanes_of(builder, a, b, lanes)

    def full_vector(self, builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
        """Return 16 lanes, of which those beyond the step's are 0."""
        lanes = [min(lane, self.sums.count) for lane in range(LANES)]
        if self.sums.count == LANES:
            return sums
        return lanes_of(builder, sums, self.zero(), lanes)


def columns_of_sums(numbers: int) -> list[int]:
    """Return which columns the sums of `weighted_pair_sums` belong to, in the order of memory."""
    columns = []
    for half in range(2):
        for place in range(NUMBERS_PER_WORD):
            for first in range(4 * half, numbers // NUMBERS_PER_WORD, 8):
                columns += [NUMBERS_PER_WORD * word + place for word in range(first, first + 4)]
    return columns


def pair_products(pair_codes: PairCodes, numbers: int, num_keys: int, num_rows: int) -> Any:
    """Return an intrinsic that does the same as `code_products`, with rows in bfloat16.

    numbers: numbers of a step, of which the size is a multiple. Each of its four quarters in a row has every fourth
    number.
    """
    step = _Step(pair_codes, numbers)

    @emitted()
    def products(
        builder, rows, first, bytes_, start, stride, scales, scale_start, scale_stride, size, out, to, out_step
    ):
        row_pointers = multiples(builder, builder.gep(rows, [first]), size, num_rows)
        starts = multiples(builder, start, stride, num_keys)
        scale_starts = multiples(builder, scale_start, scale_stride, num_keys)
        totals = [[sum_from_zero(builder, step.sums) for _ in starts] for _ in row_pointers]
        with steps(builder, size, numbers) as i:
            quarters = []
            for row in row_pointers:
                places = [plus(builder, i, part * numbers // 4) for part in range(4)]
                quarters.append([_loaded(builder, row, place, step.pairs) for place in places])
            byte = number_of_steps(builder, i, 2)
            group = number_of_steps(builder, i, NUMBERS // pair_codes.codes.num_scales)
            for key, key_start in enumerate(starts):
                vectors = step.widen(builder, _loaded(builder, bytes_, builder.add(key_start, byte), step.words))
                group_scales = step.load_scales(builder, scales, builder.add(scale_starts[key], group))
                scale = step.scales_of(builder, group_scales, range(0, step.words.count, 2))
                for parts, row_totals in zip(quarters, totals, strict=True):
                    product = step.zero()
                    for part, vector in zip(parts, vectors, strict=True):
                        product = step.add_products(builder, product, part, vector)
                    scaled = builder.fmul(product, scale, flags=_FLAGS)
                    total = builder.fadd(builder.load(row_totals[key]), scaled, flags=_FLAGS)
                    builder.store(total, row_totals[key])
        for row_totals in totals:
            store_sums(builder, out, to, [step.full_vector(builder, builder.load(total)) for total in row_totals])
            to = builder.add(to, out_step)

    return products


def weighted_pair_sums(pair_codes: PairCodes, numbers: int, num_rows: int) -> Any:
    """Return an intrinsic that does the same as `weighted_code_sums`, `numbers` columns at once.

    Two keys' weights times their scales are rounded to bfloat16. See `columns_of_sums` for their order.
    """
    step = _Step(pair_codes, numbers)
    num_sums = 2 * NUMBERS_PER_WORD  # vectors of a row

    @emitted()
    def add(
        builder,
        floats,
        to,
        row_step,
        first,
        weight_step,
        bytes_,
        start,
        stride,
        scales,
        scale_start,
        scale_stride,
        count,
    ):
        def load_key(key: ir.Value) -> tuple[ir.Value, ir.Value]:
            words = _loaded(builder, bytes_, builder.add(start, builder.mul(key, stride)), step.words)
            place = builder.add(scale_start, builder.mul(key, scale_stride))
            return words, step.load_scales(builder, scales, place)

        def scaled_weight(row: int, key: ir.Value, group_scales: ir.Value, half: int) -> ir.Value:
            weight = splat(builder, builder.load(builder.gep(weights[row], [key])), step.sums)
            return builder.fmul(weight, step.scales_of(builder, group_scales, step.words_of_half(half)), flags=_FLAGS)

        def add_pair(key: ir.Value, has_second: bool) -> None:
            keys = [key, plus(builder, key, 1)][: 1 + has_second]
            rows = [load_key(key) for key in keys]
            for half in range(2):
                pair_weights = []
                for row in range(num_rows):
                    scaled = [
                        scaled_weight(row, key, scales, half) for key, (_, scales) in zip(keys, rows, strict=True)
                    ]
                    scaled += [step.zero()] * (2 - len(scaled))
                    pair_weights.append(step.round_in_turn(builder, *scaled))
                words = step.interleave(builder, rows[0][0], rows[-1][0], half)
                for place, vector in enumerate(step.widen(builder, words)):
                    for weight, row_totals in zip(pair_weights, totals, strict=True):
                        total = row_totals[half * NUMBERS_PER_WORD + place]
                        builder.store(step.add_products(builder, builder.load(total), weight, vector), total)

        places = multiples(builder, to, row_step, num_rows)
        weights = multiples(builder, builder.gep(floats, [first]), weight_step, num_rows)
        totals = [[sum_from_zero(builder, step.sums) for _ in range(num_sums)] for _ in places]
        end_of_pairs = builder.and_(count, ir.Constant(count.type, -2))
        with steps(builder, end_of_pairs, 2) as key:
            add_pair(key, has_second=True)
        with builder.if_then(builder.icmp_signed("<", end_of_pairs, count)):
            add_pair(end_of_pairs, has_second=False)
        for place, row_totals in zip(places, totals, strict=True):
            for index, total in enumerate(row_totals):
                pointer = builder.gep(floats, [plus(builder, place, index * step.sums.count)])
                pointer = builder.bitcast(pointer, step.sums.as_pointer())
                summed = builder.fadd(builder.load(pointer, align=4), builder.load(total), flags=_FLAGS)
                builder.store(summed, pointer, align=4)

    return add
