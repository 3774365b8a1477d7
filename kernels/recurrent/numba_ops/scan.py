"""Numba kernel of the gated delta rule and of Mamba-2, for sequences that append to a ring.

S is read once a token and not written: with the entries (k, u, g) of the ring, S k = exp(G) S0 k + sum_j exp(G - G_j)
(k_j k) u_j, likewise S q. Only the step that moves to another slot adds the entries to S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...common.numba_ops import kernel as nb
from ...common.numba_ops.launch import SCRATCH, LoopLaunch


@nb.device_function
def _product(a, start, b, at, size):
    total = np.float32(0)
    for i in range(size):
        total += a[start + i] * b[at + i]
    return total


@nb.device_function
def _widen(x, start, out, to, size, factor):
    for i in range(size):
        out[to + i] = nb.load(x, start + i) * factor


@nb.device_function
def _gates(gates, weights, at, head, limits):
    """dt, the decay's logarithm and beta of a token."""
    gate, b = gates
    A_log, dt_bias = weights
    gate_at, b_at = at
    beta_scale, dt_min, dt_max, is_corrected = limits
    raw, beta = nb.load(gate, gate_at) + dt_bias[head], np.float32(0)
    dt = raw if raw > np.float32(20) else np.log1p(np.exp(raw))
    if dt < dt_min:
        dt = dt_min
    if dt > dt_max:
        dt = dt_max
    if is_corrected:
        beta = beta_scale / (np.float32(1) + np.exp(-nb.load(b, b_at)))
    return dt, -dt * np.exp(A_log[head]), beta


@nb.device_function
def _move(state, source, to, u, u_first, u_step, keys, memory, factors, cursor, state_decay, K, V):
    """Write S after the ring's entries to another slot, or 0 where none is read."""
    for v in range(V):
        row = to + v * K
        for i in range(K):
            state[row + i] = state[source + v * K + i] * state_decay if source >= 0 else np.float32(0)
        for entry in range(cursor):
            factor = memory[factors + entry] * u[u_first + entry * u_step + v]
            for i in range(K):
                state[row + i] += factor * memory[keys + entry * K + i]


