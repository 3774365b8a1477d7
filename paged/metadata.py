"""What one forward needs to know about its sequences, built once a step and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.attention_plan import AttentionPlan
from paged.kernels.lora_batch import LoraBatch


@dataclass(frozen=True)
class AttentionMetadata:
    """The batch as the kernels see it. All tensors lie on the cache's device.

    cu_seqlens_q: int32 [num_seqs + 1], offsets of each sequence's query rows.
    seq_lens: int32 [num_seqs], KV lengths with this step's tokens included.
    block_table: int32 [num_seqs, max_blocks_per_seq], padded with block 0.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset of each new token.
    positions: int64 [num_tokens].
    max_seqlen_q: longest query.
    plan: how attention cuts the batch into tiles and splits, made once a step and shared by all layers.
    lora: which rows an adapter changes; None where there are none.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_seqlen_q: int
    plan: AttentionPlan
    lora: LoraBatch | None = None
