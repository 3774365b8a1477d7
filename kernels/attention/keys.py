"""The keys that a query sees, and where a loop over blocks of BLOCK_N keys finds them in the cache.

A query sees a range of keys that depends on its position. A mask over new keys, packed to bits, may hide some of them.
The loop reads block ids one block ahead and carries them to its next iteration, so that no load precedes the addresses
of keys. Triton would give such a load its own pipeline stages: with 3 stages no key would be fetched ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.compat import tl, triton
from ..core.launch import launch, wait_for_inputs

WORD_KEYS = tl.constexpr(64)
# A window edge further away than any key. Positions stay below 2^30, so sums of the two fit 32 bits.
NO_LIMIT = 1 << 30


class Window(NamedTuple):
    """Limits of the keys that a query sees. A kernel creates it."""

    left: Any
    right: Any
    chunk_size: Any  # keys of a chunk of local attention, or None


@triton.jit
def visible_range(position, seq_len, window):
    """First and one past the last key that queries at `position` see, by window, chunk and length.

    The first may be below 0. If first >= last, the query sees no keys.
    """
    first = position - window.left
    end = tl.minimum(position + window.right + 1, seq_len)
    if window.chunk_size is not None:
        chunk = tl.maximum(position, 0) // window.chunk_size * window.chunk_size
        first = tl.maximum(first, chunk)
        end = tl.minimum(end, tl.where(position < 0, 0, chunk + window.chunk_size))
    return first, end


@triton.jit(do_not_specialize=["stride_mask_token", "stride_words_token"])
def _pack_mask_kernel(
    mask_ptr,  # [num_tokens, longest query]
    words_ptr,  # [num_tokens, num_words]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    stride_mask_token,
    stride_words_token,
):
    """Pack one query's mask a program. The first word contains the first new key; earlier keys are allowed."""
    wait_for_inputs()
    seq = tl.program_id(0)
    query = tl.program_id(1)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    # A sequence longer than max_seqlen_q has neither words nor tiles.
    if (query >= q_len) | (q_len > tl.num_programs(1)):
        return
    token = (first_token + query).to(tl.int64)
    context_len = tl.load(seq_lens_ptr + seq) - q_len
    first_key = context_len // WORD_KEYS * WORD_KEYS
    bits = tl.arange(0, WORD_KEYS)
    for word in range((context_len + q_len - first_key + WORD_KEYS - 1) // WORD_KEYS):
        column = first_key + word * WORD_KEYS + bits - context_len
        is_new = (column >= 0) & (column < q_len)
        allowed = tl.load(mask_ptr + token * stride_mask_token + column, mask=is_new, other=1)
        tl.store(words_ptr + token * stride_words_token + word, tl.sum((allowed != 0).to(tl.int64) << bits, 0))


def pack_mask(
    mask: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, max_seqlen_q: int
) -> torch.Tensor:
    """Pack `mask`, bool [num_tokens, longest query], into int64 [num_tokens, num_words].

    Bit b of word w of a query is its key (context_len // 64 + w) * 64 + b. Words after a sequence's keys are not
    written.
    """
    num_words = triton.cdiv(max_seqlen_q, WORD_KEYS.value) + 1  # the first new key may be anywhere in its word
    words = torch.empty(mask.shape[0], num_words, dtype=torch.int64, device=mask.device)
    if max_seqlen_q:
        launch(
            _pack_mask_kernel,
            (seq_lens.shape[0], max_seqlen_q),
            mask_ptr=mask,
            words_ptr=words,
            cu_seqlens_q_ptr=cu_seqlens_q,
            seq_lens_ptr=seq_lens,
            stride_mask_token=mask.stride(0),
            stride_words_token=words.stride(0),
        )
    return words


@triton.jit
def load_block_ids(
    table_ptr,  # the sequence's row of the block table
    index,  # index of the block of keys
    end,  # one past the last block of keys whose ids are read
    num_keys,  # keys of the sequence
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: the sequence fills all blocks of keys before `end`
):
    """Return the cache blocks of a block of keys: a scalar if one holds all keys, else [BLOCK_N]; 0 if not read."""
    mask = index < end
    if KV_BLOCK_SIZE % BLOCK_N == 0:
        ids = tl.load(table_ptr + index * BLOCK_N // KV_BLOCK_SIZE, mask=mask, other=0)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        if MASKED:
            mask = mask & (index * BLOCK_N + offs_n < num_keys)
        if BLOCK_N % KV_BLOCK_SIZE == 0:  # offsets within the row are constant, which saves 24 instructions for 64 keys
            ptrs = table_ptr + index * (BLOCK_N // KV_BLOCK_SIZE) + offs_n // KV_BLOCK_SIZE
        else:
            ptrs = table_ptr + (index * BLOCK_N + offs_n) // KV_BLOCK_SIZE
        ids = tl.load(ptrs, mask=mask, other=0)
    return ids


class Slots(NamedTuple):
    """Slots of keys in their cache blocks: first + offsets."""

    first: Any  # scalar
    offsets: Any  # [BLOCK_N]


@triton.jit
def key_slots(index, KV_BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots of a block of keys. The offsets are constant if one block size divides the other."""
    offs_n = tl.arange(0, BLOCK_N)
    if KV_BLOCK_SIZE % BLOCK_N == 0:
        slots = Slots(first=index * BLOCK_N % KV_BLOCK_SIZE, offsets=offs_n)
    elif BLOCK_N % KV_BLOCK_SIZE == 0:
        slots = Slots(first=index * 0, offsets=offs_n % KV_BLOCK_SIZE)
    else:
        slots = Slots(first=index * 0, offsets=(index * BLOCK_N + offs_n) % KV_BLOCK_SIZE)
    return slots


@triton.jit
def row_offsets(block, slots, stride_block, stride_slot):
    """Return the offsets of keys' rows, [BLOCK_N]. The part that all keys of a block share is a scalar."""
    return block.to(tl.int64) * stride_block + slots.first * stride_slot + slots.offsets * stride_slot
