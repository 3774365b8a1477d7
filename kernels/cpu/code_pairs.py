"""Rows of 4-bit caches as pairs of bfloat16 in numba kernels, for CPUs that multiply pairs in one instruction.

A word of 16 bits holds four numbers. `vpermw` looks up a word's lowest bits in a table of bfloat16 and ignores the
others: three shifts and four lookups widen 64 bytes, to four vectors of every fourth number. Of 128 numbers, widening
takes 8 instructions and products with a row take 4; with float32 these are 22 and 8. Numbers are not multiplied by
their scales: sums of keys are, and weights of values before they are rounded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from .code_vectors import CODES, INT4_NUMBERS, NUMBERS, TWICE_E2M1_NUMBERS, Codes, from_e4m3, number_of_steps
from .kernel import FASTMATH
from .vectors import (
    LANES,
    as_floats,
    call,
    emitted,
    lanes_of,
    merged_sums,
    multiples,
    plus,
    steps,
    store_part,
    sum_from_zero,
)

# Numbers of a word of 16 bits.
NUMBERS_PER_WORD = 4
# Pairs of words in 128 bits, and keys whose pairs lie side by side there. Queries are copied as often.
PAIRS_PER_LANE = KEYS_PER_VECTOR = QUERY_COPIES = 4
_INT, _SHORT, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOAT = ir.FloatType()
_ROUNDED = ir.VectorType(_SHORT, 2 * LANES)
_FLAGS = tuple(FASTMATH)


def _loaded(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a vector from an element on."""
    place = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    return builder.load(place, align=1)


