"""Thresholds of a row's filters: bounds from the counts of its bins, then a search of the listed tokens.

`sample_tokens.py` launches these kernels; `row_functions.py` has the rule of each filter.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .greedy_argmax import first_largest
from .row_functions import (
    BINS_PER_UNIT,
    FLOOR,
    LARGEST,
    NUM_BINS,
    gumbel,
    is_cut,
    key_of,
    lowest,
    mass_of,
    row_largest,
    scaled,
)

# Relative margin for bounds of masses. A sum of 256 float32 values is off by at most 1e-4.
_SLACK = tl.constexpr(1e-3)
# Keys that a round of the search tests: with 512 tokens, a thread of 8 warps compares 32 pairs.
PROBES = tl.constexpr(16)


@triton.jit
def _bound_kernel(
    top_k_ptr,  # int64 [num_rows], or None
    top_p_ptr,  # float32 [num_rows], or None
    histogram_ptr,  # int32 [num_rows, NUM_BINS]
    bounds_ptr,  # int32 [num_rows, 4]
    vocab_size,
):
    """Find from the counts of a row's bins which bins are kept, one row a program.

    Stores four numbers: how many bins from the top are kept whole; the last bin that may keep a token; the bin of the
    last token of top_k (NUM_BINS for none); and how many tokens precede this bin.
    """
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, NUM_BINS)
    counts = tl.load(histogram_ptr + row * NUM_BINS + bins)
    last_bin = tl.full((), NUM_BINS, tl.int32)
    if top_k_ptr is not None:
        last_bin = tl.sum((tl.cumsum(counts, 0) < tl.load(top_k_ptr + row)).to(tl.int32), axis=0)
        last_bin = tl.where(last_bin < NUM_BINS - 1, last_bin, NUM_BINS)
    whole = tl.minimum(last_bin, NUM_BINS - 1)
    last = tl.minimum(last_bin, NUM_BINS - 2)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            most = counts * tl.exp(bins / -BINS_PER_UNIT) * (1 + _SLACK)
            most = tl.where(bins <= last_bin, most, 0.0)
            least = counts * tl.exp((bins + 1) / -BINS_PER_UNIT) * (1 - _SLACK)
            least = tl.where(bins < tl.minimum(last_bin, NUM_BINS - 1), least, 0.0)
            # Bound the cut from both ends: if top_p is near 1, the mass that it leaves out is far more accurate than
            # the mass that it keeps. The best token's mass alone is 1. Rounding takes less than 2^-42 from each token.
            total_most, total_least = tl.sum(most, axis=0), tl.maximum(tl.sum(least, axis=0), 1.0)
            rest_most = (1.0 - top_p) * total_most + vocab_size * 2.0**-42
            rest_least = (1.0 - top_p) * total_least
            by_head = tl.sum((tl.cumsum(most, 0) < top_p * total_least).to(tl.int32), axis=0)
            by_tail = tl.sum((tl.cumsum(least, 0, reverse=True) > rest_most).to(tl.int32), axis=0) - 1
            whole = tl.minimum(whole, tl.maximum(by_head, by_tail))
            by_head = tl.sum((tl.cumsum(least, 0) < top_p * total_most).to(tl.int32), axis=0)
            by_tail = tl.sum((tl.cumsum(most, 0, reverse=True) > rest_least).to(tl.int32), axis=0) - 1
            last = tl.minimum(last, tl.minimum(by_head, by_tail))
            # List at least one bin, which has a kept token.
            last = tl.max(tl.where((bins <= last) & (counts > 0), bins, 0), axis=0)
            whole = tl.minimum(whole, last)
    tl.store(bounds_ptr + 4 * row, whole)
    tl.store(bounds_ptr + 4 * row + 1, last)
    tl.store(bounds_ptr + 4 * row + 2, last_bin)
    tl.store(bounds_ptr + 4 * row + 3, tl.sum(tl.where(bins < last_bin, counts, 0), axis=0))


@triton.jit
def _listed_before(listed_z_ptr, length, key, BLOCK_LIST: tl.constexpr):
    """Return how many listed tokens are nearer to the best token than `key`, and their mass."""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0, tl.int64)
    for start in range(0, length, BLOCK_LIST):
        offs = start + tl.arange(0, BLOCK_LIST)
        z = tl.load(listed_z_ptr + offs, mask=offs < length, other=float("-inf"))
        is_before = (offs < length) & (key_of(z) < key)
        count += tl.sum(is_before.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(is_before, mass_of(z), 0), axis=0)
    return count, mass


@triton.jit
def _first_key(listed_z_ptr, length, low, high, preceding, target, BY_MASS: tl.constexpr, BLOCK_LIST: tl.constexpr):
    """Return the smallest key from `low` to `high` whose tokens reach `target`, in number or in mass; else `high`.

    `preceding` counts what comes before the list. Every round divides the range by PROBES.
    """
    while low < high:
        step = (high - low) // PROBES + 1
        probes = low - 1 + step * (1 + tl.arange(0, PROBES))
        sums = tl.zeros((PROBES,), tl.int64) + preceding
        for start in range(0, length, BLOCK_LIST):
            offs = start + tl.arange(0, BLOCK_LIST)
            z = tl.load(listed_z_ptr + offs, mask=offs < length, other=float("-inf"))
            values = mass_of(z) if BY_MASS else tl.full((BLOCK_LIST,), 1, tl.int64)
            values = tl.where(offs < length, values, 0)
            sums += tl.sum(tl.where(key_of(z)[:, None] <= probes[None, :], values[:, None], 0), axis=0)
        low = tl.minimum(low + step * tl.sum((sums.to(tl.float64) < target).to(tl.int32), axis=0), high)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def _last_key(
    top_k_ptr,
    top_p_ptr,
    bounds_ptr,
    histogram_ptr,
    sums_ptr,
    listed_z_ptr,
    row,
    length,
    vocab_size,
    BLOCK_LIST: tl.constexpr,
):
    """Return the key of the last token of a row's list that top_k and top_p keep."""
    nearest = tl.full((), 0x7F800000, tl.int32)
    farthest = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK_LIST):
        offs = start + tl.arange(0, BLOCK_LIST)
        key = key_of(tl.load(listed_z_ptr + offs, mask=offs < length, other=0.0))
        nearest = tl.minimum(nearest, tl.min(tl.where(offs < length, key, 0x7F800000), axis=0))
        farthest = tl.maximum(farthest, tl.max(key, axis=0))

    # Keys from `nearest` to `farthest` are left to search. `wanted` listed tokens are among the top_k: all of them if
    # no listed bin holds the last token of top_k, as when a mask leaves fewer than top_k tokens.
    wanted = length
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row)
        last_bin = tl.load(bounds_ptr + 4 * row + 2)
        if (top_k < vocab_size) & (last_bin < NUM_BINS):
            not_listed = tl.load(bounds_ptr + 4 * row + 3) - length
            wanted = top_k - not_listed - tl.load(histogram_ptr + row * NUM_BINS + last_bin)
            target = wanted.to(tl.float64)
            farthest = _first_key(listed_z_ptr, length, nearest, farthest, 0, target, False, BLOCK_LIST)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            preceding = tl.load(sums_ptr + 3 * row)
            count, mass = _listed_before(listed_z_ptr, length, farthest, BLOCK_LIST)
            tied = mass_of(-farthest.to(tl.float32, bitcast=True))
            total = preceding + tl.load(sums_ptr + 3 * row + 1) + mass + (wanted - count) * tied
            target = top_p.to(tl.float64) * total.to(tl.float64)
            farthest = _first_key(listed_z_ptr, length, nearest, farthest, preceding, target, True, BLOCK_LIST)
    return farthest


