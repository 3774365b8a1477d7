"""Kernels that look for ids out of range on the device, and leave the first one where the host can read it."""

from __future__ import annotations

from .compat import tl, triton
from .launch import wait_for_inputs


@triton.jit
def _record(record_ptr, ticket_ptr, is_wrong, operation, argument, row, column, value, low, high):
    """Store what is wrong, unless there is a record already. The first field, written last, completes the record."""
    if is_wrong:
        is_first = tl.atomic_cas(ticket_ptr, 0, 1) == 0
        tl.store(record_ptr + 1, argument, mask=is_first)
        tl.store(record_ptr + 2, row, mask=is_first)
        tl.store(record_ptr + 3, column, mask=is_first)
        tl.store(record_ptr + 4, value, mask=is_first)
        tl.store(record_ptr + 5, low, mask=is_first)
        tl.store(record_ptr + 6, high, mask=is_first)
        tl.store(record_ptr, operation, mask=is_first)


@triton.jit
def _record_first(record_ptr, ticket_ptr, is_wrong, operation, argument, row, first_column, values, low, high):
    """`_record` of the first lane that is wrong."""
    lanes = tl.arange(0, is_wrong.shape[0])
    first = tl.min(tl.where(is_wrong, lanes, is_wrong.shape[0]), 0)
    value = tl.sum(tl.where(lanes == first, values, 0), 0)
    found = first < is_wrong.shape[0]
    _record(record_ptr, ticket_ptr, found, operation, argument, row, first_column + first, value, low, high)


@triton.jit
def _check_some_ids(
    ids_ptr, num_ids, low, high, argument, operation, record_ptr, ticket_ptr, LANES: tl.constexpr
):  # fmt: skip
    """LANES ids a program; None is no ids."""
    if ids_ptr is not None:
        first = tl.program_id(0).to(tl.int64) * LANES
        offs = first + tl.arange(0, LANES)
        ids = tl.load(ids_ptr + offs, mask=offs < num_ids, other=0).to(tl.int64)
        is_wrong = (offs < num_ids) & ((ids < low) | (ids > high))
        _record_first(record_ptr, ticket_ptr, is_wrong, operation, argument, -1, first, ids, low, high)


_BOUNDS = (
    *("operation", "num_0", "low_0", "high_0"),
    *("num_1", "low_1", "high_1", "num_2", "low_2", "high_2"),
)


@triton.jit(do_not_specialize=_BOUNDS)
def _check_ids_kernel(
    ids_0_ptr,  # [num_0] int32 or int64
    ids_1_ptr,  # [num_1], or None
    ids_2_ptr,  # [num_2], or None
    record_ptr,  # [7] int64
    ticket_ptr,  # [1] int32
    operation,
    num_0,
    low_0,  # the range of ids_0
    high_0,
    num_1,
    low_1,
    high_1,
    num_2,
    low_2,
    high_2,
    LANES: tl.constexpr,
):
    """Up to three arrays of ids, each with a range of its own, LANES ids of each a program."""
    wait_for_inputs()
    _check_some_ids(ids_0_ptr, num_0, low_0, high_0, 0, operation, record_ptr, ticket_ptr, LANES)
    _check_some_ids(ids_1_ptr, num_1, low_1, high_1, 1, operation, record_ptr, ticket_ptr, LANES)
    _check_some_ids(ids_2_ptr, num_2, low_2, high_2, 2, operation, record_ptr, ticket_ptr, LANES)


# What is wrong with sequences: the argument of `_record`, in the order of the checks.
CU_SEQLENS, DESCENDING, TOO_LONG, SEQ_LENS, BLOCK_TABLE = (tl.constexpr(code) for code in range(5))


_SIZES = ("num_tokens", "num_blocks", "block_size", "width", "max_seqlen_q", "left", "chunk_size", "stride_table_seq")


@triton.jit(do_not_specialize=["operation", *_SIZES])
def _check_sequences_kernel(
    block_table_ptr,  # [num_seqs, width] int32
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    record_ptr,  # [7] int64
    ticket_ptr,  # [1] int32
    operation,
    num_tokens,
    num_blocks,
    block_size,
    width,
    max_seqlen_q,
    left,  # keys seen before a query
    chunk_size,  # a query sees keys of its own chunk
    stride_table_seq,
    KEYS_AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One sequence a program: where its queries are, how long it is, and the blocks that its queries read."""
    wait_for_inputs()
    seq = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    end = tl.load(cu_seqlens_q_ptr + seq + 1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int64)
    longest = width.to(tl.int64) * block_size
    most_tokens = tl.where(seq == 0, 0, num_tokens)  # the first sequence starts at 0
    is_outside = (start < 0) | (start > most_tokens)
    _record(record_ptr, ticket_ptr, is_outside, operation, CU_SEQLENS, -1, seq, start, 0, most_tokens)
    is_beyond = (end < 0) | (end > num_tokens)
    _record(record_ptr, ticket_ptr, is_beyond, operation, CU_SEQLENS, -1, seq + 1, end, 0, num_tokens)
    _record(record_ptr, ticket_ptr, end < start, operation, DESCENDING, -1, seq + 1, end, start, num_tokens)
    is_long = end - start > max_seqlen_q
    _record(record_ptr, ticket_ptr, is_long, operation, TOO_LONG, -1, seq, max_seqlen_q, end - start, num_tokens)
    is_no_length = (seq_len < 0) | (seq_len > longest)
    _record(record_ptr, ticket_ptr, is_no_length, operation, SEQ_LENS, -1, seq, seq_len, 0, longest)
    if (is_outside | is_beyond | is_no_length) | (end <= start):
        return
    first_query = tl.maximum(seq_len - (end - start), 0)
    first_key = tl.maximum(first_query - left, first_query // chunk_size * chunk_size) // KEYS_AT_ONCE * KEYS_AT_ONCE
    last_block = (seq_len + block_size - 1) // block_size
    for first in range(first_key // block_size, last_block, LANES):
        columns = first + tl.arange(0, LANES)
        is_read = columns < last_block
        blocks = tl.load(block_table_ptr + seq * stride_table_seq + columns, mask=is_read, other=0).to(tl.int64)
        is_wrong = is_read & ((blocks < 0) | (blocks >= num_blocks))
        _record_first(
            record_ptr, ticket_ptr, is_wrong, operation, BLOCK_TABLE, seq, first, blocks, 0, num_blocks.to(tl.int64) - 1
        )
