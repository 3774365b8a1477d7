"""Numba kernels of products with unpacked weights: bfloat16 by AMX, float32 by vectors.

They multiply by one matrix, or by one matrix for each group of rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .. import kernel as nb
from .. import tiles
from ..launch import SCRATCH, NumbaLaunch
from ..tiles import TILE_COLUMNS, TILE_ROWS, TILE_WORDS
from ..vectors import (
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
# Most bytes and most rows of x that a thread packs at once. They stay in a core's cache while it reads weights.
_PACKED_BYTES, _MAX_CHUNK = 1 << 18, 256
_SUMS = 4 * TILE_WORDS
# Columns of float32 rows that are multiplied at once, so that 32 rows stay in the L1 cache for 32 outputs. This takes
# 0.9 of the time of full rows.
_PART = 128


@nb.device_function
def _find_rows(offsets, at, first, stop, rows, has_rows, stride):
    """Write the offsets of 16 entries' rows from `at` on. Missing entries repeat the last one."""
    for i in range(TILE_ROWS):
        entry = min(first + i, stop - 1)
        offsets[at + i] = (rows[entry] if has_rows else entry) * stride


@nb.device_function
def _pack(x, rows, has_rows, begin, stop, x_stride, scratch, offsets, packing):
    """Pack rows as consecutive tiles of words, or 32 rows in an interleaved order."""
    steps, columns, step_words, half_words, count = packing
    for row in range(begin, begin + nb.rounded_up(stop - begin, count), TILE_ROWS):
        _find_rows(offsets, 0, row, stop, rows, has_rows, x_stride)
        number = (row - begin) // TILE_ROWS
        to = _SUMS + number // 2 * 2 * steps * TILE_WORDS + number % 2 * half_words
        for step in range(steps):
            tiles.pack_tile(x, offsets, np.int64(0), step * columns, scratch, to + step * step_words)


@nb.device_function
def _set_sums(scratch, bias, output, is_pair):
    """Set the sums of 32 outputs to the bias, for the second tile only if it has rows."""
    for i in range(_BLOCK):
        to = i // TILE_ROWS * 2 * TILE_WORDS + i % TILE_ROWS * LANES
        bias_of_row = nb.load(bias, output + i)
        store_vector(scratch, to, fill(bias_of_row))
        store_vector(scratch, to + TILE_WORDS, fill(bias_of_row if is_pair else np.float32(0)))


@nb.device_function
def _add_tile(scratch, to, other):
    ones = fill(np.float32(1))
    for i in range(0, TILE_WORDS, LANES):
        total = multiply_add(ones, load_vector(scratch, other + i), load_vector(scratch, to + i))
        store_vector(scratch, to + i, total)


@nb.device_function
def _multiply_tiles(w, starts, row_step, scratch, packed, steps, has_bias, is_pair):
    """Multiply a block of outputs with a block of rows by AMX. With one tile of x, add sums 1 and 3 to sums 0 and 2."""
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
    """Multiply a block in float32 by vectors: eight outputs at a time, with parts of rows that fit the L1 cache."""
    for first in range(0, steps * LANES, _PART):
        count = min(steps * LANES - first, _PART)
        for row in range(0, _BLOCK, OUTER_ROWS):
            half, row_in_half = row // TILE_ROWS, row % TILE_ROWS
            start = (starts[1] if half else starts[0]) + row_in_half * row_step + first
            following = (starts[3] if half else starts[2]) + first * TILE_ROWS + row_in_half * count
            add_outer_products(
                w, start, row_step, np.int64(1), scratch, packed + first * _BLOCK, count, scratch,
                half * 2 * TILE_WORDS + row_in_half * LANES, first == 0 and not has_bias, following,
            )  # fmt: skip


@nb.device_function
def _write(scratch, tile, out, offsets, at, is_gated, block):
    """Write the sums of tile `tile` of x, and of a second tile after it, to its rows of out."""
    second = tile + 2 * TILE_WORDS
    if not is_gated:
        tiles.store_rows(scratch, tile, second, out, offsets, at, block * _BLOCK)
    else:
        for i in range(0, TILE_WORDS, LANES):
            up = load_vector(scratch, second + i)
            store_vector(scratch, tile + i, silu(load_vector(scratch, tile + i), up))
        tiles.store_rows(scratch, tile, None, out, offsets, at, block * TILE_ROWS)


