"""Kernels that scan tokens in chunks (Yang et al., 2024): first all work without states, then the states in order.

A token's row in its chunk is its position modulo CHUNK. So the first and the last chunk may have rows without a token,
whose k, v, beta and logarithm of the decay are 0.
"""

from __future__ import annotations

from ..core.compat import dot, tl, triton
from ..core.launch import wait_for_inputs
from .row_functions import Gates, Slots, read_state, sequence_of, token_gates, write_state


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b. PRECISION applies to float32 operands, see `launches.precision`."""
    return dot(a, b, acc) if PRECISION == "ieee" else tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def diagonal_blocks(a, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The COUNT blocks [SIZE, SIZE] on the diagonal of a matrix."""
    blocks = tl.reshape(a, [COUNT, SIZE, COUNT, SIZE])
    index = tl.arange(0, COUNT)
    on_diagonal = index[:, None, None, None] == index[None, None, :, None]
    return tl.sum(tl.where(on_diagonal, blocks, 0.0), axis=2)


@triton.jit
def merged_inverses(inverses, a, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return the inverses of the COUNT diagonal blocks of I + a with 2 SIZE rows, from the inverses of SIZE rows."""
    half = tl.arange(0, 2)
    is_lower = half[None, :, None, None] == 1
    halves = tl.reshape(inverses, [COUNT, 2, SIZE, SIZE])
    upper, lower = tl.sum(tl.where(is_lower, 0.0, halves), axis=1), tl.sum(tl.where(is_lower, halves, 0.0), axis=1)
    row, column = half[None, :, None, None, None], half[None, None, None, :, None]
    blocks = tl.reshape(diagonal_blocks(a, COUNT, 2 * SIZE), [COUNT, 2, SIZE, 2, SIZE])
    below = tl.sum(tl.sum(tl.where((row == 1) & (column == 0), blocks, 0.0), axis=3), axis=1)
    zero = tl.zeros([COUNT, SIZE, SIZE], tl.float32)
    corner = dot(lower, dot(below, upper, zero), zero)
    on_diagonal = tl.where(row == 0, upper[:, None, :, None, :], lower[:, None, :, None, :])
    off_diagonal = tl.where(row == 1, -corner[:, None, :, None, :], 0.0)
    return tl.reshape(tl.where(row == column, on_diagonal, off_diagonal), [COUNT, 2 * SIZE, 2 * SIZE])


@triton.jit
def unit_triangular_inverse(a):
    """(I + a)^-1 of a float32 [64, 64] a that is strictly lower triangular.

    Diagonal blocks of 16 rows are inverted by forward substitution, all four at once. float32 products give the rest.
    """
    rows = tl.arange(0, 16)
    blocks = diagonal_blocks(a, 4, 16)
    inverses = tl.where((rows[:, None] == rows[None, :])[None, :, :], 1.0, blocks * 0.0)
    for row in range(1, 16):
        is_row = (rows == row)[None, :, None]
        factors = tl.sum(tl.where(is_row, blocks, 0.0), axis=1)
        change = tl.sum(factors[:, :, None] * inverses, axis=1)
        inverses = tl.where(is_row, inverses - change[:, None, :], inverses)
    inverses = merged_inverses(merged_inverses(inverses, a, 2, 16), a, 1, 32)
    return tl.reshape(inverses, [64, 64])


@triton.jit(do_not_specialize=["num_seqs", "max_append"])
def _prepare_chunks_kernel(
    mixed_ptr,  # [num_tokens, 2 HK K + HV V]
    gate_ptr,  # see `Gates`
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    scores_ptr,  # [num_chunks, HV, CHUNK, CHUNK], products of q and k times the decay between them
    w_ptr,  # [num_chunks, HV, CHUNK, K], or None; the scan subtracts w times the state from u
    u_ptr,  # [num_chunks, HV, CHUNK, V], or None
    scales_ptr,  # float32 [num_chunks, HV, 4, CHUNK]: factor of q S, factor of k, dt, decay of the whole chunk
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
):
    """Prepare one chunk and value head a program."""
    wait_for_inputs()
    program = tl.program_id(0)
    head = tl.program_id(1)
    seq = sequence_of(program, cu_seqlens_q_ptr, num_seqs, CHUNK, 2)
    if seq == num_seqs:
        return
    begin = tl.load(cu_seqlens_q_ptr + seq)
    length = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    first = (program - begin // CHUNK - 2 * seq) * CHUNK - tl.load(starts_ptr + seq) % CHUNK
    if (length <= max_append) | (first >= length):
        return
    rows = tl.arange(0, CHUNK)
    mask = (first + rows >= 0) & (first + rows < length)
    tokens = begin.to(tl.int64) + first + rows
    gates = Gates(
        *(gate_ptr, b_ptr, A_log_ptr, dt_bias_ptr, stride_gate_token, stride_b_token),
        *(beta_scale, least, most, lower_bound),
    )
    dt, g, beta = token_gates(gates, tokens, head, mask)
    # Differences of float32 sums near -1,000 would be off by 6e-5. So each sum is a pair of float32, as exact as
    # float64.
    sums = tl.cumsum(g.to(tl.float64), axis=0)
    high = sums.to(tl.float32)
    low = (sums - high).to(tl.float32)
    last = tl.sum(tl.where(rows == CHUNK - 1, sums, 0.0), axis=0)
    is_lower = rows[:, None] >= rows[None, :]
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.where(is_lower, tl.exp(tl.where(is_lower, between, 0.0)), 0.0)

    key_head = head // (HV // HK)
    row_ptrs = mixed_ptr + tokens[:, None] * stride_mixed_token
    columns = tl.arange(0, BLOCK)
    q_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    k_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    q_square = tl.zeros([CHUNK], tl.float32)
    k_square = tl.zeros([CHUNK], tl.float32)
    for start in range(0, K, BLOCK):
        part = key_head * K + start + columns
        part_mask = mask[:, None] & (start + columns < K)[None, :]
        q = tl.load(row_ptrs + Q_FIRST + part[None, :], part_mask, other=0.0)
        k = tl.load(row_ptrs + K_FIRST + part[None, :], part_mask, other=0.0)
        k_transposed = tl.trans(k)
        q_k = product(q, k_transposed, q_k, PRECISION)
        if b_ptr is not None:
            k_k = product(k, k_transposed, k_k, PRECISION)
            q_square += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
            k_square += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
    q_scale = tl.where(mask, 1.0, 0.0)
    k_scale = tl.where(mask, 1.0, 0.0)
    if b_ptr is not None:
        # Rows without a token have the length 0, which nothing divides if eps is 0.
        q_scale = tl.where(mask, scale / tl.sqrt(q_square + eps), 0.0)
        k_scale = tl.where(mask, 1.0 / tl.sqrt(k_square + eps), 0.0)

    place = program.to(tl.int64) * HV + head
    dtype = scores_ptr.dtype.element_ty
    scores_ptrs = scores_ptr + (place * CHUNK + rows[:, None]) * CHUNK + rows[None, :]
    tl.store(scores_ptrs, (q_k * q_scale[:, None] * k_scale[None, :] * decay).to(dtype))
    scales_ptrs = scales_ptr + place * 4 * CHUNK + rows
    tl.store(scales_ptrs, tl.exp(high) * q_scale)
    tl.store(scales_ptrs + CHUNK, tl.exp((last - sums).to(tl.float32)) * k_scale)
    tl.store(scales_ptrs + 2 * CHUNK, dt)
    tl.store(scales_ptrs + 3 * CHUNK, tl.exp(tl.where(rows >= 0, last.to(tl.float32), 0.0)))
    if b_ptr is not None:
        factors = (beta * k_scale)[:, None] * k_scale[None, :]
        inverse = unit_triangular_inverse(tl.where(rows[:, None] > rows[None, :], factors * k_k * decay, 0.0))
        of_v = (inverse * beta[None, :]).to(dtype)
        of_k = (inverse * (beta * tl.exp(high) * k_scale)[None, :]).to(dtype)
        zero = tl.zeros([CHUNK, BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            part = start + columns
            part_mask = mask[:, None] & (part < V)[None, :]
            v = tl.load(row_ptrs + V_FIRST + head * V + part[None, :], part_mask, other=0.0)
            u_ptrs = u_ptr + (place * CHUNK + rows[:, None]) * V + part[None, :]
            tl.store(u_ptrs, product(of_v, v, zero, PRECISION).to(dtype), (part < V)[None, :])
        for start in range(0, K, BLOCK):
            part = start + columns
            part_mask = mask[:, None] & (part < K)[None, :]
            k = tl.load(row_ptrs + K_FIRST + key_head * K + part[None, :], part_mask, other=0.0)
            w_ptrs = w_ptr + (place * CHUNK + rows[:, None]) * K + part[None, :]
            tl.store(w_ptrs, product(of_k, k, zero, PRECISION).to(dtype), (part < K)[None, :])


@triton.jit(do_not_specialize=["max_append"])
def _scan_chunks_kernel(
    mixed_ptr,  # tensors up to scales_ptr: as in `_prepare_chunks_kernel`
    scores_ptr,
    w_ptr,
    u_ptr,
    scales_ptr,
    q_ptr,  # tensors up to decay_ptr: as in `_prepare_channels_kernel`, or None; they replace q, k and scales
    k_ptr,
    decay_ptr,
    D_ptr,  # [HV], or None
    out_ptr,  # [num_tokens, HV, V]
    state_ptr,  # see `Slots`
    state_scale_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_g_ptr,
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    starts_ptr,  # [num_seqs], like the next five arguments
    read_slots_ptr,
    write_slots_ptr,
    cursors_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    max_append,
    stride_mixed_token,
    stride_state_slot,
    stride_state_scale_slot,
    stride_ring_k_slot,
    stride_ring_u_slot,
    stride_ring_g_slot,
    HV: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_FIRST: tl.constexpr,
    K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,  # whether each channel of a key has a decay
    RANK: tl.constexpr,  # rows of a token in its chunk
):
    """Scan one sequence, value head and columns of V a program: its chunks in order, states and outputs in one loop."""
    wait_for_inputs()
    seq = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens_q_ptr + seq)
    length = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    if length <= max_append:
        return
    slots = Slots(
        *(state_ptr, state_scale_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr),
        *(stride_state_slot, stride_state_scale_slot),
        *(stride_ring_k_slot, stride_ring_u_slot, stride_ring_g_slot),
    )
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < K, offs_v < V
    rows = tl.arange(0, CHUNK)
    read_slot = tl.load(read_slots_ptr + seq).to(tl.int64)
    cursor = tl.load(cursors_ptr + seq)
    S = read_state(slots, read_slot, cursor, head, offs_k, offs_v, HV, HK, K, V, CHANNELS, RANK)
    start = tl.load(starts_ptr + seq)
    snapshot_slot = tl.load(snapshot_slots_ptr + seq).to(tl.int64)
    snapshot_len = tl.load(snapshot_lens_ptr + seq)
    key_head = head // (HV // HK)
    dtype = mixed_ptr.dtype.element_ty
    TOKENS: tl.constexpr = CHUNK // RANK
    num_chunks = (start % TOKENS + length + TOKENS - 1) // TOKENS
    for chunk in range(num_chunks):
        first = chunk * TOKENS - start % TOKENS
        index = first + rows // RANK
        mask = (index >= 0) & (index < length)
        tokens = begin.to(tl.int64) + first + rows // RANK
        place = (begin // TOKENS + 2 * seq + chunk).to(tl.int64) * HV + head
        row_ptrs = mixed_ptr + tokens * stride_mixed_token
        # Load k transposed: products of transposed registers were wrong on Hopper (flash-linear-attention 826).
        if CHANNELS:
            q = tl.load(q_ptr + (place * CHUNK + rows[:, None]) * K + offs_k[None, :], mask_k[None, :], other=0.0)
            k = tl.load(k_ptr + (place * CHUNK + rows[None, :]) * K + offs_k[:, None], mask_k[:, None], other=0.0)
        else:
            columns = key_head * K + offs_k
            q = tl.load(row_ptrs[:, None] + Q_FIRST + columns[None, :], mask[:, None] & mask_k[None, :], other=0.0)
            k = tl.load(row_ptrs[None, :] + K_FIRST + columns[:, None], mask[None, :] & mask_k[:, None], other=0.0)
            scales_ptrs = scales_ptr + place * 4 * CHUNK + rows
        chunk_rows = place * CHUNK + rows[:, None]
        operand = S.to(dtype)
        zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        if u_ptr is not None:
            w = tl.load(w_ptr + chunk_rows * K + offs_k[None, :], mask_k[None, :], other=0.0)
            u = tl.load(u_ptr + chunk_rows * V + offs_v[None, :], mask_v[None, :], other=0.0)
            values = u.to(tl.float32) - product(w, operand, zero, PRECISION)
        else:
            v_ptrs = row_ptrs[:, None] + V_FIRST + head * V + offs_v[None, :]
            v = tl.load(v_ptrs, mask[:, None] & mask_v[None, :], other=0.0).to(tl.float32)
            values = v * tl.load(scales_ptrs + 2 * CHUNK)[:, None]
        scores = tl.load(scores_ptr + chunk_rows * CHUNK + rows[None, :])
        out = product(q, operand, zero, PRECISION)
        if not CHANNELS:
            out *= tl.load(scales_ptrs)[:, None]
        out = product(scores, values.to(dtype), out, PRECISION)
        if D_ptr is not None:
            out += tl.load(D_ptr + head).to(tl.float32) * v
        out_ptrs = out_ptr + (tokens[:, None] * HV + head) * V + offs_v[None, :]
        is_output = mask & (rows % RANK == RANK - 1)
        tl.store(out_ptrs, out.to(dtype), is_output[:, None] & mask_v[None, :])
        if CHANNELS:
            weighted = values
            faded = S * tl.load(decay_ptr + place * K + offs_k, mask_k, other=0.0)[:, None]
        else:
            weighted = values * tl.load(scales_ptrs + CHUNK)[:, None]
            faded = S * tl.load(scales_ptr + (place * 4 + 3) * CHUNK)
        S = product(k, weighted.to(dtype), faded, PRECISION)
        if (snapshot_slot >= 0) & (start + first + TOKENS == snapshot_len):
            write_state(slots, snapshot_slot, S, head, offs_k, offs_v, K, V)
    write_state(slots, tl.load(write_slots_ptr + seq).to(tl.int64), S, head, offs_k, offs_v, K, V)
