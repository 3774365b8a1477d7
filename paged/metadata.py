"""Metadata of a forward, built once per step and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.common.attention.plan import AttentionPlan
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.recurrent.metadata import RecurrentBatch

# Arrays of `HostMetadata.states`, from `starts` to `snapshot_lens` of `RecurrentBatch`.
NUM_STATE_ARRAYS = 6


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """Rows in place of token embeddings, in a step that has some; in the model's dtype.

    Attributes:
        row_ids: int64 [n], the tokens that `rows` replace.
        rows: [n, hidden_size].
        deepstack: [m, n, hidden_size], added at the same rows after each of the first m layers.
        rope_positions: int64 [3, num_tokens], rotary positions of several axes; None if the axes are equal.
        mask: bool [num_tokens, longest query], the new keys that a token sees; None for those up to its own.
        rotations: cosines and sines of every token, made by the first layer of each rotation.
    """

    row_ids: torch.Tensor
    rows: torch.Tensor
    deepstack: torch.Tensor
    rope_positions: torch.Tensor | None
    mask: torch.Tensor | None
    rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add_deepstack(self, hidden: torch.Tensor, index: int) -> None:
        """Add the rows of `deepstack` after the layer with this index, from 0 on, in place."""
        if index < len(self.deepstack):
            hidden.index_add_(0, self.row_ids, self.deepstack[index])


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of one forward as the attention kernels take it, on the cache's device.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1], offsets of each sequence's query rows.
        seq_lens: int32 [num_seqs], KV lengths, this step's tokens included.
        block_table: int32 [num_seqs, max_blocks_per_seq], padded with block 0.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset of each new token.
        positions: int64 [num_tokens], position of each new token in its sequence.
        max_seqlen_q: longest query, or an upper bound.
        plan: the split of the batch into tiles for attention, shared by all layers.
        lora: rows that adapters change; None if there are none.
        embeds: rows in place of token embeddings; None if there are none.
        others: `(block_table, slot_mapping)` of further tables, if layers differ in kind. Use `table` to choose.
        host: the same on the host; None if another step may reuse the device's work, as in a captured one.
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
    host: HostMetadata | None = None
    recurrent: RecurrentBatch | None = None

    @classmethod
    def over(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        max_append: int = 0,
        host: HostMetadata | None = None,
    ) -> AttentionMetadata:
        """Build the metadata and a plan from the tensors of `HostMetadata.arrays`; both maxima are upper bounds."""
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
        """Return a copy in which some tokens have no slot: their K/V are not written. rows: int64 [n]."""
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
    """Rows whose outputs a forward needs, if not all; the last layer may skip the others.

    Attributes:
        rows: int64 [num_rows], ascending: the last rows of each sequence, or none of them.
        cu_seqlens_q, max_seqlen_q, plan, lora: as in `AttentionMetadata`, for these rows.
    """

    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    plan: AttentionPlan
    lora: LoraBatch | None = None


@dataclass(eq=False)
class HostMetadata:
    """`AttentionMetadata` as arrays on the host.

    Attributes:
        slot_mappings, block_tables: for all tables, along the first axis.
        states: int32 [num_seqs] each, from `starts` to `snapshot_lens` of `RecurrentBatch`; empty without recurrent
            layers.
        max_append: as in `RecurrentBatch`.
    """

    positions: NDArray[np.int64]
    slot_mappings: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int
    states: tuple[NDArray[np.int32], ...] = ()
    max_append: int = 0

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The arrays to copy to the device, the block tables last."""
        return self.positions, self.slot_mappings, self.seq_lens, *self.states, self.cu_seqlens_q, self.block_tables

    def after_one(
        self, positions: NDArray[np.int64], block_tables: NDArray[np.int32], *, max_seqlen_k: int
    ) -> HostMetadata:
        """Return the metadata of a decode step after this one, in a third of the time of `make_host_metadata`.

        The slots of sequences that begin a block are to be set. The arguments are those of that step.
        """
        return HostMetadata(
            positions=positions,
            slot_mappings=self.slot_mappings + 1,
            seq_lens=self.seq_lens + np.int32(1),
            cu_seqlens_q=self.cu_seqlens_q,
            block_tables=block_tables,
            max_seqlen_q=1,
            max_seqlen_k=max_seqlen_k,
        )

    def over(self, tensors: Sequence[torch.Tensor]) -> AttentionMetadata:
        """Return the metadata on the device, from `tensors` with the values of `arrays`."""
        return AttentionMetadata.over(
            tensors,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            max_append=self.max_append,
            host=self,
        )


def make_host_metadata(
    lengths: NDArray[np.int64],
    query_lens: NDArray[np.int64] | None,
    tables: NDArray[np.int32],
    block_size: int,
) -> HostMetadata:
    """Build the metadata of sequences that hold `lengths` tokens and get `query_lens` more, [num_seqs] each.

    Args:
        query_lens: None for one more each, as in a decode step, which needs no sums and repeats.
        tables: block ids [tables, num_seqs, max_blocks_per_seq], with capacity for the new tokens.
    """
    if query_lens is None:
        offsets = np.arange(len(lengths) + 1, dtype=np.int32)
        rows, positions, seq_lens, max_seqlen_q = offsets[:-1], lengths, lengths + 1, 1
    else:
        offsets = np.zeros(len(lengths) + 1, np.int32)
        query_lens.cumsum(out=offsets[1:])
        rows = np.repeat(np.arange(len(lengths)), query_lens)
        positions = np.arange(offsets[-1]) + np.repeat(lengths - offsets[:-1], query_lens)
        seq_lens, max_seqlen_q = lengths + query_lens, int(query_lens.max(initial=0))
    blocks = positions // block_size
    slots = (tables[:, rows, blocks] - blocks) * block_size + positions
    return HostMetadata(
        positions=positions,
        slot_mappings=slots,
        seq_lens=seq_lens.astype(np.int32),
        cu_seqlens_q=offsets,
        block_tables=tables,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=int(seq_lens.max(initial=0)),
    )
