"""Products of bfloat16 by AMX in numba kernels: tiles of 16 x 32 elements, sums in float32.

A tile of sums has 16 outputs as rows and 16 rows of x as columns, so that weights are read unpacked. x is packed first,
with pairs of elements as rows, see `pack_tile`. Tiles 0 to 3 are the sums. Tiles 4 and 5 hold two tiles of weights,
tiles 6 and 7 two tiles of x. Sum 2 * i + j belongs to weights i and x j.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from .kernel import cpu_features
from .vectors import LANES, VECTOR, WORDS, at, call, emitted, is_number, load_part, prefetch, round_pairs, store_part

TILE_ROWS, TILE_COLUMNS = 16, 32
# 32-bit words of a tile: 16 x 16 sums, or as many pairs of bfloat16 elements.
TILE_WORDS = TILE_ROWS * LANES
_LINE = 64
_BYTE, _HALF, _INT64 = (ir.IntType(bits) for bits in (8, 16, 64))
_BYTES = _BYTE.as_pointer()


@cache
def has_tiles() -> bool:
    """Return whether the CPU has AMX tiles and the system lets this process use them."""
    features = cpu_features()
    needed = ("amx-tile", "amx-bf16", "avx512bf16", "avx512bw")
    allow = getattr(torch.cpu, "_init_amx", None)  # Linux requires a request
    return all(features.get(feature, False) for feature in needed) and allow is not None and bool(allow())


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    call(builder, f"x86.{name}", ir.VoidType(), *args)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(_BYTE, number)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _transfer(builder: ir.IRBuilder, name: str, tile: int, pointer: ir.Value, step: ir.Value) -> None:
    """Load or store a tile, its rows `step` bytes apart."""
    _call(builder, name, _tile(tile), builder.bitcast(pointer, _BYTES), step)


@emitted()
def configure(builder):
    """Set this thread's tiles to 16 rows of 64 bytes; `release` frees them."""
    num_tiles = 8
    palette = [1, *[0] * 15, *[_LINE, 0] * num_tiles, *[0] * 16, *[TILE_ROWS] * num_tiles, *[0] * 8]
    kind = ir.ArrayType(_BYTE, len(palette))
    settings = cgutils.alloca_once_value(builder, ir.Constant(kind, palette))
    _call(builder, "ldtilecfg", builder.bitcast(settings, _BYTES))


@emitted()
def release(builder):
    """Free the tiles that `configure` has set."""
    _call(builder, "tilerelease")


@emitted()
def zero_sums(builder):
    """Set all sums to 0."""
    for number in range(4):
        _call(builder, "tilezero", _tile(number))


def _sums(name: str) -> Any:
    @emitted()
    def transfer(builder, pointer, index):
        for number in range(4):
            sums = builder.gep(pointer, [builder.add(index, _number(number * TILE_WORDS))])
            _transfer(builder, name, number, sums, _number(_LINE))

    return transfer


# Load or store all sums from a float32 index on, one tile after another.
load_sums, store_sums = _sums("tileloadd64"), _sums("tilestored64")


@emitted()
def add_products(builder, w, first, second, next_first, next_second, w_stride, packed, begin, x_stride, steps):
    """Add the products of weights with two packed tiles of x to all four sums.

    With one tile, when `x_stride` is None, even steps use sums 0 and 2, odd steps sums 1 and 3: waiting for the same
    sum takes three times as long as a product.

    Weights begin at `first` and `second` of w, with rows `w_stride` elements apart. The tile of x begins at `begin` of
    `packed`, in float32, a second one `x_stride` after it. `steps` tiles of 32 columns are added. Meanwhile, rows from
    `next_first` and `next_second` on are prefetched unless these are None, which doubles the rate of weights that are
    used once.
    """
    starts = [builder.gep(w, [first]), builder.gep(w, [second])]
    following = [builder.gep(w, [index]) for index in (next_first, next_second) if is_number(index)]
    tiles = [builder.gep(packed, [begin])]
    if is_number(x_stride):
        tiles.append(builder.gep(tiles[0], [x_stride]))
    w_bytes = builder.mul(w_stride, _number(2))

    def add(step: ir.Value, sums: Sequence[int]) -> None:
        column, words, lines = (
            builder.mul(step, _number(size)) for size in (TILE_COLUMNS, TILE_WORDS, TILE_ROWS * TILE_COLUMNS)
        )
        for j, tile in enumerate(tiles):
            _transfer(builder, "tileloadd64", 6 + j, builder.gep(tile, [words]), _number(_LINE))
        for i, row in enumerate(starts):
            _transfer(builder, "tileloadd64", 4 + i, builder.gep(row, [column]), w_bytes)
            for j in range(len(tiles)):
                _call(builder, "tdpbf16ps", _tile(2 * i + sums[j]), _tile(4 + i), _tile(6 + j))
        for row in following:
            for line in range(0, TILE_ROWS * TILE_COLUMNS, TILE_COLUMNS):
                prefetch(builder, builder.gep(row, [builder.add(lines, _number(line))]))

    if len(tiles) == 2:
        with cgutils.for_range(builder, steps) as loop:
            add(loop.index, (0, 1))
        return
    with cgutils.for_range(builder, builder.lshr(steps, _number(1))) as loop:
        even = builder.shl(loop.index, _number(1))
        add(even, (0,))
        add(builder.or_(even, _number(1)), (1,))
    with builder.if_then(builder.trunc(steps, ir.IntType(1))):
        add(builder.sub(steps, _number(1)), (0,))


