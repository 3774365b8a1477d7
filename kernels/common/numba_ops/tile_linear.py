"""Products with weights, which are read as they lie, of bfloat16 by AMX and of float32 by vectors: one matrix, or one
for each group of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from paged.kernels.common.numba_ops import kernel as nb
from paged.kernels.common.numba_ops import tiles
from paged.kernels.common.numba_ops.launch import SCRATCH, LoopLaunch
from paged.kernels.common.numba_ops.tiles import TILE_COLUMNS, TILE_ROWS, TILE_WORDS
from paged.kernels.common.numba_ops.vectors import (
    HAS_WIDE_VECTORS,
    LANES,
    OUTER_ROWS,
    add_outer_products,
    fill,
    load_vector,
    multiply_add,
    silu,
    store_vector,
)

_BLOCK = 2 * TILE_ROWS  # outputs, and rows of x, of a product
# Of packed rows, which stay in a core's cache while it reads weights, and at most so many rows.
_PACKED_BYTES, _MAX_CHUNK = 1 << 18, 256
_SUMS = 4 * TILE_WORDS
# Columns of 32 rows of float32 that stay in the first cache for 32 outputs: with the loop's turns of four columns
# 0.9 of the time of whole rows.
_PART = 128


@nb.device_function
def _find_rows(offsets, at, first, stop, rows, has_rows, stride):
    """Where 16 entries' rows begin, from `at` on; the last one stands for those that are not there."""
    for i in range(TILE_ROWS):
        entry = min(first + i, stop - 1)
        offsets[at + i] = (rows[entry] if has_rows else entry) * stride


@nb.device_function
def _pack(x, rows, has_rows, begin, stop, x_stride, scratch, offsets, packing):
    """Rows as tiles of words, one behind the other, or those of 32 rows in turns."""
    steps, columns, step_words, half_words, count = packing
    for row in range(begin, begin + nb.rounded_up(stop - begin, count), TILE_ROWS):
        _find_rows(offsets, 0, row, stop, rows, has_rows, x_stride)
        number = (row - begin) // TILE_ROWS
        to = _SUMS + number // 2 * 2 * steps * TILE_WORDS + number % 2 * half_words
        for step in range(steps):
            tiles.pack_tile(x, offsets, np.int64(0), step * columns, scratch, to + step * step_words)


@nb.device_function
def _set_sums(scratch, bias, output, is_pair):
    """To 32 outputs' bias, of rows in the second tile only where there are any."""
    for i in range(_BLOCK):
        to = i // TILE_ROWS * 2 * TILE_WORDS + i % TILE_ROWS * LANES
        own = nb.load(bias, output + i)
        store_vector(scratch, to, fill(own))
        store_vector(scratch, to + TILE_WORDS, fill(own if is_pair else np.float32(0)))


@nb.device_function
def _add_tile(scratch, to, other):
    one = fill(np.float32(1))
    for i in range(0, TILE_WORDS, LANES):
        total = multiply_add(one, load_vector(scratch, other + i), load_vector(scratch, to + i))
        store_vector(scratch, to + i, total)


@nb.device_function
def _multiply_tiles(w, starts, row_step, scratch, packed, steps, has_bias, is_pair):
    """A block of outputs for a block of rows by AMX; with one tile of x sums 1 and 3 are parts of 0 and 2."""
    first, second, next_first, next_second = starts
    if has_bias:
        tiles.load_sums(scratch, np.int64(0))
    else:
        tiles.zero_sums()
    if is_pair:
        tiles.add_products(
            w, first, second, next_first, next_second, row_step, scratch, packed, steps * TILE_WORDS, steps
        )
        tiles.store_sums(scratch, np.int64(0))
    else:
        tiles.add_products(w, first, second, next_first, next_second, row_step, scratch, packed, None, steps)
        tiles.store_sums(scratch, np.int64(0))
        for tile in range(0, _SUMS, 2 * TILE_WORDS):
            _add_tile(scratch, tile, tile + TILE_WORDS)


@nb.device_function
def _multiply_vectors(w, starts, row_step, scratch, packed, steps, has_bias, is_pair):
    """The same in float32 by vectors, eight outputs at a time, of parts of the rows that stay in the first cache."""
    for first in range(0, steps * LANES, _PART):
        count = min(steps * LANES - first, _PART)
        for row in range(0, _BLOCK, OUTER_ROWS):
            half, own = row // TILE_ROWS, row % TILE_ROWS
            start = (starts[1] if half else starts[0]) + own * row_step + first
            following = (starts[3] if half else starts[2]) + first * TILE_ROWS + own * count
            add_outer_products(
                w, start, row_step, np.int64(1), scratch, packed + first * _BLOCK, count, scratch,
                half * 2 * TILE_WORDS + own * LANES, first == 0 and not has_bias, following,
            )  # fmt: skip