def _joined(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """Return the lanes of all vectors, whose number is a power of two."""
    while len(vectors) > 1:
        lanes = range(2 * vectors[0].type.count)
        vectors = [lanes_of(builder, a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _bfloat16_bits(number: float) -> int:
    """Return the bits of a number that bfloat16 has."""
    [bits] = struct.unpack("I", struct.pack("f", number))
    return bits >> 16


def _e4m3_numbers(builder: ir.IRBuilder, scales: ir.Value) -> ir.Value:
    """Return e4m3 numbers / 256 as float32."""
    shorts = ir.VectorType(_SHORT, scales.type.count)
    shifted = builder.shl(builder.sext(scales, shorts), ir.Constant(shorts, [7] * shorts.count))
    return from_e4m3(builder, shifted)


class PairCodes(NamedTuple):
    """A format with four numbers in a word of 16 bits, the first in its lowest bits, and scales of groups.

    Attributes:
        codes: the format, as rows that are read as float32.
        numbers: numbers of the 16 codes, divided by its unit; exact in bfloat16.
        scale: type of a scale in memory.
        widen_scales: emits a vector of scales as float32.
    """

    codes: Codes
    numbers: Sequence[float]
    scale: ir.Type
    widen_scales: Callable[[ir.IRBuilder, ir.Value], ir.Value]


# Formats by names of `KvKind`.
PAIR_CODES = {
    "int4": PairCodes(CODES["int4"], INT4_NUMBERS, _SHORT, as_floats),
    "nvfp4": PairCodes(CODES["nvfp4"], TWICE_E2M1_NUMBERS, _BYTE, _e4m3_numbers),
}


class _Step:
    """Code for a step of 64 or 128 numbers of a row, whose words fill a vector register of 256 or 512 bits.

    Attributes:
        words: type of a vector of words.
        pairs: type of a vector of pairs of bfloat16.
        sums: type of a vector of float32, one of each pair.
        scales: type of the scales of the step's groups in memory.
    """

    def __init__(self, pair_codes: PairCodes, numbers: int) -> None:
        count = numbers // NUMBERS_PER_WORD
        self.words = ir.VectorType(_SHORT, count)
        self.pairs = ir.VectorType(_INT, count // 2)
        self.sums = ir.VectorType(_FLOAT, count // 2)
        self.scales = ir.VectorType(pair_codes.scale, numbers // NUMBERS * pair_codes.codes.num_scales)
        self._pair_codes = pair_codes
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

    def group_of(self, word: int) -> int:
        """Return the group that a word's numbers belong to."""
        return word * self.scales.count // self.words.count

    def load_scales(self, builder: ir.IRBuilder, scales: ir.Value, index: ir.Value) -> ir.Value:
        """Load the scales of a row's groups, as they are in memory."""
        return _loaded(builder, scales, index, self.scales)

    def widen_scales(self, builder: ir.IRBuilder, scales: Sequence[ir.Value]) -> ir.Value:
        """Return scales of several rows, of each its groups, as one vector of float32."""
        return self._pair_codes.widen_scales(builder, _joined(builder, scales))

    def add_products(self, builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return total + the sums of products of pairs."""
        return call(builder, f"x86.avx512bf16.dpbf16ps.{self._bits}", self.sums, total, a, b)

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


def columns_of_sums(numbers: int) -> list[int]:
    """Return which columns the sums of `weighted_pair_sums` belong to, in the order of memory."""
    columns = []
    for half in range(2):
        for place in range(NUMBERS_PER_WORD):
            for first in range(4 * half, numbers // NUMBERS_PER_WORD, 8):
                columns += [NUMBERS_PER_WORD * word + place for word in range(first, first + 4)]
    return columns


def _forget_loads(builder: ir.IRBuilder) -> None:
    """Load again what was loaded before: LLVM would move loads of rows before a loop, and copy them to the stack."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def _transposed(builder: ir.IRBuilder, keys: Sequence[ir.Value]) -> list[ir.Value]:
    """Return four vectors of pairs of words of four keys: the first has the first pair of each 128 bits of each key.

    Each 128 bits of a result belong to the same 128 bits of the keys, and have a lane of each key.
    """
    count = keys[0].type.count

    def in_turn(a: ir.Value, b: ir.Value, first: int, size: int) -> ir.Value:
        """Return `size` lanes of a, then of b, then the next of both, from a lane of each 128 bits on."""
        lanes = []
        for base in range(first, count, 4):
            for lane in range(base, base + 2, size):
                lanes += [*range(lane, lane + size), *range(count + lane, count + lane + size)]
        return lanes_of(builder, a, b, lanes)

    a, b, c, d = keys
    transposed = []
    for half in (0, 2):
        first_two, last_two = in_turn(a, b, half, 1), in_turn(c, d, half, 1)
        transposed += [in_turn(first_two, last_two, part, 2) for part in (0, 2)]
    return transposed


def query_lanes(numbers: int) -> list[int]:
    """Return which of `numbers` numbers of a query `pair_products` reads, in the order of memory."""
    order = []
    for pair in range(PAIRS_PER_LANE):
        for place in range(NUMBERS_PER_WORD):
            for first in range(0, numbers, NUMBERS):
                number = first + pair * 2 * NUMBERS_PER_WORD + place
                order += [number, number + NUMBERS_PER_WORD] * KEYS_PER_VECTOR
    return order


def pair_products(pair_codes: PairCodes, numbers: int, num_rows: int) -> Any:
    """Return an intrinsic that stores the products of rows with up to 16 keys; see `code_products`.

    Rows are bfloat16 in the order of `query_lanes`, `QUERY_COPIES` * size numbers apart. Each 128 bits of four keys, 32
    numbers of each, are transposed: a vector then has sums of four keys, and few lanes are left to add in the end.

    numbers: numbers of a step, of which the size is a multiple.
    """
    step = _Step(pair_codes, numbers)
    num_groups, num_lanes = step.scales.count, numbers // NUMBERS
    groups_per_lane = num_groups // num_lanes

    def scale_of_half(builder: ir.IRBuilder, scales: ir.Value, half: int) -> ir.Value:
        """Return the scale of each sum of the first or the last pairs of words."""
        lanes = []
        for lane in range(num_lanes):
            group = lane * groups_per_lane + half * (groups_per_lane - 1)
            lanes += [key * num_groups + group for key in range(KEYS_PER_VECTOR)]
        return lanes_of(builder, scales, scales, lanes)

    @emitted()
    def products(
        builder, rows, first, bytes_, start, stride, scales, scale_start, scale_stride, size, out, to, out_step, count
    ):
        row_size = builder.mul(size, ir.Constant(size.type, QUERY_COPIES))
        row_pointers = multiples(builder, builder.gep(rows, [first]), row_size, num_rows)
        num_vectors = LANES // KEYS_PER_VECTOR
        totals = [cgutils.alloca_once(builder, step.sums, size=num_vectors) for _ in row_pointers]
        for row_totals in totals:
            for vector in range(num_vectors):
                builder.store(step.zero(), builder.gep(row_totals, [ir.Constant(_INT, vector)]))
        last_key = plus(builder, count, -1)

        def places_of_keys(first_key: ir.Value, begin: ir.Value, distance: ir.Value) -> list[ir.Value]:
            """Return where the rows of four keys begin. Beyond the last key it is read again."""
            places = []
            for number in range(KEYS_PER_VECTOR):
                key = plus(builder, first_key, number)
                key = builder.select(builder.icmp_signed("<", key, count), key, last_key)
                places.append(builder.add(begin, builder.mul(key, distance)))
            return places

        def add_products(row_pairs: Sequence[ir.Value], pairs: Sequence[ir.Value], first_pair: int) -> list[ir.Value]:
            """Return the products of each row and these pairs of words."""
            sums = [step.zero() for _ in row_pairs]
            for pair, words in enumerate(pairs, first_pair):
                for place, vector in enumerate(step.widen(builder, builder.bitcast(words, step.words))):
                    offset = ir.Constant(size.type, pair * NUMBERS_PER_WORD + place)
                    for row, pointer in enumerate(row_pairs):
                        row_vector = builder.load(builder.gep(pointer, [offset]), align=1)
                        sums[row] = step.add_products(builder, sums[row], vector, row_vector)
            return sums

        with steps(builder, size, numbers) as i:
            byte = number_of_steps(builder, i, 2)
            group = number_of_steps(builder, i, numbers // num_groups)
            row_place = builder.mul(i, ir.Constant(i.type, QUERY_COPIES))
            row_pairs = []
            for pointer in row_pointers:
                row_pairs.append(builder.bitcast(builder.gep(pointer, [row_place]), step.pairs.as_pointer()))
            with steps(builder, count, KEYS_PER_VECTOR) as key:
                _forget_loads(builder)
                keys = [
                    _loaded(builder, bytes_, builder.add(place, byte), step.pairs)
                    for place in places_of_keys(key, start, stride)
                ]
                key_scales = [
                    step.load_scales(builder, scales, builder.add(place, group))
                    for place in places_of_keys(key, scale_start, scale_stride)
                ]
                group_scales = step.widen_scales(builder, key_scales)
                pairs = _transposed(builder, keys)
                # Two sums of two pairs each: an addition waits for the one before, and groups may have 16 numbers.
                for half, first_pair in enumerate((0, 2)):
                    scale = scale_of_half(builder, group_scales, half)
                    sums = add_products(row_pairs, pairs[first_pair : first_pair + 2], first_pair)
                    for row_totals, row_sums in zip(totals, sums, strict=True):
                        total = builder.gep(row_totals, [number_of_steps(builder, key, KEYS_PER_VECTOR)])
                        scaled = builder.fmul(row_sums, scale, flags=_FLAGS)
                        builder.store(builder.fadd(builder.load(total), scaled, flags=_FLAGS), total)
        for row_totals in totals:
            sums = [builder.load(builder.gep(row_totals, [ir.Constant(_INT, vector)])) for vector in range(num_vectors)]
            half = step.sums.count // 2
            while half >= KEYS_PER_VECTOR:
                sums = merged_sums(builder, sums, half)
                half //= 2
            store_part.emit(builder, out, to, _joined(builder, sums), count)
            to = builder.add(to, out_step)

    return products


def weighted_pair_sums(pair_codes: PairCodes, numbers: int, most_keys: int, num_rows: int) -> Any:
    """Return an intrinsic that does the same as `weighted_code_sums`, `numbers` columns at once, for up to `most_keys`.

    Two keys' weights times their scales are rounded to bfloat16. See `columns_of_sums` for the order of sums.
    """
    step = _Step(pair_codes, numbers)
    num_groups = step.scales.count
    keys_together = 2 * LANES // num_groups  # their scales fill two vectors: of even and of odd keys
    pairs_together = keys_together // 2
    # Groups of the sums' lanes, of both halves if they differ.
    groups_of_lanes = [[step.group_of(word) for word in step.words_of_half(half)] for half in range(2)]
    if groups_of_lanes[0] == groups_of_lanes[1]:
        groups_of_lanes.pop()
    # Sums of 4 rows would not fit into registers.
    halves_together = [[0, 1]] if num_rows <= 2 else [[0], [1]]

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
        weights = multiples(builder, builder.gep(floats, [first]), weight_step, num_rows)
        last_key = plus(builder, count, -1)
        end_of_pairs = builder.and_(count, ir.Constant(count.type, -2))
        # Of each row and pair of keys: both keys' weights in turn, times the scale of each lane's group.
        pair_weights = [
            cgutils.alloca_once(builder, step.pairs, size=most_keys // 2 * len(groups_of_lanes))
            for _ in range(num_rows)
        ]

        def pair_weight(row: int, pair: ir.Value, half: int) -> ir.Value:
            index = builder.mul(pair, ir.Constant(pair.type, len(groups_of_lanes)))
            return builder.gep(pair_weights[row], [plus(builder, index, half % len(groups_of_lanes))])

        def load_scales(key: ir.Value) -> ir.Value:
            is_key = builder.icmp_signed("<", key, count)
            place = builder.add(scale_start, builder.mul(builder.select(is_key, key, last_key), scale_stride))
            return step.load_scales(builder, scales, place)

        def scale_weights(first_key: ir.Value, first_pair: ir.Value) -> None:
            keys = [plus(builder, first_key, index) for index in range(keys_together)]
            even_and_odd = [
                step.widen_scales(builder, [load_scales(key) for key in keys[parity::2]]) for parity in range(2)
            ]
            for row in range(num_rows):
                row_weights = _loaded(builder, weights[row], first_key, ir.VectorType(_FLOAT, keys_together))
                scaled = []
                for parity, key_scales in enumerate(even_and_odd):
                    lanes = [2 * (lane // num_groups) + parity for lane in range(LANES)]
                    spread = lanes_of(builder, row_weights, row_weights, lanes)
                    scaled.append(builder.fmul(spread, key_scales, flags=_FLAGS))
                even, odd = scaled
                rounded = call(builder, "x86.avx512bf16.cvtne2ps2bf16.512", _ROUNDED, odd, even)
                for pair in range(pairs_together):
                    for number, groups in enumerate(groups_of_lanes):
                        lanes = []
                        for group in groups:
                            even_lane = pair * num_groups + group
                            lanes += [even_lane, even_lane + LANES]
                        vector = builder.bitcast(lanes_of(builder, rounded, rounded, lanes), step.pairs)
                        builder.store(vector, pair_weight(row, plus(builder, first_pair, pair), number))

        def load_words(key: ir.Value) -> ir.Value:
            return _loaded(builder, bytes_, builder.add(start, builder.mul(key, stride)), step.words)

        def add_pair(totals: list[list[ir.Value]], halves: list[int], key: ir.Value, has_second: bool) -> None:
            rows = [load_words(key)] * 2
            if has_second:
                rows[1] = load_words(plus(builder, key, 1))
            pair = number_of_steps(builder, key, 2)
            for position, half in enumerate(halves):
                vectors = step.widen(builder, step.interleave(builder, rows[0], rows[1], half))
                for row, row_totals in enumerate(totals):
                    weight = builder.load(pair_weight(row, pair, half))
                    if not has_second:
                        weight = builder.and_(weight, ir.Constant(step.pairs, [0xFFFF] * step.pairs.count))
                    half_totals = row_totals[position * NUMBERS_PER_WORD :]
                    for place, vector in enumerate(vectors):
                        total = step.add_products(builder, builder.load(half_totals[place]), weight, vector)
                        builder.store(total, half_totals[place])

        with steps(builder, count, keys_together) as key:
            scale_weights(key, number_of_steps(builder, key, 2))
        places = multiples(builder, to, row_step, num_rows)
        for halves in halves_together:
            num_sums = len(halves) * NUMBERS_PER_WORD  # vectors of a row
            totals = [[sum_from_zero(builder, step.sums) for _ in range(num_sums)] for _ in range(num_rows)]
            with steps(builder, end_of_pairs, 2) as key:
                add_pair(totals, halves, key, has_second=True)
            with builder.if_then(builder.icmp_signed("<", end_of_pairs, count)):
                add_pair(totals, halves, end_of_pairs, has_second=False)
            first_column = halves[0] * NUMBERS_PER_WORD * step.sums.count
            for place, row_totals in zip(places, totals, strict=True):
                for index, total in enumerate(row_totals):
                    column = first_column + index * step.sums.count
                    pointer = builder.gep(floats, [plus(builder, place, column)])
                    pointer = builder.bitcast(pointer, step.sums.as_pointer())
                    summed = builder.fadd(builder.load(pointer, align=4), builder.load(total), flags=_FLAGS)
                    builder.store(summed, pointer, align=4)

    return add
