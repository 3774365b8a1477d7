"""Device functions of recurrent layers: sequences of programs, gates of tokens, states of slots."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import tl, triton
from ..core.dtypes import round_to_int8, store_row_scales


class Gates(NamedTuple):
    """Arguments of a layer that give the gates of its tokens."""

    gate_ptr: Any  # [num_tokens, HV], a or dt; [num_tokens, HV, K] for decays of channels
    b_ptr: Any  # [num_tokens, HV], gated delta rule only, or None
    A_log_ptr: Any  # [HV]
    dt_bias_ptr: Any  # [HV], or [HV, K]
    stride_gate_token: Any
    stride_b_token: Any
    beta_scale: Any
    least: Any
    most: Any
    lower_bound: Any  # smallest logarithm of a decay, or None


class Slots(NamedTuple):
    """The tensors of a `RecurrentState` without `conv`; every slot is contiguous."""

    state_ptr: Any  # [num_slots, HV, V, K]
    state_scale_ptr: Any  # float32 [num_slots, HV, V], or None
    ring_k_ptr: Any  # float32 [num_slots, RANK L, HK, K]
    ring_u_ptr: Any  # float32 [num_slots, RANK L, HV, V]
    ring_g_ptr: Any  # float32 [num_slots, L, HV], or [num_slots, L, HV, K] for decays of channels
    stride_state_slot: Any
    stride_state_scale_slot: Any
    stride_ring_k_slot: Any
    stride_ring_u_slot: Any
    stride_ring_g_slot: Any


@triton.jit
def sequence_of(program, cu_seqlens_q_ptr, num_seqs, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
    """Return the sequence of a program; num_seqs for the rows after the last sequence.

    Sequence i has the programs from cu_seqlens_q[i] // BLOCK + EXTRA i on. A sequence of n tokens has at least n //
    BLOCK + EXTRA programs.
    """
    low = program * 0
    high = low + num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(cu_seqlens_q_ptr + middle) // BLOCK + EXTRA * middle
        low = tl.where(begins <= program, middle, low)
        high = tl.where(begins <= program, high, middle - 1)
    return low


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to float32 rounding. log(y) / (y - 1) keeps digits that y = 1 + exp(x) loses (Higham, 2002)."""
    grown = tl.exp(tl.where(x > 20.0, 0.0, x))
    total = 1.0 + grown
    log = tl.where(total == 1.0, grown, tl.log(total) * (grown / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def token_gates(gates, tokens, head, mask):
    """dt, the logarithm of the decay and beta, of one token or several; 0 outside the mask."""
    bias = tl.load(gates.dt_bias_ptr + head).to(tl.float32)
    raw = tl.load(gates.gate_ptr + tokens * gates.stride_gate_token + head, mask=mask, other=0.0).to(tl.float32)
    dt = softplus(raw + bias)
    dt = tl.where(dt < gates.least, gates.least, dt)  # keeps NaN
    dt = tl.where(mask, tl.where(dt > gates.most, gates.most, dt), 0.0)
    g = -dt * tl.exp(tl.load(gates.A_log_ptr + head).to(tl.float32))
    if gates.lower_bound is not None:
        g = tl.where(mask, bounded_log_decay(gates, raw + bias, head), 0.0)
    beta = dt
    if gates.b_ptr is not None:
        beta = token_beta(gates, tokens, head, mask)
    return dt, g, beta


@triton.jit
def token_beta(gates, tokens, head, mask):
    """beta of one token or several; 0 outside the mask."""
    b = tl.load(gates.b_ptr + tokens * gates.stride_b_token + head, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, gates.beta_scale / (1.0 + tl.exp(-b)), 0.0)


@triton.jit
def bounded_log_decay(gates, x, head):
    """lower_bound sigmoid(exp(A_log) x)."""
    rate = tl.exp(tl.load(gates.A_log_ptr + head).to(tl.float32))
    return gates.lower_bound / (1.0 + tl.exp(-rate * x))


@triton.jit
def channel_gates(gates, tokens, head, channels, mask, K: tl.constexpr):
    """The logarithm of each channel's decay; 0 outside the mask. tokens, channels and mask broadcast to one shape."""
    columns = head * K + channels
    bias = tl.load(gates.dt_bias_ptr + columns, channels < K, other=0.0).to(tl.float32)
    raw = tl.load(gates.gate_ptr + tokens * gates.stride_gate_token + columns, mask, other=0.0).to(tl.float32)
    if gates.lower_bound is not None:
        g = bounded_log_decay(gates, raw + bias, head)
    else:
        g = -softplus(raw + bias) * tl.exp(tl.load(gates.A_log_ptr + head).to(tl.float32))
    return tl.where(mask, g, 0.0)


@triton.jit
def state_offsets(head, offs_k, offs_v, K: tl.constexpr, V: tl.constexpr):
    """Offsets of S^T [K, V] of a head within a slot."""
    return (head * V + offs_v[None, :]) * K + offs_k[:, None]


@triton.jit
def read_state(
    slots,
    slot,
    cursor,
    head,
    offs_k,
    offs_v,
    HV: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHANNELS: tl.constexpr,
    RANK: tl.constexpr,
):
    """S^T [BLOCK_K, BLOCK_V] of a head after `cursor` tokens of the slot's ring; 0 for slot -1, whose cursor is 0."""
    key_head = head // (HV // HK)
    mask_k, mask_v = offs_k < K, offs_v < V
    mask = mask_k[:, None] & mask_v[None, :] & (slot >= 0)
    S = tl.load(
        slots.state_ptr + slot * slots.stride_state_slot + state_offsets(head, offs_k, offs_v, K, V), mask, other=0.0
    ).to(tl.float32)
    if slots.state_scale_ptr is not None:
        scale_ptrs = slots.state_scale_ptr + slot * slots.stride_state_scale_slot + head * V + offs_v
        S *= tl.load(scale_ptrs, mask_v & (slot >= 0), other=0.0)[None, :]
    k_ptrs = slots.ring_k_ptr + slot * slots.stride_ring_k_slot + key_head * K + offs_k
    u_ptrs = slots.ring_u_ptr + slot * slots.stride_ring_u_slot + head * V + offs_v
    g_ptr = slots.ring_g_ptr + slot * slots.stride_ring_g_slot + head
    # Go from the last entry to the first, which takes one multiplication for each element and entry instead of two.
    grown = tl.zeros_like(S)
    if CHANNELS:
        g_ptrs = slots.ring_g_ptr + slot * slots.stride_ring_g_slot + head * K + offs_k
        rests = tl.full(offs_k.shape, 1.0, tl.float32)
        for index in range(cursor * RANK):
            entry = cursor * RANK - 1 - index
            k = tl.load(k_ptrs + entry * HK * K, mask_k, other=0.0)
            u = tl.load(u_ptrs + entry * HV * V, mask_v, other=0.0)
            grown += (k * rests)[:, None] * u[None, :]
            is_first = entry % RANK == 0
            rests *= tl.exp(tl.load(g_ptrs + entry // RANK * HV * K, mask_k & is_first, other=0.0))
        S = S * rests[:, None] + grown
    else:
        rest = 1.0
        for index in range(cursor):
            entry = cursor - 1 - index
            k = tl.load(k_ptrs + entry * HK * K, mask_k, other=0.0)
            u = tl.load(u_ptrs + entry * HV * V, mask_v, other=0.0)
            grown += k[:, None] * (u * rest)[None, :]
            rest *= tl.exp(tl.load(g_ptr + entry * HV))
        S = S * rest + grown
    return S


@triton.jit
def write_state(slots, slot, S, head, offs_k, offs_v, K: tl.constexpr, V: tl.constexpr):
    """Store S^T [BLOCK_K, BLOCK_V] of a head."""
    mask = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    ptrs = slots.state_ptr + slot * slots.stride_state_slot + state_offsets(head, offs_k, offs_v, K, V)
    if slots.state_scale_ptr is not None:
        scale_ptrs = slots.state_scale_ptr + slot * slots.stride_state_scale_slot + head * V + offs_v
        not_finite = tl.sum(S * 0.0, axis=0)
        inverse = store_row_scales(scale_ptrs, tl.max(tl.abs(S), axis=0), not_finite, offs_v < V, "int8")
        tl.store(ptrs, round_to_int8(S * inverse[None, :]), mask)
    else:
        tl.store(ptrs, S.to(slots.state_ptr.dtype.element_ty), mask)
