"""Numba kernel of the gated delta rule and of Mamba-2: sequences that append to a ring, and scans of prompts.

Sequences that append read S once a token and do not write it. With the entries (k, u, g) of the ring, S k = exp(G) S0 k
+ sum_j exp(G - G_j) (k_j k) u_j; S q likewise. Only a step that moves to another slot adds the entries to S. A scan
moves S to the written slot and updates it there, token by token. A state in bfloat16 or int8 is widened to a thread's
memory first, and rounded when it is written.

A head has one decay, or one for each channel of a key: these multiply the keys of the entries instead of their factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...core.dtypes import SMALLEST
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LOG2_E, softplus

# Numbers of states' dtypes, arguments of the kernel.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ROUNDER = np.float32(12582912)


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
def _beta(b, at, limits):
    return limits[0] / (np.float32(1) + np.exp(-nb.load(b, at)))


@nb.device_function
def _gates(gates, weights, at, head, limits):
    """Return dt, the decay's logarithm and beta of a token."""
    gate, b = gates
    A_log, dt_bias = weights
    gate_at, b_at = at
    dt_min, dt_max, is_corrected = limits[1], limits[2], limits[3]
    raw, beta = nb.load(gate, gate_at) + dt_bias[head], np.float32(0)
    dt = raw if raw > np.float32(20) else np.log1p(np.exp(raw))
    if dt < dt_min:
        dt = dt_min
    if dt > dt_max:
        dt = dt_max
    if is_corrected:
        beta = _beta(b, b_at, limits)
    return dt, -dt * np.exp(A_log[head]), beta


@nb.device_function
def _channel_gates(gate, weights, at, head, limits, memory, logs, decays, K):
    """Write the logarithms of a token's decays to `logs`, and the decays to `decays`."""
    A_log, dt_bias = weights
    lower_bound, is_bounded = limits[4], limits[5]
    rate = np.exp(A_log[head])
    first = head * K
    if is_bounded:
        for i in range(K):
            x = nb.load(gate, at + first + i) + dt_bias[first + i]
            memory[logs + i] = lower_bound / (np.float32(1) + nb.exp2(np.float32(-LOG2_E) * rate * x))
    else:
        for i in range(K):
            memory[logs + i] = -rate * softplus(nb.load(gate, at + first + i) + dt_bias[first + i])
    for i in range(K):
        memory[decays + i] = nb.exp2(np.float32(LOG2_E) * memory[logs + i])


@nb.device_function
def _widen_state(number, state, scales, slot, strides, head, memory, to, K, V):
    """Write a head's S as float32 to memory. number, state, scales: of its dtype, see `_DTYPES`, and addresses."""
    state_step, scale_step = strides
    start, of_scales = slot * state_step + head * V * K, slot * scale_step + head * V
    for v in range(V):
        row, target = start + v * K, to + v * K
        if number == 1:
            _widen(nb.bfloats(state), row, memory, target, K, np.float32(1))
        else:
            scale = nb.floats(scales)[of_scales + v]
            for i in range(K):
                memory[target + i] = np.float32(nb.int8s(state)[row + i]) * scale


@nb.device_function
def _round_state(number, state, scales, slot, strides, head, memory, start, K, V):
    """Round a head's S in memory to a slot, the inverse of `_widen_state`."""
    state_step, scale_step = strides
    to, of_scales = slot * state_step + head * V * K, slot * scale_step + head * V
    for v in range(V):
        row, target = start + v * K, to + v * K
        if number == 1:
            for i in range(K):
                nb.store(nb.bfloats(state), target + i, memory[row + i])
            continue
        largest, not_finite = np.float32(0), np.float32(0)
        for i in range(K):
            largest = max(largest, np.abs(memory[row + i]))
            not_finite += memory[row + i] * np.float32(0)
        nb.floats(scales)[of_scales + v] = largest / np.float32(127) + not_finite
        inverse = np.float32(127) / max(largest, np.float32(SMALLEST))
        for i in range(K):
            # A sum with 1.5 * 2^23 rounds to whole numbers, ties to even, and has them in its low bits.
            sum_of_code = np.float32(memory[row + i] * inverse + _ROUNDER)
            nb.int8s(state)[target + i] = np.int8(sum_of_code.view(np.int32))


@nb.device_function
def _move(state, source, to, u, u_first, u_step, keys, memory, factors, total, count, K, V):
    """Write S after the ring's entries to another slot, or 0 if no slot is read. total: decay of S, K numbers."""
    for v in range(V):
        row = to + v * K
        for i in range(K):
            state[row + i] = state[source + v * K + i] * memory[total + i] if source >= 0 else np.float32(0)
        for entry in range(count):
            factor = memory[factors + entry] * u[u_first + entry * u_step + v]
            for i in range(K):
                state[row + i] += factor * memory[keys + entry * K + i]


