"""The Triton kernel that unites the chosen blocks of a bundle: consecutive tokens of a sequence that share a tile.

Neighbours choose mostly the same blocks, so a tile of several tokens reads each block once. An entry of the union is a
block's id and its members: bit i is set if token i of the bundle chooses the block. A token that chooses a block twice
gives it two entries, because each entry of a list counts. limits.md has the bytes that a union saves.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.compat import tl, triton
from ..core.launch import Launch, wait_for_inputs
from .keys import Window, visible_range

# Most tokens of a bundle: an entry has 32 bits for its members.
MAX_TOKENS = 32
# Most entries of a bundle's lists. The kernel compares each with each: 1,024 take 15 us of an SM, a quarter of the time
# in which their keys are read.
MAX_ENTRIES = 1024
# Entries that a program compares at once with up to as many others.
_ENTRIES = 64
# Arguments of both kernels: ids, members and number of the entries of each bundle and KV head.
UNION_TENSORS = ("union_ids_ptr", "union_members_ptr", "union_sizes_ptr")


@triton.jit
def _is_seen(ids, position, seq_len, window, CHOSEN_SIZE: tl.constexpr):
    """Return whether a query at `position` sees any position of these blocks."""
    first_key, end_key = visible_range(position, seq_len, window)
    end_block = (end_key + CHOSEN_SIZE - 1) // CHOSEN_SIZE
    return (ids >= tl.maximum(first_key, 0) // CHOSEN_SIZE) & (ids < end_block)


@triton.jit(
    do_not_specialize=["num_chosen", "max_entries", "window_left", "window_right", "stride_chosen_token"],
)  # fmt: skip
def _unite_choices_kernel(
    chosen_ptr,  # [num_tokens, num_kv_heads, num_chosen]
    union_ids_ptr,  # [num_bundles, num_kv_heads, max_entries]
    union_members_ptr,  # likewise
    union_sizes_ptr,  # [num_bundles, num_kv_heads], entries
    bundle_offsets_ptr,  # [num_bundles + 1], first token of each bundle
    bundle_seqs_ptr,  # [num_bundles]
    step_offsets_ptr,  # [num_seqs + 1], query offsets
    step_lengths_ptr,  # [num_seqs], KV lengths
    is_causal_ptr,  # [num_seqs], or None
    num_chosen,
    max_entries,
    window_left,
    window_right,
    stride_chosen_token,
    stride_chosen_head,
    CHOSEN_SIZE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,  # keys of a chunk of local attention, 0 without
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Unite the lists of one bundle and KV head, in the order of tokens. Blocks that no member sees are left out."""
    wait_for_inputs()
    kv_head = tl.program_id(0)
    bundle = tl.program_id(1)
    first_token = tl.load(bundle_offsets_ptr + bundle)
    num_tokens = tl.load(bundle_offsets_ptr + bundle + 1) - first_token
    if num_tokens < 2:  # its tile reads the list itself
        return
    seq = tl.load(bundle_seqs_ptr + bundle)
    seq_len = tl.load(step_lengths_ptr + seq)
    first_position = seq_len - tl.load(step_offsets_ptr + seq + 1) + first_token
    if is_causal_ptr is not None:
        window_right = tl.where(tl.load(is_causal_ptr + seq) != 0, 0, window_right)
    window = Window(left=window_left, right=window_right, chunk_size=CHUNK_SIZE if CHUNK_SIZE > 0 else None)
    chosen_ptr += first_token.to(tl.int64) * stride_chosen_token + kv_head.to(tl.int64) * stride_chosen_head
    list_index = bundle.to(tl.int64) * tl.num_programs(0) + kv_head
    columns = tl.arange(0, COLUMNS)
    size = 0
    for base in range(0, num_tokens * num_chosen, ENTRIES):
        entry = base + tl.arange(0, ENTRIES)
        token = entry // num_chosen
        column = entry % num_chosen
        list_ptrs = chosen_ptr + token.to(tl.int64) * stride_chosen_token  # [ENTRIES]
        ids = tl.load(list_ptrs + column, mask=token < num_tokens, other=-1)
        repeats = tl.zeros([ENTRIES], tl.int32)  # earlier entries of the same list with the same id
        for start in range(0, num_chosen, COLUMNS):
            is_earlier = (token < num_tokens)[:, None] & (start + columns[None, :] < column[:, None])
            earlier = tl.load(list_ptrs[:, None] + (start + columns)[None, :], mask=is_earlier, other=-1)
            repeats += tl.sum((earlier == ids[:, None]).to(tl.int32), 1)
        is_new = _is_seen(ids, first_position + token, seq_len, window, CHOSEN_SIZE)
        members = tl.zeros([ENTRIES], tl.int32)
        other_ptr = chosen_ptr
        for other_token in range(num_tokens):
            times = tl.zeros([ENTRIES], tl.int32)
            for start in range(0, num_chosen, COLUMNS):
                others = tl.load(other_ptr + start + columns, mask=start + columns < num_chosen, other=-1)
                times += tl.sum((ids[:, None] == others[None, :]).to(tl.int32), 1)
            is_member = (times > repeats) & _is_seen(ids, first_position + other_token, seq_len, window, CHOSEN_SIZE)
            is_new = is_new & ~(is_member & (other_token < token))
            members |= tl.where(is_member, 1 << other_token, 0)
            other_ptr += stride_chosen_token
        place = list_index * max_entries + size + tl.cumsum(is_new.to(tl.int32), 0) - 1
        tl.store(union_ids_ptr + place, ids, mask=is_new)
        tl.store(union_members_ptr + place, members, mask=is_new)
        size += tl.sum(is_new.to(tl.int32), 0)
    tl.store(union_sizes_ptr + list_index, size)


def union_launch(
    chosen: torch.Tensor, num_bundles: int, bundle_tokens: int, arguments: dict[str, Any]
) -> tuple[Launch, dict[str, Any]]:
    """Return the launch that unites the blocks of bundles, and the arguments of its results for the attention kernel.

    chosen: int32 [num_tokens, num_kv_heads, k], of any layer of the step.
    bundle_tokens: most tokens of a bundle.
    arguments: the rest of the kernel's arguments.
    """
    _, num_kv_heads, num_chosen = chosen.shape
    max_entries = bundle_tokens * num_chosen
    ids, members = torch.empty(
        2, num_bundles, num_kv_heads, max_entries, dtype=torch.int32, device=chosen.device
    ).unbind()
    sizes = torch.empty(num_bundles, num_kv_heads, dtype=torch.int32, device=chosen.device)
    results = dict(zip(UNION_TENSORS, (ids, members, sizes), strict=True)) | {"max_entries": max_entries}
    launch = Launch(
        _unite_choices_kernel,
        (num_kv_heads, num_bundles),
        {
            **arguments,
            **results,
            "ENTRIES": _ENTRIES,
            "COLUMNS": min(_ENTRIES, int(triton.next_power_of_2(num_chosen))),
        },
        num_warps=4,
    )
    return launch, results
