"""The kernel that writes pooled entries: pool the rows of a token's pool, normalise, rotate, round, write."""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.dtypes import SMALLEST, cast_to_cache, encode_nvfp4
from ..core.launch import wait_for_inputs
from .latent_cache import MXFP8_GROUP, RECORD_CODES, RECORD_GROUP
from .write import slot_offset

# A chunk of a pool is a tile of rows. With 4 warps, 4,096 values and as many gates are 64 registers of a thread.
TILE_SIZE = 4096
NUM_WARPS = 4
_SMALLEST = tl.constexpr(SMALLEST)
_CODES = tl.constexpr(RECORD_CODES)
_GROUP = tl.constexpr(RECORD_GROUP)
_MXFP8_GROUP = tl.constexpr(MXFP8_GROUP)


@triton.jit(do_not_specialize=["num_seqs", "stride_table_seq"])
def _pooled_entries_kernel(
    row_ptr,  # [num_blocks, ROW_BLOCK_SIZE, row size]: value and gate, with a half for each pool if pools overlap
    bias_ptr,  # [POOL_SIZE, HEAD_DIM, or twice that if pools overlap], or None for means
    weight_ptr,  # [HEAD_DIM], or None
    row_slots_ptr,  # int64 [num_tokens]
    entry_slots_ptr,  # int64 [num_tokens]
    positions_ptr,  # int64 [num_tokens], or None without rotation and overlap
    row_table_ptr,  # int32 [num_seqs, blocks] of row_ptr, or None if pools do not overlap
    cu_seqlens_q_ptr,  # int32 [num_seqs + 1], or None
    cos_sin_ptr,  # float32 [max_position, ROTARY_DIM], or None
    entry_ptr,  # [num_blocks, ENTRY_BLOCK_SIZE, size]
    rope_ptr,  # bfloat16 part of records [num_blocks, ENTRY_BLOCK_SIZE, 64], or None
    scale_ptr,  # scales of entries in 8 bits, or None
    num_seqs,
    eps,
    stride_table_seq,
    stride_row_block,
    stride_row_slot,
    stride_bias_position,
    stride_cos_sin_position,
    stride_entry_block,
    stride_entry_slot,
    stride_rope_block,
    stride_rope_slot,
    stride_scale_block,
    stride_scale_slot,
    POOL_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FIRST_ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROW_BLOCK_SIZE: tl.constexpr,  # a multiple of POOL_SIZE, or rows of a ring
    ENTRY_BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,  # "", "index", "record" or "mxfp8"
    NATIVE_FP8: tl.constexpr,
    IN_RINGS: tl.constexpr,  # whether a pool may begin at the end of its block
):
    """Write the entry of the pool that one token closes, if it closes one."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    row_slot, entry_slot = tl.load(row_slots_ptr + token), tl.load(entry_slots_ptr + token)
    if (row_slot < 0) | (entry_slot < 0) | (entry_slot % POOL_SIZE != POOL_SIZE - 1):
        return
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    largest = tl.full([DIM_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([DIM_PADDED], tl.float32)
    entry = tl.zeros([DIM_PADDED], tl.float32)
    first = row_slot - POOL_SIZE + 1
    first_row = slot_offset(first, stride_row_block, stride_row_slot, ROW_BLOCK_SIZE)
    # Rows of an entry, and the row of the pool's first position among them.
    NUM_ROWS: tl.constexpr = 2 * POOL_SIZE if row_table_ptr is not None else POOL_SIZE
    OWN: tl.constexpr = NUM_ROWS - POOL_SIZE
    GATES: tl.constexpr = 2 * HEAD_DIM if row_table_ptr is not None else HEAD_DIM
    row_before = first_row
    num_absent = 0
    if row_table_ptr is not None:
        position = tl.load(positions_ptr + token) - POOL_SIZE + 1
        num_absent = tl.where(position > 0, 0, OWN)
        row_before -= OWN * stride_row_slot
        if (first % ROW_BLOCK_SIZE == 0) & (position > 0):
            seq = sequence_of_token(token, cu_seqlens_q_ptr, num_seqs)
            column = position // ROW_BLOCK_SIZE - 1
            block = tl.load(row_table_ptr + seq * stride_table_seq + column).to(tl.int64)
            row_before = block * stride_row_block + (ROW_BLOCK_SIZE - OWN) * stride_row_slot
    for start in range(0, NUM_ROWS, CHUNK):
        offs_p = start + tl.arange(0, CHUNK)
        in_pool = (offs_p >= num_absent) & (offs_p < NUM_ROWS)
        mask = in_pool[:, None] & in_dim[None, :]
        is_before = offs_p < OWN
        rows = tl.where(is_before, row_before, first_row) + (offs_p - tl.where(is_before, 0, OWN)) * stride_row_slot
        if IN_RINGS:
            in_block = (row_slot % ROW_BLOCK_SIZE - POOL_SIZE + 1 + ROW_BLOCK_SIZE + offs_p) % ROW_BLOCK_SIZE
            rows = row_slot // ROW_BLOCK_SIZE * stride_row_block + in_block * stride_row_slot
        # The half of a row that its own pool takes is the second.
        columns = offs_d[None, :]
        if row_table_ptr is not None:
            columns = columns + tl.where(is_before, 0, HEAD_DIM)[:, None]
        row_ptrs = row_ptr + rows[:, None] + columns
        values = tl.load(row_ptrs, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            gates = tl.load(row_ptrs + GATES, mask=mask, other=0.0).to(tl.float32)
            bias_ptrs = bias_ptr + (offs_p % POOL_SIZE)[:, None] * stride_bias_position + columns
            gates += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
            gates = tl.where(in_pool[:, None], gates, float("-inf"))
            entry, largest, total = add_to_softmax(entry, largest, total, values, gates)
        else:
            entry += tl.sum(values, 0)
    if bias_ptr is not None:
        entry = entry / total
    else:
        entry = entry / POOL_SIZE
    if ROTARY_DIM > 0:
        cos_sin_ptr += (tl.load(positions_ptr + token) - POOL_SIZE + 1) * stride_cos_sin_position
    slot = entry_slot // POOL_SIZE
    entry_ptr += slot_offset(slot, stride_entry_block, stride_entry_slot, ENTRY_BLOCK_SIZE)
    if rope_ptr is not None:
        rope_ptr += slot_offset(slot, stride_rope_block, stride_rope_slot, ENTRY_BLOCK_SIZE)
    if KIND != "":
        scale_ptr += slot_offset(slot, stride_scale_block, stride_scale_slot, ENTRY_BLOCK_SIZE)
    store_entry(
        entry, weight_ptr, cos_sin_ptr, entry_ptr, rope_ptr, scale_ptr, eps, HEAD_DIM, DIM_PADDED, ROTARY_DIM,
        FIRST_ROTATED, INTERLEAVED, KIND, NATIVE_FP8,
    )  # fmt: skip


@triton.jit
def sequence_of_token(token, cu_seqlens_q_ptr, num_seqs):
    """Return the sequence of a token, the last one that begins at it or before."""
    low = token * 0
    high = low + num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_behind = tl.load(cu_seqlens_q_ptr + middle) > token
        low = tl.where(is_behind, low, middle)
        high = tl.where(is_behind, middle - 1, high)
    return low


@triton.jit
def add_to_softmax(entry, largest, total, values, gates):
    """Add rows to sums with weights exp(gate - largest), per channel. values, gates: [CHUNK, DIM_PADDED]."""
    new_largest = tl.maximum(largest, tl.max(gates, 0))
    # Without a finite gate until now, all weights are 0: the difference of two infinities would be NaN.
    unit = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    factor = tl.exp(largest - unit)
    weights = tl.exp(gates - unit[None, :])
    entry = entry * factor + tl.sum(weights * values, 0)
    return entry, new_largest, total * factor + tl.sum(weights, 0)


@triton.jit
def store_entry(
    entry,  # float32 [DIM_PADDED]
    weight_ptr,  # [HEAD_DIM], weight of an RMS norm, or None
    cos_sin_ptr,  # float32 [ROTARY_DIM], of the entry's position
    entry_ptr,  # the entry's place in the cache: numbers or codes
    rope_ptr,  # bfloat16 numbers of a record
    scale_ptr,  # scale of a key of an indexer, or scales of a record
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FIRST_ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Normalise (if there is a weight), rotate and store one entry, in float32, rounded once."""
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    entry = tl.where(in_dim, entry, 0.0)
    if weight_ptr is not None:
        root = tl.sqrt(tl.sum(entry * entry, 0) / HEAD_DIM + eps)
        entry = entry / root * tl.load(weight_ptr + offs_d, mask=in_dim, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        place = offs_d - FIRST_ROTATED
        is_rotated = (place >= 0) & (place < ROTARY_DIM)
        if INTERLEAVED:
            is_first, column = place % 2 == 0, place // 2
            partner = tl.where(is_first, offs_d + 1, offs_d - 1)
        else:
            is_first, column = place < HALF, place % HALF
            partner = tl.where(is_first, offs_d + HALF, offs_d - HALF)
        other = tl.gather(entry, tl.where(is_rotated, partner, offs_d), 0)
        cos = tl.load(cos_sin_ptr + column, mask=is_rotated, other=1.0)
        sin = tl.load(cos_sin_ptr + HALF + column, mask=is_rotated, other=0.0)
        entry = tl.where(is_rotated, entry * cos + tl.where(is_first, -other, other) * sin, entry)
    if KIND == "index":
        largest = tl.maximum(tl.max(tl.abs(entry), 0), _SMALLEST)
        not_finite = tl.sum(entry * 0.0, 0)  # NaN if a value is, which codes cannot express
        tl.store(scale_ptr, largest / 448.0 + not_finite)
        codes = cast_to_cache(entry * (448.0 / largest), None, tl.uint8, "e4m3", NATIVE_FP8)
        tl.store(entry_ptr + offs_d, codes, mask=in_dim)
    elif KIND == "nvfp4_record":
        offs_b = tl.arange(0, DIM_PADDED // 2)[None, :]
        zero = tl.zeros([1, 1], tl.int32)
        row = tl.where(offs_d < _CODES, entry, 0.0).reshape(1, DIM_PADDED)
        packed = encode_nvfp4(row, scale_ptr + zero, None, zero == 0, _CODES, NATIVE_FP8)
        tl.store(entry_ptr + offs_b, packed, mask=offs_b < _CODES // 2)
    elif KIND != "":
        GROUP: tl.constexpr = _GROUP if KIND == "record" else _MXFP8_GROUP
        CODES: tl.constexpr = _CODES if KIND == "record" else DIM_PADDED
        groups = entry.reshape(DIM_PADDED // GROUP, GROUP)
        offs_g = tl.arange(0, DIM_PADDED // GROUP)
        not_finite = tl.sum(groups * 0.0, 1)
        largest = tl.maximum(tl.max(tl.abs(groups), 1), _SMALLEST)
        # Round the scale up to a power of two: add one to the exponent unless the mantissa is 0.
        bits = (largest / 448.0).to(tl.int32, bitcast=True)
        exponent = (bits + 0x7FFFFF) >> 23
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scales = tl.where(not_finite == 0.0, exponent, 255).to(tl.uint8)
        tl.store(scale_ptr + offs_g, scales, mask=offs_g < CODES // GROUP)
        codes = cast_to_cache((groups * inverse[:, None]).reshape(DIM_PADDED), None, tl.uint8, "e4m3", NATIVE_FP8)
        tl.store(entry_ptr + offs_d, codes, mask=offs_d < CODES)
    else:
        tl.store(entry_ptr + offs_d, entry.to(entry_ptr.dtype.element_ty), mask=in_dim)
    if rope_ptr is not None:
        tl.store(rope_ptr + offs_d - _CODES, entry.to(tl.bfloat16), mask=in_dim & (offs_d >= _CODES))
