"""What sorting routed entries by expert leads to, and its memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MoeAlignment(NamedTuple):
    """Routed entries sorted into blocks of one expert each; see `moe_align_block_size`."""

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.sorted_token_ids.numel() // max(self.expert_ids.numel(), 1)

    def pointers(self) -> dict[str, torch.Tensor]:
        """The tensors as kernels take them."""
        return {
            "sorted_token_ids_ptr": self.sorted_token_ids,
            "expert_ids_ptr": self.expert_ids,
            "num_tokens_post_padded_ptr": self.num_tokens_post_padded,
        }


def max_num_blocks(num_entries: int, block_size: int, num_experts: int) -> int:
    """Blocks that `num_entries` routed entries can need, however they are spread: every expert in use may leave
    block_size - 1 slots of its last block empty, and no more experts than entries are in use."""
    return -(-(num_entries + min(num_experts, num_entries) * (block_size - 1)) // block_size)


def new_alignment(num_entries: int, block_size: int, num_experts: int, device: torch.device) -> MoeAlignment:
    """Memory for an alignment, enough for the worst spread of entries."""
    num_blocks = max_num_blocks(num_entries, block_size, num_experts)
    sizes = (num_blocks * block_size, num_blocks, 1)
    return MoeAlignment(*[torch.empty(size, dtype=torch.int32, device=device) for size in sizes])


def num_mapped(expert_map: torch.Tensor | None) -> int:
    """The experts that a map holds, as kernels take it."""
    return 0 if expert_map is None else expert_map.numel()
