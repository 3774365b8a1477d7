"""Device functions that the passes over logits share: penalties, scaling, noise, bins and masses of a row's tokens."""

from __future__ import annotations

from ..core.compat import tl, triton

# Bins of a score. A bin spans 1/8; the last one holds all tokens that are 31.875 or more below the best.
NUM_BINS = tl.constexpr(256)
BINS_PER_UNIT = tl.constexpr(8.0)
# The lowest score above the last bin. Noise spans 25.7, so no token of the last bin is ever drawn, nor has it a mass.
FLOOR = tl.constexpr(-31.875 + 2.0**-19)
# A token's mass is a multiple of 2^-42, so the masses of 2^20 tokens fit an int64.
_MASS_ONE = tl.constexpr(2.0**42)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _mix32(x):
    """Mix the bits of a number, see `definition.exponential`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(tokens, keys_ptr, row):
    """Noise of a row's tokens: -log of the numbers of `definition.exponential`."""
    low = tl.load(keys_ptr + 2 * row).to(tl.uint32)
    high = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32)
    bits = _mix32(_mix32(tokens.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - u): use its series for small u, where the subtraction loses the last bits of u. Small u decide which
    # token wins.
    series = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * series)))
    return -tl.log(tl.where(u < 0.125, series, -tl.log(1.0 - u)))


@triton.jit
def penalised_logits(
    logits_ptr, table_rows_ptr, counts_ptr, seen_ptr, penalties_ptr, row, tokens, vocab_size, stride_logits_row
):
    """The row's logits in float32 after penalties; -inf beyond the vocabulary."""
    mask = tokens < vocab_size
    x = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
        if table_row >= 0:
            repetition = tl.load(penalties_ptr + 3 * row)
            presence = tl.load(penalties_ptr + 3 * row + 1)
            frequency = tl.load(penalties_ptr + 3 * row + 2)
            seen = tl.load(seen_ptr + table_row * vocab_size + tokens, mask=mask, other=0) != 0
            # Read the counts of seen tokens only, because few memory sectors hold one.
            counts = tl.load(counts_ptr + table_row * vocab_size + tokens, mask=mask & seen, other=0)
            # Use IEEE division: the default division is off by up to 2 units, so ties could differ from a CPU's.
            x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
            x -= tl.minimum(tl.maximum(frequency * counts.to(tl.float32), -LARGEST), LARGEST)
            x -= tl.where(counts > 0, presence, 0.0)
            x = tl.where(x > LARGEST, LARGEST, x)
    return x


@triton.jit
def scaled(x, largest, temperature):
    """(x - largest) / temperature, at most 0."""
    return tl.where(x == float("-inf"), float("-inf"), tl.div_rn(x - largest, temperature))


@triton.jit
def bin_of(z):
    """The bin of a score: 0 for the best token, larger for lower scores."""
    return tl.minimum(-z * BINS_PER_UNIT, NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def mass_of(z):
    """exp(z) as a multiple of 2^-42."""
    return (tl.exp(z) * _MASS_ONE).to(tl.int64)


@triton.jit
def key_of(z):
    """The distance from the best token as an integer with the same order."""
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def row_largest(largest_ptr, row, num_chunks, BLOCK_CHUNKS: tl.constexpr):
    offs = tl.arange(0, BLOCK_CHUNKS)
    return tl.max(tl.load(largest_ptr + row * num_chunks + offs, mask=offs < num_chunks, other=float("-inf")))


@triton.jit
def is_cut(top_k_ptr, top_p_ptr, row, vocab_size):
    """Whether top_k or top_p may leave out tokens."""
    cut = row < 0
    if top_k_ptr is not None:
        cut |= tl.load(top_k_ptr + row) < vocab_size
    if top_p_ptr is not None:
        cut |= tl.load(top_p_ptr + row) < 1.0
    return cut


@triton.jit
def lowest(log_min_p_ptr, row):
    """The lowest z that min_p keeps."""
    minimum = tl.full((), float("-inf"), tl.float32)
    if log_min_p_ptr is not None:
        minimum = tl.load(log_min_p_ptr + row)
    return minimum
