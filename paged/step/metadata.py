"""Attention metadata of a forward, built once per step and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.recurrent.metadata import RecurrentBatch

# Number of arrays in `Step.states`: `starts` to `snapshot_lens` of `RecurrentBatch`.
NUM_STATE_ARRAYS = 6
HostArrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """Embedding rows in place of token embeddings, in the model's dtype.

    Attributes:
        row_ids: int64 [n], indices of the tokens that `rows` replace.
        rows: [n, hidden_size].
        deepstack: [m, n, hidden_size], added to the same tokens after each of the first m layers.
        rope_positions: int64 [3, num_tokens], rotary positions on three axes; None if the axes are equal.
        mask: bool [num_tokens, longest query], the new keys that a token sees; None for causal attention.
        rotations: cosines and sines of every token, cached by the first layer of each rotation.
    """

    row_ids: torch.Tensor
    rows: torch.Tensor
    deepstack: torch.Tensor
    rope_positions: torch.Tensor | None
    mask: torch.Tensor | None
    rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add_deepstack(self, hidden: torch.Tensor, index: int) -> None:
        """Add the rows of `deepstack` for layer `index` (from 0) to the hidden states, in place."""
        if index < len(self.deepstack):
            hidden.index_add_(0, self.row_ids, self.deepstack[index])


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of one forward for the attention kernels, on the cache's device.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1], offsets of each sequence's query rows.
        seq_lens: int32 [num_seqs], KV lengths, including this step's tokens.
        block_table: int32 [num_seqs, max_blocks_per_seq], padded with block 0.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset of each new token.
        positions: int64 [num_tokens], position of each new token in its sequence.
        max_seqlen_q: length of the longest query, or an upper bound.
        plan: the split of the batch into attention tiles, shared by all layers.
        lora: rows that use LoRA adapters, or None.
        embeds: rows in place of token embeddings, or None.
        others: `(block_table, slot_mapping)` of further tables, if layers differ in kind. Read them by `table`.
        host: `cu_seqlens_q`, `seq_lens` and the block tables [tables, num_seqs, blocks] as arrays on the host; None if
            the device work may be replayed, as in a CUDA graph.
        recurrent: state slots that recurrent layers read and write; None without such layers.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_seqlen_q: int
    plan: AttentionPlan
    lora: LoraBatch | None = None
    embeds: EmbeddedRows | None = None
    others: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    host: HostArrays | None = None
    recurrent: RecurrentBatch | None = None

    @classmethod
    def over(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        max_append: int = 0,
        host: HostArrays | None = None,
    ) -> AttentionMetadata:
        """Build metadata and plan from the tensors of `Step.arrays`; both maxima may be upper bounds."""
        positions, slot_mappings, seq_lens = tensors[:3]
        states = tensors[3:-2]
        cu_seqlens_q, block_tables = tensors[-2:]
        recurrent = None
        if states:
            recurrent = _recurrent(cu_seqlens_q, states, max_seqlen_q, max_append)
        block_table, *other_tables = block_tables.unbind()
        slot_mapping, *other_mappings = slot_mappings.unbind()
        return cls(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            others=tuple(zip(other_tables, other_mappings, strict=True)),
            positions=positions,
            max_seqlen_q=max_seqlen_q,
            plan=AttentionPlan.of_step(cu_seqlens_q, seq_lens, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k),
            host=host,
            recurrent=recurrent,
        )

    def without_slots(self, rows: torch.Tensor) -> AttentionMetadata:
        """Return a copy in which the tokens `rows` (int64 [n]) have no slot, so that their K/V are not written."""
        other_tables = tuple((table, mapping.index_fill(0, rows, -1)) for table, mapping in self.others)
        return replace(self, slot_mapping=self.slot_mapping.index_fill(0, rows, -1), others=other_tables)

    def table(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(block_table, slot_mapping)` of a table; `PagedKvCacheManager.table_of` gives a layer's index."""
        return self.others[index - 1] if index else (self.block_table, self.slot_mapping)


def _recurrent(
    cu_seqlens_q: torch.Tensor, states: Sequence[torch.Tensor], max_seqlen_q: int, max_append: int
) -> RecurrentBatch:
    starts, read_slots, write_slots, cursors, snapshot_slots, snapshot_lens = states
    return RecurrentBatch(
        cu_seqlens_q=cu_seqlens_q,
        starts=starts,
        read_slots=read_slots,
        write_slots=write_slots,
        cursors=cursors,
        snapshot_slots=snapshot_slots,
        snapshot_lens=snapshot_lens,
        max_seqlen_q=max_seqlen_q,
        max_append=max_append,
    )


@dataclass(frozen=True)
class OutputRows:
    """Rows whose outputs a forward needs; the last layer may skip all other rows.

    Attributes:
        rows: int64 [num_rows], ascending: the last row or rows of each sequence, or none.
        cu_seqlens_q, max_seqlen_q, plan, lora: as in `AttentionMetadata`, restricted to these rows.
    """

    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    plan: AttentionPlan
    lora: LoraBatch | None = None
