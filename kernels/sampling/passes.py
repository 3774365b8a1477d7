"""Passes over a batch of logits: largest logit and drawn token of each row, counts of bins, and a list of tokens.

The first pass finds the largest logit of a row, and the token of rows without filters. The second counts the tokens of
each bin below the largest. The third chooses among tokens of kept bins. It also lists the tokens of bins with a
threshold, which `thresholds.py` searches. Counts and masses are whole numbers, so the order of additions does not
change them.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .greedy_argmax import first_largest
from .row_functions import (
    LARGEST,
    NUM_BINS,
    bin_of,
    gumbel,
    is_cut,
    lowest,
    mass_of,
    penalised_logits,
    row_largest,
    scaled,
)


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    table_rows_ptr,  # int64 [num_rows], -1 for no penalties, or None
    counts_ptr,  # int32 [num_tables, vocab_size]
    seen_ptr,  # bool [num_tables, vocab_size]
    penalties_ptr,  # float32 [num_rows, 3]
    keys_ptr,  # int64 [num_rows, 2]
    temperature_ptr,  # float32 [num_rows]
    top_k_ptr,  # int64 [num_rows], or None
    top_p_ptr,  # float32 [num_rows], or None
    log_min_p_ptr,  # float32 [num_rows], or None
    largest_ptr,  # float32 [num_rows, num_chunks]
    best_ptr,  # float32 [num_rows, num_chunks]
    token_ptr,  # int32 [num_rows, num_chunks]
    vocab_size,
    num_chunks,
    stride_logits_row,
    BLOCK_TOKENS: tl.constexpr,
):
    """Find the largest logit of BLOCK_TOKENS tokens of a row. If the row has no filters, also draw its token."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    x = penalised_logits(
        logits_ptr, table_rows_ptr, counts_ptr, seen_ptr, penalties_ptr, row, tokens, vocab_size, stride_logits_row
    )
    temperature = tl.load(temperature_ptr + row)
    is_drawn = temperature > 0
    # A NaN is never the best token. A row with temperature draws nothing if it holds NaN or infinity.
    x = tl.where(x == x, x, tl.where(is_drawn, float("inf"), float("-inf")))
    largest = tl.max(x, axis=0)
    tl.store(largest_ptr + row * num_chunks + chunk, largest)
    is_whole = ~is_cut(top_k_ptr, top_p_ptr, row, vocab_size) & (lowest(log_min_p_ptr, row) == float("-inf"))
    if is_whole | ~is_drawn:
        scores = x
        if is_drawn:
            # Subtract the chunk's largest logit, because the row's is not known yet.
            scores = scaled(x, largest, temperature) + gumbel(tokens, keys_ptr, row)
        _, token = first_largest(scores, tokens)
        tl.store(best_ptr + row * num_chunks + chunk, tl.max(tl.where(tokens == token, x, float("-inf")), axis=0))
        tl.store(token_ptr + row * num_chunks + chunk, token)


@triton.jit(do_not_specialize=["tokens_per_program"])
def _count_bins_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    table_rows_ptr,  # int64 [num_rows], -1 for no penalties, or None
    counts_ptr,  # int32 [num_tables, vocab_size]
    seen_ptr,  # bool [num_tables, vocab_size]
    penalties_ptr,  # float32 [num_rows, 3]
    temperature_ptr,  # float32 [num_rows]
    top_k_ptr,  # int64 [num_rows], or None
    top_p_ptr,  # float32 [num_rows], or None
    largest_ptr,  # float32 [num_rows, num_chunks]
    histogram_ptr,  # int32 [num_rows, NUM_BINS], zeros
    vocab_size,
    num_chunks,
    tokens_per_program,
    stride_logits_row,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Count the tokens of a part of a row by bin."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    largest = row_largest(largest_ptr, row, num_chunks, BLOCK_CHUNKS)
    if (temperature > 0) & is_cut(top_k_ptr, top_p_ptr, row, vocab_size) & (tl.abs(largest) <= LARGEST):
        histogram = tl.zeros((NUM_BINS,), tl.int32)
        begin = tl.program_id(1) * tokens_per_program
        for start in range(begin, tl.minimum(begin + tokens_per_program, vocab_size), BLOCK_TOKENS):
            tokens = start + tl.arange(0, BLOCK_TOKENS)
            x = penalised_logits(
                logits_ptr,
                table_rows_ptr,
                counts_ptr,
                seen_ptr,
                penalties_ptr,
                row,
                tokens,
                vocab_size,
                stride_logits_row,
            )
            histogram += tl.histogram(bin_of(scaled(x, largest, temperature)), NUM_BINS, mask=tokens < vocab_size)
        bins = tl.arange(0, NUM_BINS)
        tl.atomic_add(histogram_ptr + row * NUM_BINS + bins, histogram, mask=histogram > 0)


