"""The kernel of tokens that are appended to a ring: decodes, verify rows, and the fold of a ring into another slot."""

from __future__ import annotations

from ..common.compat import tl, triton
from ..common.launch import wait_for_inputs
from .row_functions import Gates, Slots, read_state, token_gates, write_state


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "max_append"])
def _append_kernel(
    mixed_ptr,  # [num_tokens, 2 HK K + HV V]
    gate_ptr,  # see `Gates`
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    D_ptr,  # [HV], or None
    out_ptr,  # [num_tokens, HV, V]
    state_ptr,  # see `Slots`
    ring_k_ptr,
    ring_u_ptr,
    ring_g_ptr,
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    read_slots_ptr,  # [num_seqs], as those that follow
    write_slots_ptr,
    cursors_ptr,
    num_tokens,
    num_seqs,
    max_append,
    beta_scale,
    least,
    most,
    eps,
    scale,  # of q
    stride_mixed_token,
    stride_gate_token,
    stride_b_token,
    stride_state_slot,
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
    RING: tl.constexpr,  # at least the entries of a ring
):
    """One sequence, value head and columns of V a program, and one for the rows that no sequence has, which become 0.

    S is read once and stays as it is: with the entries (k_j, u_j, g_j) of the ring, S k = exp(G) S0 k + sum_j
    exp(G - G_j) (k_j k) u_j, likewise S q. Only a step that moves to another slot adds the entries to S and writes it.
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
    gates = Gates(gate_ptr, b_ptr, A_log_ptr, dt_bias_ptr, stride_gate_token, stride_b_token, beta_scale, least, most)
    slots = Slots(
        *(state_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr),
        *(stride_state_slot, stride_ring_k_slot, stride_ring_u_slot, stride_ring_g_slot),
    )
    read_slot = tl.load(read_slots_ptr + seq).to(tl.int64)
    write_slot = tl.load(write_slots_ptr + seq).to(tl.int64)
    cursor = tl.load(cursors_ptr + seq)
    is_moved = write_slot != read_slot
    S = read_state(slots, read_slot, tl.where(is_moved, cursor, 0), head, offs_k, offs_v, HV, HK, K, V)
    if is_moved:
        write_state(slots, write_slot, S, head, offs_k, offs_v, K, V)
        cursor = 0
    key_head = head // (HV // HK)
    # k and g are those of several programs; one of them stores each.
    is_first = tl.program_id(2) == 0
    is_first_head = is_first & (head % (HV // HK) == 0)
    k_ptrs = ring_k_ptr + write_slot * stride_ring_k_slot + key_head * K + offs_k
    u_ptrs = ring_u_ptr + write_slot * stride_ring_u_slot + head * V + offs_v
    g_ptr = ring_g_ptr + write_slot * stride_ring_g_slot + head
    entries = tl.arange(0, RING)
    valid = entries < cursor
    keys = tl.load(k_ptrs[:, None] + entries[None, :] * HK * K, mask_k[:, None] & valid[None, :], other=0.0)
    us = tl.load(u_ptrs[None, :] + entries[:, None] * HV * V, mask_v[None, :] & valid[:, None], other=0.0)
    g_of_entries = tl.load(g_ptr + entries * HV, valid, other=0.0)
    # What is left of each entry, and of S: sums of what came after, no differences of long sums.
    is_later = entries[None, :] > entries[:, None]
    rest = tl.exp(tl.sum(tl.where(is_later, g_of_entries[None, :], 0.0), axis=1))
    rest_of_S = tl.exp(tl.sum(g_of_entries, axis=0))
    for index in range(length):
        token = first + index
        row_ptr = mixed_ptr + token * stride_mixed_token
        q = tl.load(row_ptr + Q_FIRST + key_head * K + offs_k, mask_k, other=0.0).to(tl.float32)
        k = tl.load(row_ptr + K_FIRST + key_head * K + offs_k, mask_k, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + V_FIRST + head * V + offs_v, mask_v, other=0.0).to(tl.float32)
        dt, g, beta = token_gates(gates, token, head, True)
        decay = tl.exp(g)
        rest *= decay
        rest_of_S *= decay
        if b_ptr is not None:
            q *= scale / tl.sqrt(tl.sum(q * q, axis=0) + eps)
            k /= tl.sqrt(tl.sum(k * k, axis=0) + eps)
            by_k = rest * tl.sum(keys * k[:, None], axis=0)
            seen = rest_of_S * tl.sum(S * k[:, None], axis=0) + tl.sum(by_k[:, None] * us, axis=0)
            u = beta * (v - seen)
        else:
            u = dt * v
        by_q = rest * tl.sum(keys * q[:, None], axis=0)
        out = rest_of_S * tl.sum(S * q[:, None], axis=0) + tl.sum(by_q[:, None] * us, axis=0)
        out += tl.sum(q * k, axis=0) * u
        if D_ptr is not None:
            out += tl.load(D_ptr + head).to(tl.float32) * v
        tl.store(out_ptrs + token * HV * V, out.to(out_ptr.dtype.element_ty), mask_v)
        entry = cursor + index
        tl.store(k_ptrs + entry * HK * K, k, mask_k & is_first_head)
        tl.store(u_ptrs + entry * HV * V, u, mask_v)
        tl.store(g_ptr + entry * HV, g, is_first)
        keys = tl.where((entries == entry)[None, :], k[:, None], keys)
        us = tl.where((entries == entry)[:, None], u[None, :], us)
        rest = tl.where(entries == entry, 1.0, rest)
