"""The kernel that prepares chunks of a scan whose channels of a key have their own decays (Kimi Team, 2025).

The product of rows i > j of a chunk is sum_c x_i[c] k_j[c] exp(G_i[c] - G_j[c]), with sums G of logarithms. It does
not split into a factor of i and one of j: exp(-G_j) alone can leave float32. At the border between two halves it does:
halve the chunk, the halves, and so on down to single rows. Rows i and j lie in two halves of one block. Then exp(sum of
g after the border up to i) belongs to x_i and exp(sum of g after j up to the border) to k_j. Neither is above 1, and no
difference of sums is taken.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .chunk_kernels import product, unit_triangular_inverse
from .row_functions import Gates, channel_gates, sequence_of, token_beta

# exp(LEAST) is 0 in float32. Smaller logarithms of a decay could be infinite, and 0 times infinity is NaN.
LEAST = tl.constexpr(-1000.0)


@triton.jit
def sums_of(chosen, g):
    """Sums of the rows of a float32 g that the bools `chosen` [row, row of g] tell, exact to float32.

    bfloat16 holds the bools, and three of them hold a float32.
    """
    factors = chosen.to(tl.bfloat16)
    high = g.to(tl.bfloat16)
    rest = g - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(factors, low, tl.dot(factors, middle, tl.dot(factors, high)))


@triton.jit(do_not_specialize=["num_seqs", "max_append"])
def _prepare_channels_kernel(
    mixed_ptr,  # [num_tokens, 2 HK K + HV V]
    gate_ptr,  # see `Gates`
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    erase_read_ptr,  # [num_tokens, HV, K], or None, as the next one
    erase_write_ptr,
    scores_ptr,  # [num_chunks, HV, CHUNK, CHUNK], products of q and k times the decay between them
    w_ptr,  # [num_chunks, HV, CHUNK, K]; the scan subtracts w times the state from u
    u_ptr,  # [num_chunks, HV, CHUNK, V]
    q_ptr,  # [num_chunks, HV, CHUNK, K], q times the decay since the chunk's start
    k_ptr,  # [num_chunks, HV, CHUNK, K], k times the decay until the chunk's end
    decay_ptr,  # float32 [num_chunks, HV, K], decay of the whole chunk
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    starts_ptr,  # [num_seqs]
    num_seqs,
    max_append,
    beta_scale,
    least,
    most,
    lower_bound,
    eps,
    scale,  # factor of q
    stride_mixed_token,
    stride_gate_token,
    stride_b_token,
    stride_erase_read_token,
    stride_erase_write_token,
    HV: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_FIRST: tl.constexpr,  # columns of mixed where q, k and v begin
    K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of q, k and v at once
    RANK: tl.constexpr,  # rows of a token in its chunk
    HALVINGS: tl.constexpr,  # CHUNK is 2 ** HALVINGS
):
    """Prepare one chunk and value head a program.

    With erase vectors a token has two rows: one that erases, with k = erase_write, then one that adds k and v.
    """
    wait_for_inputs()
    TOKENS: tl.constexpr = CHUNK // RANK
    program = tl.program_id(0)
    head = tl.program_id(1)
    seq = sequence_of(program, cu_seqlens_q_ptr, num_seqs, TOKENS, 2)
    if seq == num_seqs:
        return
    begin = tl.load(cu_seqlens_q_ptr + seq)
    length = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    first = (program - begin // TOKENS - 2 * seq) * TOKENS - tl.load(starts_ptr + seq) % TOKENS
    if (length <= max_append) | (first >= length):
        return
    gates = Gates(
        *(gate_ptr, b_ptr, A_log_ptr, dt_bias_ptr, stride_gate_token, stride_b_token),
        *(beta_scale, least, most, lower_bound),
    )
    rows = tl.arange(0, CHUNK)
    index = first + rows // RANK
    mask = (index >= 0) & (index < length)
    tokens = begin.to(tl.int64) + index
    adds = mask & (rows % RANK == RANK - 1)
    decays = mask & (rows % RANK == 0)
    erases = mask & (rows % RANK != RANK - 1)
    key_head = head // (HV // HK)
    row_ptrs = (mixed_ptr + tokens * stride_mixed_token)[:, None]
    if erase_read_ptr is not None:
        read_ptrs = (erase_read_ptr + tokens * stride_erase_read_token)[:, None] + head * K
        write_ptrs = (erase_write_ptr + tokens * stride_erase_write_token)[:, None] + head * K
    columns = tl.arange(0, BLOCK)
    dtype = scores_ptr.dtype.element_ty

    q_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    q_square = tl.zeros([CHUNK], tl.float32)
    k_square = tl.zeros([CHUNK], tl.float32)
    for start in range(0, K, BLOCK):
        channels = (start + columns)[None, :]
        mask_k = channels < K
        of_head = key_head * K + channels
        q = tl.load(row_ptrs + Q_FIRST + of_head, adds[:, None] & mask_k, other=0.0).to(tl.float32)
        k = tl.load(row_ptrs + K_FIRST + of_head, adds[:, None] & mask_k, other=0.0).to(tl.float32)
        g = channel_gates(gates, tokens[:, None], head, channels, decays[:, None] & mask_k, K)
        g = tl.where(g < LEAST, LEAST, g)
        own += tl.sum(q * k, axis=1)
        q_square += tl.sum(q * q, axis=1)
        k_square += tl.sum(k * k, axis=1)
        erase = k
        if erase_read_ptr is not None:
            is_part = erases[:, None] & mask_k
            k += tl.load(write_ptrs + channels, is_part, other=0.0).to(tl.float32)
            erase = -tl.load(read_ptrs + channels, is_part, other=0.0).to(tl.float32)
        for halving in range(HALVINGS):
            block = rows >> halving
            is_second = block % 2 == 1
            is_after = rows[:, None] >= rows[None, :]
            is_chosen = tl.where(is_second[:, None], is_after, ~is_after)
            sums = sums_of((block[:, None] == block[None, :]) & is_chosen, g)
            factor = tl.exp(sums)
            is_pair = is_second[:, None] & (block[:, None] == block[None, :] + 1)
            keys = tl.trans((k * factor).to(dtype))
            zero = tl.zeros([CHUNK, CHUNK], tl.float32)
            q_k += tl.where(is_pair, product((q * factor).to(dtype), keys, zero, PRECISION), 0.0)
            if erase_read_ptr is not None:
                factor = tl.exp(tl.where(is_second[:, None], sums - g, 0.0))
            k_k += tl.where(is_pair, product((erase * factor).to(dtype), keys, zero, PRECISION), 0.0)

    q_scale = tl.where(mask, 1.0, 0.0)
    k_scale = tl.where(mask, 1.0, 0.0)
    beta = tl.where(mask, 1.0, 0.0)
    if b_ptr is not None:
        q_scale = tl.where(mask, scale / tl.sqrt(q_square + eps), 0.0)
        k_scale = tl.where(mask, 1.0 / tl.sqrt(k_square + eps), 0.0)
        beta = token_beta(gates, tokens, head, mask)
    q_k = tl.where(rows[:, None] == rows[None, :], own[:, None], q_k)
    place = program.to(tl.int64) * HV + head
    chunk_rows = place * CHUNK + rows[:, None]
    tl.store(scores_ptr + chunk_rows * CHUNK + rows[None, :], (q_k * q_scale[:, None] * k_scale[None, :]).to(dtype))
    factors = beta
    if b_ptr is not None:
        factors = beta * k_scale
    inverse = unit_triangular_inverse(k_k * factors[:, None] * k_scale[None, :])
    of_v = (inverse * beta[None, :]).to(dtype)
    of_k = (inverse * factors[None, :]).to(dtype)
    zero = tl.zeros([CHUNK, BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        part = (start + columns)[None, :]
        v = tl.load(row_ptrs + V_FIRST + head * V + part, adds[:, None] & (part < V), other=0.0)
        tl.store(u_ptr + chunk_rows * V + part, product(of_v, v, zero, PRECISION).to(dtype), part < V)
    for start in range(0, K, BLOCK):
        channels = (start + columns)[None, :]
        mask_k = channels < K
        of_head = key_head * K + channels
        q = tl.load(row_ptrs + Q_FIRST + of_head, adds[:, None] & mask_k, other=0.0).to(tl.float32)
        k = tl.load(row_ptrs + K_FIRST + of_head, adds[:, None] & mask_k, other=0.0).to(tl.float32)
        g = channel_gates(gates, tokens[:, None], head, channels, decays[:, None] & mask_k, K)
        g = tl.where(g < LEAST, LEAST, g)
        erase = k
        since_start = sums_of(rows[:, None] >= rows[None, :], g)
        before = since_start
        if erase_read_ptr is not None:
            is_part = erases[:, None] & mask_k
            k += tl.load(write_ptrs + channels, is_part, other=0.0).to(tl.float32)
            erase = -tl.load(read_ptrs + channels, is_part, other=0.0).to(tl.float32)
            before = since_start - g
        w = product(of_k, (erase * tl.exp(before)).to(dtype), zero, PRECISION)
        tl.store(w_ptr + chunk_rows * K + channels, w.to(dtype), mask_k)
        tl.store(q_ptr + chunk_rows * K + channels, (q * q_scale[:, None] * tl.exp(since_start)).to(dtype), mask_k)
        until_end = sums_of(rows[:, None] < rows[None, :], g)
        tl.store(k_ptr + chunk_rows * K + channels, (k * k_scale[:, None] * tl.exp(until_end)).to(dtype), mask_k)
        of_chunk = tl.exp(tl.sum(g, axis=0))[None, :]
        tl.store(decay_ptr + place * K + channels, of_chunk, mask_k)