@nb.device_function
def _add_entry(memory, key, entry, keys, factors, ring_k, at, K, is_stored):
    """Append a key to the entries in memory, and to the ring at `at` if it `is_stored`."""
    memory[factors + entry] = np.float32(1)
    for i in range(K):
        memory[keys + entry * K + i] = memory[key + i]
    if is_stored:
        _widen(memory, key, ring_k, at, K, np.float32(1))


@nb.device_function
def _scan_token(state, S, memory, places, mixed, v_at, out, to, beta, numbers, K, V):
    """Update S by a token in place and write the output; beta: factor of v (Mamba-2), or beta."""
    q, k, decay, read, write = places
    is_corrected, erases, of_x = numbers
    for v in range(V):
        row = S + v * K
        removed = np.float32(0)
        if erases:
            removed = _product(state, row, memory, read, K)
        x = nb.load(mixed, v_at + v)
        u = x if erases else beta * x
        if is_corrected:
            seen = np.float32(0)
            for i in range(K):
                value = state[row + i] * memory[decay + i]
                state[row + i] = value
                seen += value * memory[k + i]
            u = beta * (x - seen)
        else:
            for i in range(K):
                state[row + i] *= memory[decay + i]
        if erases:
            for i in range(K):
                state[row + i] += removed * memory[write + i]
        result = np.float32(0)
        for i in range(K):
            value = state[row + i] + u * memory[k + i]
            state[row + i] = value
            result += value * memory[q + i]
        nb.store(out, to + v, result + of_x * x)


