"""The kernel for tokens that are appended to a ring: decodes, verify rows, and moves of a state to another slot."""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .row_functions import Gates, Slots, channel_gates, read_state, token_beta, token_gates, write_state


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "max_append"])
def _append_kernel(
    mixed_ptr,  # [num_tokens, 2 HK K + HV V]
    gate_ptr,  # see `Gates`
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,  # [HV], or None
    erase_read_ptr,  # [num_tokens, HV, K], or None, as the next one
    erase_write_ptr,
    out_ptr,  # [num_tokens, HV, V]
    state_ptr,  # see `Slots`
    state_scale_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_g_ptr,
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    read_slots_ptr,  # [num_seqs], like the next two arguments
    write_slots_ptr,
    cursors_ptr,
    num_tokens,
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
    stride_state_slot,
    stride_state_scale_slot,
    stride_ring_k_slot,
    stride_ring_u_slot,
    stride_ring_g_slot,
    HV: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_FIRST: tl.constexpr,  # columns of mixed where q, k and v begin
    K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RING: tl.constexpr,  # a power of two, at least the entries of a ring
    CHANNELS: tl.constexpr,  # whether each channel of a key has a decay
    RANK: tl.constexpr,  # entries of a token in the ring, 2 with erase vectors
):
    """Append one sequence's tokens, for one value head and columns of V a program; set rows of no sequence to 0.

    S is read once. With the entries (k_j, u_j, g_j) of the ring, S k = exp(G) S0 k + sum_j exp(G - G_j) (k_j k) u_j; S
    q likewise. Only a step that moves to another slot adds the entries to S and writes it. Decays of channels multiply
    S and the keys of the entries in registers.
    """
    wait_for_inputs()
    seq = tl.program_id(0)
    head = tl.program_id(1)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k, mask_v = offs_k < K, offs_v < V
    first = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    out_ptrs = out_ptr + head * V + offs_v
    if seq == num_seqs:
        for token in range(first, num_tokens):
            tl.store(out_ptrs + token * HV * V, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask_v)
        return
    length = (tl.load(cu_seqlens_q_ptr + seq + 1) - first).to(tl.int32)
    if (length == 0) | (length > max_append):
        return
    gates = Gates(
        *(gate_ptr, b_ptr, A_log_ptr, dt_bias_ptr, stride_gate_token, stride_b_token),
        *(beta_scale, least, most, lower_bound),
    )
    slots = Slots(
        *(state_ptr, state_scale_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr),
        *(stride_state_slot, stride_state_scale_slot),
        *(stride_ring_k_slot, stride_ring_u_slot, stride_ring_g_slot),
    )
    read_slot = tl.load(read_slots_ptr + seq).to(tl.int64)
    write_slot = tl.load(write_slots_ptr + seq).to(tl.int64)
    cursor = tl.load(cursors_ptr + seq)
    is_moved = write_slot != read_slot
    added = tl.where(is_moved, cursor, 0)
    S = read_state(slots, read_slot, added, head, offs_k, offs_v, HV, HK, K, V, CHANNELS, RANK)
    if is_moved:
        write_state(slots, write_slot, S, head, offs_k, offs_v, K, V)
        cursor = 0
    key_head = head // (HV // HK)
    # Several programs compute the same k and g; one of them stores each.
    is_first = tl.program_id(2) == 0
    is_first_head = is_first & (head % (HV // HK) == 0)
    k_ptrs = ring_k_ptr + write_slot * stride_ring_k_slot + key_head * K + offs_k
    u_ptrs = ring_u_ptr + write_slot * stride_ring_u_slot + head * V + offs_v
    g_ptr = ring_g_ptr + write_slot * stride_ring_g_slot + head
    entries = tl.arange(0, RING)
    valid = entries < cursor * RANK
    keys = tl.load(k_ptrs[:, None] + entries[None, :] * HK * K, mask_k[:, None] & valid[None, :], other=0.0)
    us = tl.load(u_ptrs[None, :] + entries[:, None] * HV * V, mask_v[None, :] & valid[:, None], other=0.0)
    if CHANNELS:
        g_ptrs = ring_g_ptr + write_slot * stride_ring_g_slot + head * K + offs_k
        # The last entry of a token stands for the next token's gates.
        later = (entries // RANK + 1)[None, :]
        is_last = (entries % RANK == RANK - 1)[None, :] & (later < cursor)
        g_of_later = tl.load(g_ptrs[:, None] + later * HV * K, is_last & mask_k[:, None], other=0.0)
        g_of_first = tl.load(g_ptrs, mask_k & (cursor > 0), other=0.0)
        keys *= tl.exp(tl.cumsum(g_of_later, axis=1, reverse=True))
        S *= tl.exp(g_of_first + tl.sum(g_of_later, axis=1))[:, None]
        rest = tl.full([RING], 1.0, tl.float32)
        rest_of_S = 1.0
    else:
        g_of_entries = tl.load(g_ptr + entries * HV, valid, other=0.0)
        # Decay of each entry and of S: add up the gates of later tokens, because differences of long sums are less
        # exact.
        is_later = entries[None, :] > entries[:, None]
        rest = tl.exp(tl.sum(tl.where(is_later, g_of_entries[None, :], 0.0), axis=1))
        rest_of_S = tl.exp(tl.sum(g_of_entries, axis=0))
    for index in range(length):
        token = first + index
        row_ptr = mixed_ptr + token * stride_mixed_token
        q = tl.load(row_ptr + Q_FIRST + key_head * K + offs_k, mask_k, other=0.0).to(tl.float32)
        k = tl.load(row_ptr + K_FIRST + key_head * K + offs_k, mask_k, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + V_FIRST + head * V + offs_v, mask_v, other=0.0).to(tl.float32)
        if CHANNELS:
            g = channel_gates(gates, token, head, offs_k, mask_k, K)
            decay = tl.exp(g)
            if erase_read_ptr is not None:
                read_ptrs = erase_read_ptr + token * stride_erase_read_token + head * K + offs_k
                write_ptrs = erase_write_ptr + token * stride_erase_write_token + head * K + offs_k
                read = tl.load(read_ptrs, mask_k, other=0.0).to(tl.float32)
                write = tl.load(write_ptrs, mask_k, other=0.0).to(tl.float32)
                by_read = tl.sum(keys * read[:, None], axis=0)
                removed = tl.sum(S * read[:, None], axis=0) + tl.sum(by_read[:, None] * us, axis=0)
            S *= decay[:, None]
            keys *= decay[:, None]
        else:
            dt, g, beta = token_gates(gates, token, head, True)
            decay = tl.exp(g)
            rest *= decay
            rest_of_S *= decay
        if b_ptr is not None:
            if CHANNELS:
                beta = token_beta(gates, token, head, True)
            q *= scale / tl.sqrt(tl.sum(q * q, axis=0) + eps)
            k /= tl.sqrt(tl.sum(k * k, axis=0) + eps)
            by_k = rest * tl.sum(keys * k[:, None], axis=0)
            seen = rest_of_S * tl.sum(S * k[:, None], axis=0) + tl.sum(by_k[:, None] * us, axis=0)
            u = beta * (v - seen)
        elif CHANNELS:
            u = v
        else:
            u = dt * v
        by_q = rest * tl.sum(keys * q[:, None], axis=0)
        out = rest_of_S * tl.sum(S * q[:, None], axis=0) + tl.sum(by_q[:, None] * us, axis=0)
        out += tl.sum(q * k, axis=0) * u
        if D_ptr is not None:
            out += tl.load(D_ptr + head).to(tl.float32) * v
        entry = (cursor + index) * RANK + (RANK - 1)
        if erase_read_ptr is not None:
            out += tl.sum(q * write, axis=0) * removed
            tl.store(k_ptrs + (entry - 1) * HK * K, write, mask_k & is_first_head)
            tl.store(u_ptrs + (entry - 1) * HV * V, removed, mask_v)
            keys = tl.where((entries == entry - 1)[None, :], write[:, None], keys)
            us = tl.where((entries == entry - 1)[:, None], removed[None, :], us)
        tl.store(out_ptrs + token * HV * V, out.to(out_ptr.dtype.element_ty), mask_v)
        tl.store(k_ptrs + entry * HK * K, k, mask_k & is_first_head)
        tl.store(u_ptrs + entry * HV * V, u, mask_v)
        if CHANNELS:
            tl.store(g_ptrs + (cursor + index) * HV * K, g, mask_k & is_first)
        else:
            tl.store(g_ptr + entry * HV, g, is_first)
        keys = tl.where((entries == entry)[None, :], k[:, None], keys)
        us = tl.where((entries == entry)[:, None], u[None, :], us)
        if not CHANNELS:
            rest = tl.where(entries == entry, 1.0, rest)
