"""Numba kernel of attention over a window and compressed entries, or over chosen latents.

Each token reads the rows that it sees, in place.

All heads read the same rows. So rows are widened to float32 once for the heads of a token that a thread takes, window
and entries one after another, and then multiplied as in `many_queries`, where a key begins with its value.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ...attention.call import CompressedCall, MlaCall
from .. import kernel as nb
from ..code_vectors import CODES, HAS_FLOAT16, widened
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LANES, LOG2_E, fill, load_e4m3, load_vector, multiply_add, store_vector
from .few_kernels import LEAST_SCALE
from .few_queries import _place_of_key
from .many_queries import KEYS, ROWS, STEP, _multiply, clear_rows, first_sum, log_sum_exp, options_of, place
from .vector_products import attend_block, number_of_format, pack_rows, store, widen, widen_codes

_NVFP4 = CODES["nvfp4"]
_NVFP4_UNIT, _widen_nvfp4 = _NVFP4.unit, widened(_NVFP4)


@nb.device_function
def _widen_record(records, start, floats, to, size):
    """Decode a record that begins at a byte. records: bytes, bfloat16 numbers, and the sizes of its `RecordForm`."""
    codes, rope, num_codes, group_size, codes_per_byte = records
    behind_codes = start + num_codes // codes_per_byte
    zeros, scales = fill(np.float32(0)), behind_codes + 2 * (size - num_codes)
    for i in range(num_codes, size, LANES):
        store_vector(floats, to + i, load_vector(rope, behind_codes // 2 + i - num_codes))
    if codes_per_byte == 2:
        _widen_nvfp4(codes, start, codes, scales, np.float32(_NVFP4_UNIT), num_codes, floats, to)
        return
    for first in range(0, num_codes, group_size):
        exponent = np.int32(codes[scales + first // group_size])
        scale = np.int32(exponent << np.int32(23)).view(np.float32)
        if exponent == np.int32(255):
            scale = np.float32(np.nan)
        for i in range(first, first + group_size, LANES):
            store_vector(floats, to + i, multiply_add(load_e4m3(codes, start + i), fill(scale), zeros))


@nb.device_function
def _attend_keys(memory, areas, options, num_blocks, num_keys, size, v_size, scale):
    """Attend with all blocks of rows over the packed keys, which all rows see."""
    floats, _, ints, _ = memory
    bounds, keys = areas[3], areas[5]
    padded = nb.rounded_up(num_keys, STEP)
    for key in range(num_keys, padded):  # pad the last step with a key that is visible, so never NaN by chance
        for i in range(0, size, LANES):
            store_vector(floats, keys + key * size + i, load_vector(floats, keys + (num_keys - 1) * size + i))
    for block in range(num_blocks):
        for row in range(ROWS):
            at = bounds + block * 2 * ROWS + row
            ints[at], ints[at + ROWS] = np.int32(0), np.int32(num_keys)
        attend_block(memory, areas, options, block, np.int64(0), np.int64(0), padded, size, v_size, size, scale, True)


@nb.device_function
def _rotate_back(floats, sums, half, size, cos_sin, angles, rotary_dim):
    """Rotate the last rotary_dim numbers of 16 rows by the negative angles; pairs are neighbours."""
    zeros = fill(np.float32(0))
    for pair in range(rotary_dim // 2):
        first = sums + place(size - rotary_dim + 2 * pair, half)
        second = sums + place(size - rotary_dim + 2 * pair + 1, half)
        a, b = load_vector(floats, first), load_vector(floats, second)
        cos, sin = cos_sin[angles + pair], cos_sin[angles + rotary_dim // 2 + pair]
        store_vector(floats, first, multiply_add(b, fill(sin), multiply_add(a, fill(cos), zeros)))
        store_vector(floats, second, multiply_add(a, fill(-sin), multiply_add(b, fill(cos), zeros)))


def _attention_by(widen_row: Callable[..., Any]) -> Any:
    """Return a kernel that reads rows of both caches by `widen_row`."""

    @nb.device_function
    def attend_token(
        tensors, ids, memory, areas, options, sizes, strides, scale, seq, token, first_head, end_head
    ):  # fmt: skip
        """Attend with some heads of a token over its window, then over its entries, in one softmax."""
        q, cache, entry_cache, out, cos_sin = tensors
        block_table, entry_table, cu_seqlens_q, seq_lens, indices = ids
        queries, sums, state, _, _, keys, _, _, _, rows, _ = areas
        _, num_tokens, _, _, size, v_size, window, block_size, entry_block_size, pool_size, num_indices = sizes[:11]
        rotary_dim, is_causal = sizes[11:]
        (
            q_token, q_head, block, slot, entry_block, entry_slot, out_token, out_head, table, entries_table,
            indices_token, position_stride,
        ) = strides  # fmt: skip
        floats, _, _, longs = memory
        num_heads = end_head - first_head
        num_blocks = (num_heads + ROWS - 1) // ROWS
        for i in range(num_blocks * ROWS):
            head = min(first_head + i, end_head - 1)  # pad the block with copies of its last row
            at = i // ROWS * 2 * ROWS + i % ROWS
            longs[rows + at] = token * q_token + head * q_head
            longs[rows + at + ROWS] = token * out_token + head * out_head
            floats[state + at], floats[state + at + ROWS] = first_sum(options[0], head)
        for i in range(num_blocks):
            pack_rows(q, memory, rows + i * 2 * ROWS, queries + i * ROWS * size, size)
        for i in range(0, num_blocks * ROWS * v_size, LANES):
            store_vector(floats, sums + i, fill(np.float32(0)))
        end_key = np.int64(seq_lens[seq])
        if is_causal:
            end_key = max(end_key - np.int64(cu_seqlens_q[seq + 1]) + token + 1, np.int64(0))
        num_packed = np.int64(0)
        for key in range(max(end_key - window, 0), end_key):
            start, _ = _place_of_key(block_table, seq * table, key, block_size, block, slot)
            widen_row(cache, start, floats, keys + num_packed * size, size)
            num_packed += 1
            if num_packed == KEYS:
                _attend_keys(memory, areas, options, num_blocks, num_packed, size, v_size, scale)
                num_packed = np.int64(0)
        num_entries = np.int64(0)
        if pool_size > 0:
            num_entries = end_key // pool_size
        num_columns = num_entries
        if num_indices > 0:
            num_columns = num_indices
        for column in range(num_columns):
            entry = np.int64(column)
            if num_indices > 0:
                entry = np.int64(indices[token * indices_token + column])
            if entry < 0 or entry >= num_entries:
                continue
            start, _ = _place_of_key(entry_table, seq * entries_table, entry, entry_block_size, entry_block, entry_slot)
            widen_row(entry_cache, start, floats, keys + num_packed * size, size)
            num_packed += 1
            if num_packed == KEYS:
                _attend_keys(memory, areas, options, num_blocks, num_packed, size, v_size, scale)
                num_packed = np.int64(0)
        if num_packed > 0:
            _attend_keys(memory, areas, options, num_blocks, num_packed, size, v_size, scale)
        angles = max(end_key - 1, 0) * position_stride
        for i in range(num_blocks):
            for row in range(ROWS):
                at = state + i * 2 * ROWS + row
                if options[3] != 0 and i * ROWS + row < num_heads:
                    to = (first_head + i * ROWS + row) * num_tokens + token
                    nb.store(nb.floats(options[3]), to, log_sum_exp(floats[at], floats[at + ROWS]))
                # 0 if no key is visible
                floats[at + ROWS] = np.float32(1) / max(floats[at + ROWS], np.float32(1e-30))
            for half in range(2):
                inverse = load_vector(floats, state + (i * 2 + 1) * ROWS + half * LANES)
                _multiply(floats, sums + i * ROWS * v_size, v_size, half, inverse)
                _rotate_back(floats, sums + i * ROWS * v_size, half, v_size, cos_sin, angles, rotary_dim)
            store(memory, sums + i * ROWS * v_size, out, rows + i * 2 * ROWS + ROWS, v_size)

    @nb.inlined
    def attend(tensors, values):
        """Attend with all tokens; threads get equal shares of tokens and of their heads, in order."""
        tables, lengths = (nb.int32s(values[6]), nb.int32s(values[7])), (nb.int32s(values[8]), nb.int32s(values[9]))
        ids, none = (*tables, *lengths, nb.int32s(values[10])), np.int64(0)
        options = options_of((values[12], none, values[13]), (values[15], none, none))
        scratch = values[14] + nb.thread_index() * values[16] * 4  # in bytes
        memory = nb.floats(scratch), nb.bfloats(scratch), nb.int32s(scratch), nb.int64s(scratch)
        scale, areas, sizes, strides = nb.as_float(values[17]), values[18:29], values[29:42], values[42:54]
        num_seqs, num_tokens, num_heads, heads_at_once, _, v_size = sizes[:6]
        out, cu_seqlens_q = tensors[3], ids[2]
        num_queries = np.int64(cu_seqlens_q[num_seqs])
        if nb.thread_index() == 0:  # one thread clears the rows of no sequence
            clear_rows(
                out, options[3], (none, none), num_queries, num_tokens, num_tokens, num_heads, v_size, strides[6],
                strides[7],
            )  # fmt: skip
        parts = (num_heads + heads_at_once - 1) // heads_at_once
        first, end = nb.share(num_queries * parts)
        seq = np.int64(0)
        for item in range(first, end):
            token, first_head = item // parts, item % parts * heads_at_once
            while token >= cu_seqlens_q[seq + 1]:
                seq += 1
            end_head = min(first_head + heads_at_once, num_heads)
            attend_token(tensors, ids, memory, areas, options, sizes, strides, scale, seq, token, first_head, end_head)

    return attend


@nb.device_function
def _widen_latent(latents, start, floats, to, size):
    """Widen a row of a latent cache: the number of its format, its address, and that of its scale."""
    number, cache, scale = latents
    widen_codes(number, cache, start, scale, 0, 0, floats, to, size)


_attend, _attend_records = _attention_by(widen), _attention_by(_widen_record)
_attend_latents = _attention_by(_widen_latent)


@nb.Kernel
def _compressed_attention(arguments):
    values = nb.unpack(arguments, 54)
    q, cache, entries, out, cos_sin = values[2], values[3], values[4], values[5], nb.floats(values[11])
    if values[1]:
        _attend((nb.bfloats(q), nb.bfloats(cache), nb.bfloats(entries), nb.bfloats(out), cos_sin), values)
    else:
        _attend((nb.floats(q), nb.floats(cache), nb.floats(entries), nb.floats(out), cos_sin), values)


@nb.Kernel
def _compressed_attention_of_records(arguments):
    values = nb.unpack(arguments, 57)
    q, out, cos_sin = values[2], values[5], nb.floats(values[11])
    form = values[54], values[55], values[56]
    records = nb.uint8s(values[3]), nb.bfloats(values[3]), *form
    entries = nb.uint8s(values[4]), nb.bfloats(values[4]), *form
    if values[1]:
        _attend_records((nb.bfloats(q), records, entries, nb.bfloats(out), cos_sin), values)
    else:
        _attend_records((nb.floats(q), records, entries, nb.floats(out), cos_sin), values)


@nb.Kernel
def _chosen_latents(arguments):
    values = nb.unpack(arguments, 56)
    q, out, cos_sin = values[2], values[5], nb.floats(values[11])
    rows = values[54], values[4], values[55]
    if values[1]:
        _attend_latents((nb.bfloats(q), rows, rows, nb.bfloats(out), cos_sin), values)
    else:
        _attend_latents((nb.floats(q), rows, rows, nb.floats(out), cos_sin), values)


def reads(call: CompressedCall) -> bool:
    """Return whether the CPU has the instructions for the rows of a call."""
    form = call.record_form
    return form is None or form.codes_per_byte == 1 or HAS_FLOAT16


def launch_for(call: CompressedCall) -> NumbaLaunch:
    """Return a launch that fills the rows of calls like this one, with the same lengths and checked ids.

    cu_seqlens_q, seq_lens and sinks must be contiguous.
    """
    form, size = call.record_form, call.q.shape[2]
    if form is None:
        return _launch(_compressed_attention, call, size, call.out_strides)
    sizes = form.num_codes, form.group, form.codes_per_byte
    return _launch(_compressed_attention_of_records, call, size, call.out_strides, *sizes)


def launch_for_latents(call: MlaCall) -> NumbaLaunch:
    """Return a launch like `launch_for` for calls of `paged_mla_attention` with indices.

    Chosen latents are entries of one position each, without a window before them.
    """
    assert call.indices is not None
    rows = CompressedCall(
        call.q,
        kv_cache=call.kv_cache,
        entry_cache=call.kv_cache,
        block_table=call.block_table,
        entry_table=call.block_table,
        cu_seqlens_q=call.cu_seqlens_q,
        seq_lens=call.seq_lens,
        max_seqlen_q=call.max_seqlen_q,
        indices=call.indices,
        sinks=call.sinks,
        cos_sin_cache=None,
        softmax_scale=call.softmax_scale,
        sliding_window=0,
        pool_size=1,
        deterministic=call.deterministic,
        return_lse=call.return_lse,
        out=call.out,
    )
    form = number_of_format(call.kv_cache)
    return _launch(_chosen_latents, rows, call.v_head_dim, call.out_strides, form, "k_scale", causal=call.causal)


def _launch(
    kernel: nb.Kernel,
    call: CompressedCall,
    v_size: int,
    out_strides: tuple[int, int],
    *arguments_of_rows: int | str,
    causal: bool = True,
) -> NumbaLaunch:
    """Return a launch of a kernel. arguments_of_rows: those behind the arguments that all kernels take."""
    num_tokens, num_heads, size = call.q.shape
    # With few tokens, threads share the heads of a token; each then widens the token's rows.
    heads_at_once = num_heads
    if num_tokens < 2 * torch.get_num_threads():
        heads_at_once = ROWS
    num_rows = -(-min(heads_at_once, num_heads) // ROWS) * ROWS
    # queries, sums, state, bounds, keys, scores, and two places of 64 bits for each row
    numbers = num_rows * size, num_rows * v_size, num_rows * 2, num_rows * 2, KEYS * size, KEYS * ROWS, num_rows * 4
    *offsets, scratch_size = accumulate(numbers, initial=0)
    queries, sums, state, bounds, keys, scores, rows = offsets
    areas = queries, sums, state, bounds, 0, keys, keys, scores, 0, rows // 2, 0
    entry_block_size = pool_size = entry_block = entry_slot = 0
    num_indices = rotary_dim = 0
    if call.entry_cache is not None:
        entry_block_size, pool_size = call.entry_cache.shape[1], call.pool_size
        entry_block, entry_slot, _ = call.entry_cache.stride()
    if call.indices is not None:
        num_indices = call.indices.shape[1]
    if call.cos_sin_cache is not None:
        rotary_dim = call.cos_sin_cache.shape[1]
    arguments: tuple[int | str, ...] = (
        call.q.dtype == torch.bfloat16,
        *("q", "kv_cache", "entry_cache", "out"),
        *("block_table", "entry_table", "cu_seqlens_q", "seq_lens", "indices"),
        *("cos_sin_cache", "sinks", "lse", SCRATCH),
        call.sinks is not None and call.sinks.dtype == torch.bfloat16,
        scratch_size,
        nb.bits(max(call.softmax_scale * LOG2_E, LEAST_SCALE)),
        *areas,
        len(call.seq_lens),
        num_tokens,
        num_heads,
        heads_at_once,
        size,
        v_size,
        call.sliding_window,
        call.kv_cache.shape[1],
        entry_block_size,
        pool_size,
        num_indices,
        rotary_dim,
        causal,
        *call.q.stride()[:2],
        *call.kv_cache.stride()[:2],
        entry_block,
        entry_slot,
        *out_strides,
        call.block_table.stride(0),
        _stride(call.entry_table),
        _stride(call.indices),
        _stride(call.cos_sin_cache),
        *arguments_of_rows,
    )
    num_products = num_tokens * num_heads * (size + v_size) * (call.sliding_window + num_indices)
    return NumbaLaunch(kernel.address, num_products, arguments, scratch_size=scratch_size)


def _stride(tensor: torch.Tensor | None) -> int:
    """Return the distance between two rows; 0 for None."""
    if tensor is None:
        return 0
    return tensor.stride(0)
