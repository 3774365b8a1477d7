"""Sorting routed entries into one-expert blocks in PyTorch."""

from __future__ import annotations

import torch


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, max_num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch implementation of `kernels.moe.moe_align_block_size`; max_num_blocks sizes the results."""
    flat = topk_ids.flatten()
    ids, entries = flat.long().sort(stable=True)
    owned = (ids >= 0) & (ids < num_experts)
    ids, entries = ids[owned], entries[owned]
    counts = torch.bincount(ids, minlength=num_experts)
    num_blocks = (counts + block_size - 1) // block_size
    # Sorted entry i is its expert's i - (entries of smaller experts), counted from its first block.
    shift = (num_blocks.cumsum(0) - num_blocks) * block_size - (counts.cumsum(0) - counts)
    positions = torch.arange(len(ids), device=flat.device) + shift[ids]
    sorted_token_ids = flat.new_full((max_num_blocks * block_size,), flat.numel(), dtype=torch.int32)
    sorted_token_ids[positions] = entries.int()
    block_experts = torch.arange(num_experts, device=flat.device, dtype=torch.int32).repeat_interleave(num_blocks)
    expert_ids = flat.new_full((max_num_blocks,), -1, dtype=torch.int32)
    expert_ids[: len(block_experts)] = block_experts
    num_tokens_post_padded = (num_blocks.sum(0, keepdim=True) * block_size).int()
    return sorted_token_ids, expert_ids, num_tokens_post_padded


def expert_rows(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Return the map's entry for each id; -1 for ids outside of it."""
    last = expert_map.shape[0] - 1
    is_known = (topk_ids >= 0) & (topk_ids <= last)
    return torch.where(is_known, expert_map[topk_ids.clamp(0, last)], -1)