@nb.device_function
def _run(mixed, gates, weights, D, erase, out, narrow, slots, memory, ids, sizes, strides, numbers, limits):
    """Compute this thread's pairs of a sequence and a value head; set rows of no sequence to 0."""
    state, ring_k, ring_u, ring_g = slots
    number, state_address, scale_address, scale_step = narrow
    erase_read, erase_write = erase
    offsets, starts, read_slots, write_slots, cursors, snapshot_slots, snapshot_lens = ids
    num_tokens, num_seqs, max_append, HV, HK, K, V, ring, q_first, k_first, v_first, has_channels, rank = sizes
    mixed_step, gate_step, b_step, read_step, write_step, state_step, k_step, u_step, g_step = strides
    eps, scale, has_D = numbers
    is_corrected = limits[3]
    erases = rank == 2
    begin, end = nb.share(num_seqs * HV)
    keys = nb.thread_index() * _scratch_size(rank * ring, K, V, number)
    narrow_strides, widened = (state_step, scale_step), keys + _scratch_size(rank * ring, K, V, 0)
    if number:
        state, state_step = memory, np.int64(0)
    q, k = keys + rank * ring * K, keys + (rank * ring + 1) * K
    k_of_S, q_of_S, logs, decays, total, vector = k + K, k + 2 * K, k + 3 * K, k + 4 * K, k + 5 * K, k + 6 * K
    written = vector + K
    factors = written + K
    by_k, by_q, seen = factors + rank * ring, factors + 2 * rank * ring, factors + 3 * rank * ring
    from_state, removed = seen + V, seen + 2 * V
    g_size = HV * K if has_channels else HV
    for item in range(begin, end):
        seq, head = item // HV, item % HV
        key_head, first = head // (HV // HK), np.int64(offsets[seq])
        length = np.int64(offsets[seq + 1]) - first
        if length == 0:
            continue
        read, write, cursor = np.int64(read_slots[seq]), np.int64(write_slots[seq]), np.int64(cursors[seq])
        is_scan = length > max_append
        for i in range(K):
            memory[total + i] = np.float32(1)
        for earlier in range(cursor - 1, -1, -1):
            for other in range(rank * earlier, rank * (earlier + 1)):
                _widen(ring_k, read * k_step + (other * HK + key_head) * K, memory, keys + other * K, K, np.float32(1))
                memory[factors + other] = np.float32(1)
                if has_channels:
                    for i in range(K):
                        memory[keys + other * K + i] *= memory[total + i]
                else:
                    memory[factors + other] = memory[total]
            if has_channels:
                at = read * g_step + earlier * g_size + head * K
                for i in range(K):
                    memory[total + i] *= nb.exp2(np.float32(LOG2_E) * ring_g[at + i])
            else:
                decay = np.exp(ring_g[read * g_step + earlier * g_size + head])
                for i in range(K):
                    memory[total + i] *= decay
        S = write * state_step + head * V * K
        source = read * state_step + head * V * K if read >= 0 else -1
        if number:
            S = widened
            source = widened if read >= 0 else -1
            if read >= 0:
                _widen_state(
                    number, state_address, scale_address, read, narrow_strides, head, memory, widened, K, V
                )  # fmt: skip
        if read != write:
            u_first = read * u_step + head * V
            _move(state, source, S, ring_u, u_first, HV * V, keys, memory, factors, total, rank * cursor, K, V)
            cursor = np.int64(0)
            if number and not is_scan:
                _round_state(
                    number, state_address, scale_address, write, narrow_strides, head, memory, widened, K, V
                )  # fmt: skip
            for i in range(K):
                memory[total + i] = np.float32(1)
        us, k_at = write * u_step + head * V, write * k_step + key_head * K
        is_first_head = head % (HV // HK) == 0
        for index in range(length):
            token, entry = first + index, rank * (cursor + index)
            row = token * mixed_step
            dt = beta = np.float32(1)
            if has_channels:
                _channel_gates(gates[0], weights, token * gate_step, head, limits, memory, logs, decays, K)
                if is_corrected:
                    beta = _beta(gates[1], token * b_step + head, limits)
            else:
                dt, g, beta = _gates(gates, weights, (token * gate_step + head, token * b_step + head), head, limits)
                decay = np.exp(g)
                memory[logs] = g
                for i in range(K):
                    memory[decays + i] = decay
            _widen(mixed, row + q_first + key_head * K, memory, q, K, np.float32(1))
            _widen(mixed, row + k_first + key_head * K, memory, k, K, np.float32(1))
            q_scale = k_scale = np.float32(1)
            if is_corrected:
                q_scale = scale / np.sqrt(_product(memory, q, memory, q, K) + eps)
                k_scale = np.float32(1) / np.sqrt(_product(memory, k, memory, k, K) + eps)
            for i in range(K):
                memory[q + i] *= q_scale
                memory[k + i] *= k_scale
            if erases:
                _widen(erase_read, token * read_step + head * K, memory, vector, K, np.float32(1))
                _widen(erase_write, token * write_step + head * K, memory, written, K, np.float32(1))
            to, v_at = (token * HV + head) * V, row + v_first + head * V
            of_x = D[head] if has_D else np.float32(0)
            if is_scan:
                places, options = (q, k, decays, vector, written), (is_corrected, erases, of_x)
                factor = beta if is_corrected else dt
                _scan_token(state, S, memory, places, mixed, v_at, out, to, factor, options, K, V)
                snapshot = np.int64(snapshot_slots[seq])
                if snapshot >= 0 and np.int64(starts[seq]) + index + 1 == np.int64(snapshot_lens[seq]):
                    if number:
                        _round_state(
                            number, state_address, scale_address, snapshot, narrow_strides, head, memory, widened, K, V
                        )  # fmt: skip
                    else:
                        kept = snapshot * state_step + head * V * K
                        for i in range(V * K):
                            state[kept + i] = state[S + i]
                continue
            own_product = _product(memory, q, memory, k, K)
            own_erased = np.float32(0)
            if erases:
                for i in range(K):
                    memory[k_of_S + i] = memory[total + i] * memory[vector + i]
                for v in range(V):
                    memory[removed + v] = _product(state, S + v * K, memory, k_of_S, K)
                for other in range(entry):
                    by_read = memory[factors + other] * _product(memory, keys + other * K, memory, vector, K)
                    for v in range(V):
                        memory[removed + v] += by_read * ring_u[us + other * HV * V + v]
                own_erased = _product(memory, q, memory, written, K)
            for i in range(K):
                memory[total + i] *= memory[decays + i]
                memory[k_of_S + i] = memory[total + i] * memory[k + i]
                memory[q_of_S + i] = memory[total + i] * memory[q + i]
            for other in range(entry):
                if has_channels:
                    for i in range(K):
                        memory[keys + other * K + i] *= memory[decays + i]
                else:
                    memory[factors + other] *= memory[decays]
                factor = memory[factors + other]
                memory[by_k + other] = factor * _product(memory, keys + other * K, memory, k, K)
                memory[by_q + other] = factor * _product(memory, keys + other * K, memory, q, K)
            for v in range(V):
                memory[from_state + v] = _product(state, S + v * K, memory, q_of_S, K)
                memory[seen + v] = np.float32(0)
                if is_corrected:
                    memory[seen + v] = _product(state, S + v * K, memory, k_of_S, K)
            for other in range(entry):
                u_row, of_k, of_q = us + other * HV * V, memory[by_k + other], memory[by_q + other]
                for v in range(V):
                    u = ring_u[u_row + v]
                    memory[seen + v] += of_k * u
                    memory[from_state + v] += of_q * u
            if erases:
                _add_entry(memory, written, entry, keys, factors, ring_k, k_at + entry * HK * K, K, is_first_head)
                for v in range(V):
                    ring_u[us + entry * HV * V + v] = memory[removed + v]
                    memory[from_state + v] += own_erased * memory[removed + v]
                entry += 1
            u_row = us + entry * HV * V
            for v in range(V):
                x = nb.load(mixed, v_at + v)
                u = beta * (x - memory[seen + v]) if is_corrected else dt * x
                ring_u[u_row + v] = u
                nb.store(out, to + v, memory[from_state + v] + own_product * u + of_x * x)
            _add_entry(memory, k, entry, keys, factors, ring_k, k_at + entry * HK * K, K, is_first_head)
            at = write * g_step + (cursor + index) * g_size
            if has_channels:
                _widen(memory, logs, ring_g, at + head * K, K, np.float32(1))
            else:
                ring_g[at + head] = memory[logs]
        if number and is_scan:
            _round_state(number, state_address, scale_address, write, narrow_strides, head, memory, widened, K, V)
    first, end = nb.share((num_tokens - np.int64(offsets[num_seqs])) * HV * V)
    for i in range(first, end):
        nb.store(out, np.int64(offsets[num_seqs]) * HV * V + i, 0.0)


@nb.device_function
def _scratch_size(entries, K, V, number):
    size = entries * K + 9 * K + 3 * entries + 3 * V
    if number:
        size += K * V  # a state in float32
    return size


@nb.Kernel
def _scan(arguments):
    values = nb.unpack(arguments, 54)
    is_bf16, mixed, gate, b, A_log, dt_bias, D, erase_read, erase_write, out = values[1:11]
    narrow = values[51], values[11], values[52], values[53]
    slots = nb.floats(values[11]), nb.floats(values[12]), nb.floats(values[13]), nb.floats(values[14])
    ids = (
        *(nb.int32s(values[15]), nb.int32s(values[16]), nb.int32s(values[17]), nb.int32s(values[18])),
        *(nb.int32s(values[19]), nb.int32s(values[20]), nb.int32s(values[21])),
    )
    memory, sizes, strides = nb.floats(values[22]), values[23:36], values[36:45]
    numbers = nb.as_float(values[45]), nb.as_float(values[46]), D != 0
    lower_bound = nb.as_float(values[50])
    limits = (
        *(nb.as_float(values[47]), nb.as_float(values[48]), nb.as_float(values[49]), b != 0),
        *(lower_bound, lower_bound != 0),
    )
    weights = nb.floats(A_log), nb.floats(dt_bias)
    shared = narrow, slots, memory, ids, sizes, strides, numbers, limits
    if is_bf16:
        gates, erase = (nb.bfloats(gate), nb.bfloats(b)), (nb.bfloats(erase_read), nb.bfloats(erase_write))
        _run(nb.bfloats(mixed), gates, weights, nb.floats(D), erase, nb.bfloats(out), *shared)
    else:
        gates, erase = (nb.floats(gate), nb.floats(b)), (nb.floats(erase_read), nb.floats(erase_write))
        _run(nb.floats(mixed), gates, weights, nb.floats(D), erase, nb.floats(out), *shared)


def launch_for(dtype: torch.dtype, state_dtype: torch.dtype, fixed: Mapping[str, Any]) -> NumbaLaunch:
    """Return a launch for float32 weights. fixed: arguments of the Triton kernel by name, and L."""
    ring, key_dim, value_dim, rank = fixed["L"], fixed["K"], fixed["V"], fixed["RANK"]
    arguments = (
        *(dtype == torch.bfloat16, "mixed_ptr", "gate_ptr", "b_ptr", "A_log_ptr", "dt_bias_ptr", "D_ptr"),
        *("erase_read_ptr", "erase_write_ptr", "out_ptr", "state_ptr", "ring_k_ptr", "ring_u_ptr", "ring_g_ptr"),
        *("cu_seqlens_q_ptr", "starts_ptr", "read_slots_ptr", "write_slots_ptr", "cursors_ptr"),
        *("snapshot_slots_ptr", "snapshot_lens_ptr", SCRATCH),
        *(fixed[name] for name in ("num_tokens", "num_seqs", "max_append", "HV", "HK", "K", "V", "L")),
        *(fixed[name] for name in ("Q_FIRST", "K_FIRST", "V_FIRST", "CHANNELS", "RANK")),
        *(fixed[f"stride_{name}_token"] or 0 for name in ("mixed", "gate", "b", "erase_read", "erase_write")),
        *(fixed[f"stride_{name}_slot"] for name in ("state", "ring_k", "ring_u", "ring_g")),
        *(nb.bits(fixed[name] or 0.0) for name in ("eps", "scale", "beta_scale", "least", "most", "lower_bound")),
        *(_DTYPES[state_dtype], "state_scale_ptr", fixed["stride_state_scale_slot"]),
    )
    work = fixed["num_tokens"] * fixed["HV"] * key_dim * value_dim
    scratch_size = _scratch_size.py_func(rank * ring, key_dim, value_dim, _DTYPES[state_dtype])
    return NumbaLaunch(_scan.address, work, arguments, scratch_size=scratch_size)