def _transposed(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the columns of 16 vectors of 16 words, by swapping halves, quarters, eighths and single words."""
    vectors = list(rows)
    for size in (8, 4, 2, 1):
        low = [i + (i // size % 2) * (LANES - size) for i in range(LANES)]
        high = [offset + size for offset in low]
        masks = [ir.Constant(WORDS, mask) for mask in (low, high)]
        for i in range(LANES):
            if i // size % 2 == 0:
                pair = vectors[i], vectors[i + size]
                vectors[i], vectors[i + size] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    return vectors


def _starts(builder: ir.IRBuilder, offsets: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Return 16 numbers from an index on."""
    return [builder.load(builder.gep(offsets, [builder.add(index, _number(i))])) for i in range(TILE_ROWS)]


@emitted()
def pack_tile(builder, x, offsets, index, column, packed, to):
    """Pack 32 columns of 16 rows of x, from `column` on, as a tile of pairs at `to` of `packed`, in float32.

    Pair p of row r goes to 16 p + r. `offsets` holds the 16 rows' offsets from `index` on.
    """
    starts = [builder.add(start, column) for start in _starts(builder, offsets, index)]
    rows = [builder.load(at(builder, x, start, WORDS.element), align=2) for start in starts]
    for i, vector in enumerate(_transposed(builder, rows)):
        pointer = at(builder, packed, builder.add(to, _number(i * LANES)), WORDS.element)
        builder.store(vector, pointer, align=4)


def _load_tile(builder: ir.IRBuilder, sums: ir.Value, index: ir.Value) -> list[ir.Value]:
    rows = [builder.add(index, _number(i * LANES)) for i in range(TILE_ROWS)]
    return [builder.load(at(builder, sums, row, VECTOR.element), align=4) for row in rows]


@emitted()
def store_rows(builder, sums, first, second, out, offsets, index, column):
    """Store two tiles of sums, at `first` and `second`, as 32 columns of 16 rows of out from `column` on.

    out is float32 or bfloat16. If second is None, store one tile as 16 columns. `offsets` holds the rows' offsets from
    `index` on.
    """
    starts = [builder.add(start, column) for start in _starts(builder, offsets, index)]
    rows = [_load_tile(builder, sums, place) for place in (first, second) if is_number(place)]
    if out.type.pointee == VECTOR.element:
        for number, tile in enumerate(rows):
            for start, vector in zip(starts, _transposed(builder, tile), strict=True):
                to = builder.add(start, _number(number * LANES))
                builder.store(vector, at(builder, out, to, VECTOR.element), align=4)
        return
    flat = [vector for tile in rows for vector in tile]
    pairs = [round_pairs(builder, *flat[i : i + 2]) for i in range(0, len(flat), 2)]
    num_words = len(pairs)
    unused = [ir.Constant(WORDS, ir.Undefined)] * (LANES - num_words)
    lanes = ir.Constant(ir.VectorType(WORDS.element, num_words), list(range(num_words)))
    for start, vector in zip(starts, _transposed(builder, pairs + unused), strict=True):
        words = builder.shuffle_vector(vector, vector, lanes)
        pointer = builder.bitcast(builder.gep(out, [start]), words.type.as_pointer())
        builder.store(words, pointer, align=2)


@emitted()
def pack_columns(builder, x, offsets, index, column, count, packed, to):
    """Pack the first `count` of 16 columns, or all, of 16 rows of x in float32 as 16 rows of `packed`."""
    starts = [builder.add(start, column) for start in _starts(builder, offsets, index)]
    rows = [builder.bitcast(load_part.emit(builder, x, start, count), WORDS) for start in starts]
    for i, vector in enumerate(_transposed(builder, rows)):
        pointer = at(builder, packed, builder.add(to, _number(i * LANES)), WORDS.element)
        builder.store(vector, pointer, align=4)


@emitted()
def store_part_of_rows(builder, sums, first, out, offsets, index, column, count):
    """Store the first `count` of a tile's 16 columns, or all; see `store_rows`."""
    vectors = [builder.bitcast(row, WORDS) for row in _load_tile(builder, sums, first)]
    starts = [builder.add(start, column) for start in _starts(builder, offsets, index)]
    for start, vector in zip(starts, _transposed(builder, vectors), strict=True):
        store_part.emit(builder, out, start, builder.bitcast(vector, VECTOR), count)


@emitted()
def prefetch_rows(builder, out, offsets, index, column):
    """Prefetch 32 columns of 16 rows for `store_rows`, because a line is read before it is written."""
    line = LANES if out.type.pointee == VECTOR.element else 2 * LANES
    for start in _starts(builder, offsets, index):
        for number in range(0, 2 * LANES, line):
            prefetch(builder, builder.gep(out, [builder.add(start, builder.add(column, _number(number)))]))


@emitted()
def transpose_tile(builder, x, offsets, index, column, out, to, stride):
    """Transpose 16 columns of 32 rows of x, from `column` on, to 16 rows of out.

    Rows of out begin at `to` and are `stride` elements apart. `offsets` holds the 32 rows' offsets from `index` on.
    """
    starts = [*_starts(builder, offsets, index), *_starts(builder, offsets, builder.add(index, _number(TILE_ROWS)))]
    rows = [at(builder, x, builder.add(start, column), _HALF) for start in starts]
    halves = [builder.zext(builder.load(row, align=2), WORDS) for row in rows]
    sixteen = ir.Constant(WORDS, [16] * LANES)
    pairs = [builder.or_(halves[i], builder.shl(halves[i + 1], sixteen)) for i in range(0, len(halves), 2)]
    for vector in _transposed(builder, pairs):
        builder.store(vector, at(builder, out, to, WORDS.element), align=4)
        to = builder.add(to, stride)