@nb.device_function
def _write(scratch, tile, out, offsets, at, is_gated, block):
    """The sums of a tile of x, `tile` and the second one behind it, to its rows of out."""
    second = tile + 2 * TILE_WORDS
    if not is_gated:
        tiles.store_rows(scratch, tile, second, out, offsets, at, block * _BLOCK)
    else:
        for i in range(0, TILE_WORDS, LANES):
            up = load_vector(scratch, second + i)
            store_vector(scratch, tile + i, silu(load_vector(scratch, tile + i), up))
        tiles.store_rows(scratch, tile, None, out, offsets, at, block * TILE_ROWS)


def _multiply_by(multiply_block: Any, columns: int, has_tiles_in_turns: bool) -> Any:
    """Products of all groups, by a function for a block of outputs and of rows, whose tiles have so many columns."""

    @nb.device_function
    def multiply_chunk(tensors, scratch, offsets, begin, stop, weights, bias, has_bias, low, high, sizes):
        """Rows whose packed tiles stay in the cache, and blocks of outputs, from `low` to below `high`."""
        x, w, out, rows, has_rows = tensors
        is_gated, num_outputs, steps, x_stride, w_stride, out_stride = sizes
        packing = steps, columns, TILE_WORDS, steps * TILE_WORDS, TILE_ROWS
        if has_tiles_in_turns:
            packing = steps, columns, 2 * TILE_WORDS, TILE_WORDS, _BLOCK
        _pack(x, rows, has_rows, begin, stop, x_stride, scratch, offsets, packing)
        gap, block_size = TILE_ROWS * w_stride, _BLOCK
        if is_gated:
            gap, block_size = num_outputs // 2 * w_stride, TILE_ROWS
        for block in range(low, high):
            first = weights + block * block_size * w_stride
            following = first + block_size * w_stride
            starts = first, first + gap, following, following + gap
            for row in range(begin, stop, _BLOCK):
                packed, is_pair = _SUMS + (row - begin) // TILE_ROWS * steps * TILE_WORDS, stop - row > TILE_ROWS
                if has_bias:
                    _set_sums(scratch, bias, block * _BLOCK, is_pair)
                for tile in range(1 + is_pair):
                    at = tile * TILE_ROWS
                    _find_rows(offsets, at, row + at, stop, rows, False, out_stride)
                    if stop - begin > _BLOCK:  # few rows are in the cache
                        tiles.prefetch_rows(out, offsets, at, block * block_size)
                multiply_block(w, starts, w_stride, scratch, packed, steps, has_bias, is_pair)
                for tile in range(1 + is_pair):
                    _write(scratch, tile * TILE_WORDS, out, offsets, tile * TILE_ROWS, is_gated, block)

    @nb.device_function
    def multiply(tensors, ends, bias, has_bias, scratch, offsets, sizes, chunk):
        """Every thread takes as many blocks of outputs as the others: of one group's rows all, of several groups'
        some."""
        num_groups, num_entries, is_gated, num_outputs, size, x_stride, w_group, w_stride, out_stride = sizes
        num_blocks = num_outputs // _BLOCK
        of_chunk = is_gated, num_outputs, size // columns, x_stride, w_stride, out_stride
        total, begin = np.int64(0), np.int64(0)
        for group in range(num_groups):
            stop = np.int64(ends[group]) if num_groups > 1 else num_entries
            for row in range(begin, stop, chunk):
                total += (min(chunk, stop - row) + _BLOCK - 1) // _BLOCK
            begin = stop
        first, end = nb.share(total * num_blocks)
        done, begin = np.int64(0), np.int64(0)
        for group in range(num_groups):
            stop = np.int64(ends[group]) if num_groups > 1 else num_entries
            for row in range(begin, stop, chunk):
                last = min(row + chunk, stop)
                cost = (last - row + _BLOCK - 1) // _BLOCK
                low = max(first - done + cost - 1, 0) // cost
                high = min(max(end - done + cost - 1, 0) // cost, num_blocks)
                if low < high:
                    multiply_chunk(
                        tensors, scratch, offsets, row, last, group * w_group, bias, has_bias, low, high, of_chunk
                    )  # fmt: skip
                done += cost * num_blocks
            begin = stop

    return multiply


_by_tiles = _multiply_by(_multiply_tiles, TILE_COLUMNS, False)
_by_vectors = _multiply_by(_multiply_vectors, LANES, True)


@nb.device_function
def _places(values):
    """This thread's scratch, and of it where rows begin."""
    scratch, scratch_size = values[8:10]
    own = scratch + nb.thread_index() * scratch_size * 4
    return nb.floats(own), nb.int64s(own + (scratch_size - 2 * _BLOCK) * 4)


@nb.Kernel
def _bfloat16(arguments):
    values = nb.unpack(arguments, 20)
    is_bf16, x, w, out, rows, ends, bias = values[1:8]
    scratch, offsets = _places(values)
    tiles.configure()
    if is_bf16:
        tensors = nb.bfloats(x), nb.bfloats(w), nb.bfloats(out), nb.int64s(rows), rows != 0
        _by_tiles(tensors, nb.int32s(ends), nb.bfloats(bias), bias != 0, scratch, offsets, values[11:], values[10])
    else:
        wide = nb.bfloats(x), nb.bfloats(w), nb.floats(out), nb.int64s(rows), rows != 0
        _by_tiles(wide, nb.int32s(ends), nb.bfloats(bias), bias != 0, scratch, offsets, values[11:], values[10])
    tiles.release()


@nb.Kernel
def _float32(arguments):
    values = nb.unpack(arguments, 20)
    _, x, w, out, rows, ends, bias = values[1:8]
    scratch, offsets = _places(values)
    tensors = nb.floats(x), nb.floats(w), nb.floats(out), nb.int64s(rows), rows != 0
    _by_vectors(tensors, nb.int32s(ends), nb.floats(bias), bias != 0, scratch, offsets, values[11:], values[10])


def kernel_of(dtype: torch.dtype) -> nb.Kernel:
    """The one for x and weights of a type."""
    return _float32 if dtype == torch.float32 else _bfloat16


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the processor has what such products of a type are made of."""
    return {torch.float32: HAS_WIDE_VECTORS, torch.bfloat16: tiles.has_tiles()}.get(dtype, False)


def takes(weight: torch.Tensor) -> bool:
    """Whether there are such products with weights [..., out_features, in_features] of this type and these sizes."""
    num_outputs, size = weight.shape[-2:]
    is_even = num_outputs % _BLOCK == 0 and size % TILE_COLUMNS == 0 and weight.stride(-1) == 1
    return is_even and multiplies(weight.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of x [num_rows, in_features] with weights of its type that `takes` says yes to: [num_entries,
    out_features] of `dtype`, x's or float32; where they are gated, silu(gate) * up of their halves in x's type.

    weight: [out_features, in_features], or for groups one each, [num_groups, out_features, in_features]; then ends
    int32 [num_groups]: where each group's entries end. rows int64 [num_entries]: an entry's row of x, its own if None.
    bias: [out_features] of x's type, contiguous, where nothing is gated. What lies beyond the last end is not written.
    """
    *groups, num_outputs, size = weight.shape
    num_entries, columns = len(x if rows is None else rows), num_outputs // 2 if is_gated else num_outputs
    out = torch.empty(num_entries, columns, dtype=dtype or x.dtype)
    strides = x.stride(0), weight.stride(0) if groups else 0, weight.stride(-2)
    launch = _launch(
        (*(groups or [1]), num_entries, is_gated, num_outputs, size, *strides, columns), x.dtype, out.dtype
    )
    launch({"x": x, "w": weight, "out": out, "rows": rows, "ends": ends, "bias": bias})
    return out


@lru_cache(maxsize=1024)
def _launch(sizes: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype) -> LoopLaunch:
    _, num_entries, _, num_outputs, size, *_ = sizes
    row_bytes = size * dtype.itemsize
    chunk = max(_BLOCK, min(_MAX_CHUNK, _PACKED_BYTES // row_bytes) // _BLOCK * _BLOCK)
    packed = -(-min(chunk, num_entries) // _BLOCK) * _BLOCK * row_bytes // 4
    # Sums, packed rows, and where those of a block begin.
    scratch_size = _SUMS + packed + 2 * _BLOCK
    tensors: tuple[Any, ...] = "x", "w", "out", "rows", "ends", "bias", SCRATCH
    arguments = out_dtype == torch.bfloat16, *tensors, scratch_size, chunk, *sizes
    work = num_entries * num_outputs * size
    return LoopLaunch(kernel_of(dtype).address, work, arguments, scratch_size=scratch_size)