def _multiply_by(multiply_block: Any, columns: int, has_tiles_in_turns: bool) -> Any:
    """Return a kernel for all groups from a function for one block of outputs and rows. columns: columns of a tile."""

    @nb.device_function
    def multiply_chunk(tensors, scratch, offsets, begin, stop, weights, bias, has_bias, low, high, sizes):
        """Multiply rows whose packed tiles stay in the cache with blocks of outputs `low` to `high`."""
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
                    if stop - begin > _BLOCK:  # a few rows are cached anyway
                        tiles.prefetch_rows(out, offsets, at, block * block_size)
                multiply_block(w, starts, w_stride, scratch, packed, steps, has_bias, is_pair)
                for tile in range(1 + is_pair):
                    _write(scratch, tile * TILE_WORDS, out, offsets, tile * TILE_ROWS, is_gated, block)

    @nb.device_function
    def multiply(tensors, ends, bias, has_bias, scratch, offsets, sizes, chunk):
        """Compute all products; threads get equal shares of the blocks of outputs.

        A thread multiplies all rows of one group, or some rows if there are several groups.
        """
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
    """Return this thread's scratch memory, and the part for the offsets of rows."""
    scratch, scratch_size = values[8:10]
    thread_scratch = scratch + nb.thread_index() * scratch_size * 4
    return nb.floats(thread_scratch), nb.int64s(thread_scratch + (scratch_size - 2 * _BLOCK) * 4)


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
    """Return the kernel for x and weights of this dtype."""
    return _float32 if dtype == torch.float32 else _bfloat16


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether the CPU has the instructions for this dtype's products."""
    return {torch.float32: HAS_WIDE_VECTORS, torch.bfloat16: tiles.has_tiles()}.get(dtype, False)


def takes(weight: torch.Tensor) -> bool:
    """Return whether these kernels take weights [..., out_features, in_features] of this dtype and these sizes."""
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
    has_single_tiles: bool = False,
) -> torch.Tensor:
    """Return x [num_rows, in_features] times weights that `takes` accepts, [num_entries, out_features] of `dtype`.

    Weights have x's dtype; `dtype` is x's dtype or float32. If gated, return silu(gate) * up of the halves in x's
    dtype.

    weight: [out_features, in_features], or one per group, [num_groups, out_features, in_features].
    ends: int32 [num_groups], the end of each group's entries. Results beyond the last end are not written.
    rows: int64 [num_entries], each entry's row of x; None if entries are rows.
    bias: [out_features] in x's dtype, contiguous, only if not gated.
    has_single_tiles: whether bfloat16 is multiplied by 16 rows at a time. 32 rows are faster, but have another order of
    sums, so a row's bits then depend on the number of rows.
    """
    *groups, num_outputs, size = weight.shape
    num_entries, columns = len(x if rows is None else rows), num_outputs // 2 if is_gated else num_outputs
    out = torch.empty(num_entries, columns, dtype=dtype or x.dtype)
    strides = x.stride(0), weight.stride(0) if groups else 0, weight.stride(-2)
    launch = _launch(
        (*(groups or [1]), num_entries, is_gated, num_outputs, size, *strides, columns),
        x.dtype,
        out.dtype,
        has_single_tiles,
    )
    launch({"x": x, "w": weight, "out": out, "rows": rows, "ends": ends, "bias": bias})
    return out


@lru_cache(maxsize=1024)
def _launch(sizes: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype, has_single_tiles: bool) -> NumbaLaunch:
    _, num_entries, _, num_outputs, size, *_ = sizes
    row_bytes = size * dtype.itemsize
    chunk = max(_BLOCK, min(_MAX_CHUNK, _PACKED_BYTES // row_bytes) // _BLOCK * _BLOCK)
    if has_single_tiles:
        chunk = TILE_ROWS
    packed = -(-min(chunk, num_entries) // _BLOCK) * _BLOCK * row_bytes // 4
    # Sums, packed rows, and offsets of a block's rows.
    scratch_size = _SUMS + packed + 2 * _BLOCK
    tensors: tuple[Any, ...] = "x", "w", "out", "rows", "ends", "bias", SCRATCH
    arguments = out_dtype == torch.bfloat16, *tensors, scratch_size, chunk, *sizes
    work = num_entries * num_outputs * size
    return NumbaLaunch(kernel_of(dtype).address, work, arguments, scratch_size=scratch_size)