@triton.jit
def _collect_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    table_rows_ptr,  # int64 [num_rows], -1 for no penalties, or None
    counts_ptr,  # int32 [num_tables, vocab_size]
    seen_ptr,  # bool [num_tables, vocab_size]
    penalties_ptr,  # float32 [num_rows, 3]
    keys_ptr,  # int64 [num_rows, 2]
    temperature_ptr,  # float32 [num_rows]
    top_k_ptr,  # int64 [num_rows], or None
    top_p_ptr,  # float32 [num_rows], or None
    log_min_p_ptr,  # float32 [num_rows], or None
    largest_ptr,  # float32 [num_rows, num_chunks]
    bounds_ptr,  # int32 [num_rows, 4], or None where no row has a top_k or top_p
    # `sums_ptr` has three sums, which the caller sets to 0: the mass of the bins that are kept whole, the mass of the
    # bins between `last` and `last_bin` (see `bounds_ptr`), and the length of the list.
    sums_ptr,  # int64 [num_rows, 3]
    listed_z_ptr,  # float32 [num_rows, vocab_size]
    listed_token_ptr,  # int32 [num_rows, vocab_size]
    best_ptr,  # float32 [num_rows, num_chunks]
    token_ptr,  # int32 [num_rows, num_chunks]
    vocab_size,
    num_chunks,
    stride_logits_row,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Choose among tokens of bins that are kept whole, BLOCK_TOKENS of a row a program, and list tokens of other bins.

    A list holds the tokens of the bins in which thresholds lie. Its order differs from run to run, and no result
    depends on it.
    """
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    largest = row_largest(largest_ptr, row, num_chunks, BLOCK_CHUNKS)
    cut = is_cut(top_k_ptr, top_p_ptr, row, vocab_size)
    minimum = lowest(log_min_p_ptr, row)
    has_filters = cut | (minimum != float("-inf"))
    if (temperature > 0) & has_filters & (tl.abs(largest) <= LARGEST):
        tokens = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        x = penalised_logits(
            logits_ptr, table_rows_ptr, counts_ptr, seen_ptr, penalties_ptr, row, tokens, vocab_size, stride_logits_row
        )
        z = scaled(x, largest, temperature)
        kept = z >= minimum
        if bounds_ptr is not None:
            bounds_ptr += 4 * row
            if cut:
                whole = tl.load(bounds_ptr)
                last = tl.load(bounds_ptr + 1)
                last_bin = tl.load(bounds_ptr + 2)
                bins = bin_of(z)
                kept &= bins < whole
                if top_p_ptr is not None:
                    masses = mass_of(z)
                    before = tl.sum(tl.where(bins < whole, masses, 0), axis=0)
                    between = tl.sum(tl.where((bins > last) & (bins < last_bin), masses, 0), axis=0)
                    tl.atomic_add(sums_ptr + 3 * row, before)
                    tl.atomic_add(sums_ptr + 3 * row + 1, between)
                listed = (bins >= whole) & ((bins <= last) | (bins == last_bin))
                places = tl.cumsum(listed.to(tl.int32), 0)
                length = tl.max(places, axis=0)
                if length > 0:
                    first = tl.atomic_add(sums_ptr + 3 * row + 2, length.to(tl.int64)) - 1
                    first += row * vocab_size
                    tl.store(listed_z_ptr + first + places, z, mask=listed)
                    tl.store(listed_token_ptr + first + places, tokens, mask=listed)
        scores = tl.where(kept, z + gumbel(tokens, keys_ptr, row), float("-inf"))
        _, token = first_largest(scores, tokens)
        tl.store(best_ptr + row * num_chunks + chunk, tl.max(tl.where(tokens == token, x, float("-inf")), axis=0))
        tl.store(token_ptr + row * num_chunks + chunk, token)
