"""Where a loop over blocks of BLOCK_N keys finds them in the cache: block ids, read a block ahead, and slots.

Ids that a loop carries to its next iteration leave the addresses of keys without a load before them. Triton would give
such a load stages of its own: 3 stages then fetch no key ahead, and 5 fetch two blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paged.kernels.common.compat import tl, triton


@triton.jit
def load_block_ids(
    table_ptr,  # the sequence's row of the block table
    index,  # of the block of keys
    end,  # one past the last block of keys, whose ids are read
    num_keys,  # of the sequence
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: the sequence fills all blocks of keys before `end`
):
    """Ids of the cache blocks of a block of keys: a scalar if one holds them all, else [BLOCK_N]; 0 if not read."""
    mask = index < end
    if KV_BLOCK_SIZE % BLOCK_N == 0:
        ids = tl.load(table_ptr + index * BLOCK_N // KV_BLOCK_SIZE, mask=mask, other=0)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        if MASKED:
            mask = mask & (index * BLOCK_N + offs_n < num_keys)
        if BLOCK_N % KV_BLOCK_SIZE == 0:  # the offsets within the row stay the same: 24 instructions fewer for 64 keys
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
    """Slots of a block of keys; the offsets stay the same where the sizes divide one another."""
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
    """Offsets of keys' rows, [BLOCK_N]; what one block of keys shares is a scalar."""
    return block.to(tl.int64) * stride_block + slots.first * stride_slot + slots.offsets * stride_slot