@triton.jit
def _best_listed(
    listed_z_ptr, listed_token_ptr, keys_ptr, row, length, lowest_kept, best, token, BLOCK_LIST: tl.constexpr
):
    """Return the drawn token: `token` with the score `best`, or a kept token of the list with a higher score."""
    for start in range(0, length, BLOCK_LIST):
        offs = start + tl.arange(0, BLOCK_LIST)
        z = tl.load(listed_z_ptr + offs, mask=offs < length, other=float("-inf"))
        listed = tl.load(listed_token_ptr + offs, mask=offs < length, other=0)
        scores = tl.where(z >= lowest_kept, z + gumbel(listed, keys_ptr, row), float("-inf"))
        found, one = first_largest(scores, listed)
        token = tl.where((found > best) | ((found == best) & (one < token) & (one >= 0)), one, token)
        best = tl.maximum(best, found)
    return token


@triton.jit
def _choose_kernel(
    keys_ptr,  # int64 [num_rows, 2]
    temperature_ptr,  # float32 [num_rows]
    top_k_ptr,  # int64 [num_rows], or None
    top_p_ptr,  # float32 [num_rows], or None
    log_min_p_ptr,  # float32 [num_rows], or None
    largest_ptr,  # float32 [num_rows, num_chunks]
    bounds_ptr,  # int32 [num_rows, 4], or None where no row has a top_k or top_p
    histogram_ptr,  # int32 [num_rows, NUM_BINS]
    sums_ptr,  # int64 [num_rows, 3]
    listed_z_ptr,  # float32 [num_rows, vocab_size]
    listed_token_ptr,  # int32 [num_rows, vocab_size]
    best_ptr,  # float32 [num_rows, num_chunks]
    token_ptr,  # int32 [num_rows, num_chunks]
    lowest_kept_ptr,  # float32 [num_rows]
    out_ptr,  # int64 [num_rows]
    vocab_size,
    num_chunks,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
):
    """Search a row's list for the thresholds, then choose among the list and the chunks. One program takes one row."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    largest = row_largest(largest_ptr, row, num_chunks, BLOCK_CHUNKS)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    x = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    tokens = tl.load(token_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1)
    lowest_kept = lowest(log_min_p_ptr, row)
    if is_cut(top_k_ptr, top_p_ptr, row, vocab_size):
        lowest_kept = tl.maximum(lowest_kept, FLOOR)
    if temperature > 0:
        token = tl.full((), -1, tl.int32)
        if tl.abs(largest) <= LARGEST:
            best, token = first_largest(scaled(x, largest, temperature) + gumbel(tokens, keys_ptr, row), tokens)
            if sums_ptr is not None:
                length = tl.load(sums_ptr + 3 * row + 2)
                if length > 0:
                    listed_z_ptr += row * vocab_size
                    listed_token_ptr += row * vocab_size
                    last_key = _last_key(
                        top_k_ptr,
                        top_p_ptr,
                        bounds_ptr,
                        histogram_ptr,
                        sums_ptr,
                        listed_z_ptr,
                        row,
                        length,
                        vocab_size,
                        BLOCK_LIST,
                    )
                    lowest_kept = tl.maximum(lowest_kept, -last_key.to(tl.float32, bitcast=True))
                    token = _best_listed(
                        listed_z_ptr, listed_token_ptr, keys_ptr, row, length, lowest_kept, best, token, BLOCK_LIST
                    )
    else:
        _, token = first_largest(x, tokens)
    tl.store(lowest_kept_ptr + row, lowest_kept)
    tl.store(out_ptr + row, token.to(tl.int64))