@nb.device_function
def _append(mixed, gates, weights, D, out, slots, memory, ids, sizes, strides, numbers, limits):
    """This thread's pairs of a sequence and a value head; rows that no sequence has become 0."""
    state, ring_k, ring_u, ring_g = slots
    offsets, read_slots, write_slots, cursors = ids
    num_tokens, num_seqs, HV, HK, K, V, ring, q_first, k_first, v_first = sizes
    mixed_step, gate_step, b_step, state_step, k_step, u_step, g_step = strides
    eps, scale, has_D = numbers
    is_corrected = limits[3]
    begin, end = nb.share(num_seqs * HV)
    keys = nb.thread_index() * _scratch_size(ring, K, V)
    q, k = keys + ring * K, keys + (ring + 1) * K
    factors = k + K
    of_k, of_q, seen, from_state = factors + ring, factors + 2 * ring, factors + 3 * ring, factors + 3 * ring + V
    for item in range(begin, end):
        seq, head = item // HV, item % HV
        key_head, first = head // (HV // HK), np.int64(offsets[seq])
        length = np.int64(offsets[seq + 1]) - first
        if length == 0:
            continue
        read, write, cursor = np.int64(read_slots[seq]), np.int64(write_slots[seq]), np.int64(cursors[seq])
        state_decay = np.float32(1)
        for other in range(cursor - 1, -1, -1):
            _widen(ring_k, read * k_step + (other * HK + key_head) * K, memory, keys + other * K, K, np.float32(1))
            memory[factors + other] = state_decay
            state_decay *= np.exp(ring_g[read * g_step + other * HV + head])
        S = write * state_step + head * V * K
        if read != write:
            source = read * state_step + head * V * K if read >= 0 else -1
            u_first = read * u_step + head * V
            _move(state, source, S, ring_u, u_first, HV * V, keys, memory, factors, cursor, state_decay, K, V)
            cursor, state_decay = np.int64(0), np.float32(1)
        us = write * u_step + head * V
        for index in range(length):
            token, entry = first + index, cursor + index
            row = token * mixed_step
            dt, g, beta = _gates(gates, weights, (token * gate_step + head, token * b_step + head), head, limits)
            decay = np.exp(g)
            own_key = keys + entry * K
            _widen(mixed, row + q_first + key_head * K, memory, q, K, np.float32(1))
            _widen(mixed, row + k_first + key_head * K, memory, k, K, np.float32(1))
            q_scale = k_scale = np.float32(1)
            if is_corrected:
                q_scale = scale / np.sqrt(_product(memory, q, memory, q, K) + eps)
                k_scale = np.float32(1) / np.sqrt(_product(memory, k, memory, k, K) + eps)
            for i in range(K):
                memory[q + i] *= q_scale
                memory[k + i] *= k_scale
                memory[own_key + i] = memory[k + i]
            state_decay *= decay
            for other in range(entry):
                memory[factors + other] *= decay
                factor = memory[factors + other]
                memory[of_k + other] = factor * _product(memory, keys + other * K, memory, k, K)
                memory[of_q + other] = factor * _product(memory, keys + other * K, memory, q, K)
            memory[factors + entry] = np.float32(1)
            own_product = _product(memory, q, memory, k, K)
            for v in range(V):
                memory[from_state + v] = state_decay * _product(state, S + v * K, memory, q, K)
                memory[seen + v] = np.float32(0)
                if is_corrected:
                    memory[seen + v] = state_decay * _product(state, S + v * K, memory, k, K)
            for other in range(entry):
                u_row, by_k, by_q = us + other * HV * V, memory[of_k + other], memory[of_q + other]
                for v in range(V):
                    u = ring_u[u_row + v]
                    memory[seen + v] += by_k * u
                    memory[from_state + v] += by_q * u
            to, u_row = (token * HV + head) * V, us + entry * HV * V
            of_x = D[head] if has_D else np.float32(0)
            for v in range(V):
                x = nb.load(mixed, row + v_first + head * V + v)
                u = beta * (x - memory[seen + v]) if is_corrected else dt * x
                ring_u[u_row + v] = u
                nb.store(out, to + v, memory[from_state + v] + own_product * u + of_x * x)
            ring_g[write * g_step + entry * HV + head] = g
            if head % (HV // HK) == 0:
                _widen(memory, k, ring_k, write * k_step + (entry * HK + key_head) * K, K, np.float32(1))
    first, end = nb.share((num_tokens - np.int64(offsets[num_seqs])) * HV * V)
    for i in range(first, end):
        nb.store(out, np.int64(offsets[num_seqs]) * HV * V + i, 0.0)


@nb.device_function
def _scratch_size(ring, K, V):
    return ring * K + 2 * K + 3 * ring + 2 * V


@nb.Kernel
def _scan(arguments):
    values = nb.unpack(arguments, 40)
    is_bf16, mixed, gate, b, A_log, dt_bias, D, out = values[1:9]
    slots = nb.floats(values[9]), nb.floats(values[10]), nb.floats(values[11]), nb.floats(values[12])
    ids = nb.int32s(values[13]), nb.int32s(values[14]), nb.int32s(values[15]), nb.int32s(values[16])
    memory, sizes, strides = nb.floats(values[17]), values[18:28], values[28:35]
    numbers = nb.as_float(values[35]), nb.as_float(values[36]), D != 0
    limits = nb.as_float(values[37]), nb.as_float(values[38]), nb.as_float(values[39]), b != 0
    weights = nb.floats(A_log), nb.floats(dt_bias)
    shared = slots, memory, ids, sizes, strides, numbers, limits
    if is_bf16:
        gates = nb.bfloats(gate), nb.bfloats(b)
        _append(nb.bfloats(mixed), gates, weights, nb.floats(D), nb.bfloats(out), *shared)
    else:
        gates = nb.floats(gate), nb.floats(b)
        _append(nb.floats(mixed), gates, weights, nb.floats(D), nb.floats(out), *shared)


def prepare(dtype: torch.dtype, fixed: Mapping[str, Any]) -> LoopLaunch:
    """Return a launch for float32 states and weights; fixed: arguments of the Triton kernel by name, and L."""
    ring, key_dim, value_dim = fixed["L"], fixed["K"], fixed["V"]
    arguments = (
        *(dtype == torch.bfloat16, "mixed_ptr", "gate_ptr", "b_ptr", "A_log_ptr", "dt_bias_ptr", "D_ptr"),
        *("out_ptr", "state_ptr", "ring_k_ptr", "ring_u_ptr", "ring_g_ptr"),
        *("cu_seqlens_q_ptr", "read_slots_ptr", "write_slots_ptr", "cursors_ptr", SCRATCH),
        *(fixed[name] for name in ("num_tokens", "num_seqs", "HV", "HK", "K", "V", "L")),
        *(fixed[name] for name in ("Q_FIRST", "K_FIRST", "V_FIRST")),
        *(fixed[f"stride_{name}_token"] for name in ("mixed", "gate", "b")),
        *(fixed[f"stride_{name}_slot"] for name in ("state", "ring_k", "ring_u", "ring_g")),
        *(nb.bits(fixed[name]) for name in ("eps", "scale", "beta_scale", "least", "most")),
    )
    work = fixed["num_tokens"] * fixed["HV"] * key_dim * value_dim
    return LoopLaunch(_scan.address, work, arguments, scratch_size=_scratch_size.py_func(ring, key_dim, value_dim))
