"""A step: what runs in one forward, from who plans it through cache and model to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.attention.plan import AttentionPlan
from paged.step.metadata import AttentionMetadata, OutputRows
from paged.step.staging import to_device

if TYPE_CHECKING:
    from paged.cache.kv_cache import KvCacheHandle
    from paged.cache.slot_reservation import KvSlotReservation
    from paged.step.batch import CapturedStates, LogitsPolicy, UnifiedBatchItem
    from paged.step.embeds import StepEmbeds


_CPU = torch.device("cpu")


class _OnDevice(NamedTuple):
    """Tensors of a step, see the properties of `Step`."""

    input_ids: torch.Tensor
    sample_rows: torch.Tensor
    metadata: AttentionMetadata
    outputs: OutputRows | None


@dataclass(eq=False)
class Step:
    """New tokens of several sequences, and all that one forward over them needs.

    Who plans the step sets the sequences and their tokens. `PagedKvCacheManager.reserve_for` reserves their capacity
    and fills in the metadata. `UnifiedExecutor.run` runs it. As a context manager, a step commits its reservation at
    the end, and rolls back after an error.

    Attributes:
        handles, counts: the sequence and the number of new tokens of each item.
        token_ids: int64 [num_tokens], the new tokens of all items. On the device: `input_ids`.
        device_ids: int64 [n], the first n tokens if only the device knows them; `token_ids` has placeholders for them.
        row_ids: int64 [num_rows], ascending, the rows whose results are wanted. On the device: `sample_rows`.
        policies: what each wanted row returns; None if all return logits.
        items: the items of the batch, for models and executors of others; else empty.
        device: where the model runs.
        returns_hidden, captured: as in `UnifiedBatch`.
        embeds: rows in place of token embeddings, or None.
        published: tokens of each item for the prefix index; None if they are unknown or must not be shared.
        only_decodes: whether every token follows a finished prompt.
        is_invariant: whether the bits of a row must not depend on other rows of the batch.
        undo: functions that `rollback` calls in order, after the rollback of the reservation.

        reservation: the reserved capacity; None in a process that does not own the cache.
        positions: int64 [num_tokens], position of each new token in its sequence.
        slot_mappings: int64 [tables, num_tokens]. block_tables: int32 [tables, num_seqs, blocks of the longest].
        seq_lens: int32 [num_seqs], lengths with the new tokens. cu_seqlens_q: int32 [num_seqs + 1].
        max_seqlen_q, max_seqlen_k: the largest number of new tokens, and of tokens, of one sequence.
        states: int32 [num_seqs] each, from `starts` to `snapshot_lens` of `RecurrentBatch`; empty without recurrent
            layers. max_append: as in `RecurrentBatch`.
    """

    handles: Sequence[KvCacheHandle] = ()
    counts: Sequence[int] = ()
    token_ids: NDArray[np.int64] = field(init=False)
    row_ids: NDArray[np.int64] = field(init=False)
    device_ids: torch.Tensor | None = None
    policies: Sequence[LogitsPolicy] | None = None
    items: Sequence[UnifiedBatchItem] = ()
    device: torch.device = _CPU
    returns_hidden: bool = False
    captured: CapturedStates | None = None
    embeds: StepEmbeds | None = None
    published: Sequence[Sequence[int] | None] | None = None
    only_decodes: bool = False
    is_invariant: bool = False
    undo: tuple[Callable[[], object], ...] = ()
    reservation: KvSlotReservation | None = None
    positions: NDArray[np.int64] = field(init=False)
    slot_mappings: NDArray[np.int64] = field(init=False)
    seq_lens: NDArray[np.int32] = field(init=False)
    cu_seqlens_q: NDArray[np.int32] = field(init=False)
    block_tables: NDArray[np.int32] = field(init=False)
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    states: tuple[NDArray[np.int32], ...] = ()
    max_append: int = 0

    def place(
        self,
        lengths: NDArray[np.int64],
        query_lens: NDArray[np.int64] | None,
        tables: NDArray[np.int32],
        block_size: int,
    ) -> None:
        """Set the metadata of sequences with `lengths` tokens that get `query_lens` more, [num_seqs] each.

        Args:
            query_lens: None if each sequence gets one token, as in a decode step; this is faster.
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
        self.positions = positions
        self.slot_mappings = (tables[:, rows, blocks] - blocks) * block_size + positions
        self.seq_lens = seq_lens.astype(np.int32)
        self.cu_seqlens_q = offsets
        self.block_tables = tables
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = int(seq_lens.max(initial=0))

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Arrays of the metadata to copy to the device, the block tables last."""
        return self.positions, self.slot_mappings, self.seq_lens, *self.states, self.cu_seqlens_q, self.block_tables

    def over(self, tensors: Sequence[torch.Tensor]) -> AttentionMetadata:
        """Return the device metadata over `tensors`, which hold the values of `arrays`."""
        return AttentionMetadata.over(
            tensors,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            max_append=self.max_append,
            host=(self.cu_seqlens_q, self.seq_lens, self.block_tables),
        )

    @property
    def input_ids(self) -> torch.Tensor:
        return self._on_device.input_ids

    @property
    def sample_rows(self) -> torch.Tensor:
        return self._on_device.sample_rows

    @property
    def metadata(self) -> AttentionMetadata:
        return self._on_device.metadata

    @property
    def outputs(self) -> OutputRows | None:
        """`sample_rows` as `OutputRows` for the last layer; None if all rows are wanted."""
        return self._on_device.outputs

    def copy_device_ids(self, input_ids: torch.Tensor) -> None:
        """Copy `device_ids` over their placeholders in `input_ids` [num_tokens]; -1 (no token) becomes 0."""
        if self.device_ids is None:
            return
        if self.device_ids.shape[0] < len(self.token_ids):
            input_ids = input_ids[: self.device_ids.shape[0]]
        torch.clamp(self.device_ids, min=0, out=input_ids)

    def num_rows(self) -> list[int]:
        """Return the number of wanted rows of each item."""
        counts: list[int] = np.diff(np.searchsorted(self.row_ids, self.cu_seqlens_q)).tolist()
        return counts

    def commit(self) -> None:
        """Advance the lengths and publish full blocks."""
        if self.reservation is not None:
            self.reservation.commit(self.published)
        self.undo = ()

    def rollback(self) -> None:
        """Free the capacity and undo what was done for this step; do nothing after a commit or rollback."""
        if self.reservation is not None:
            self.reservation.rollback()
        undo, self.undo = self.undo, ()
        for function in undo:
            function()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException:
            self.rollback()
            raise

    @cached_property
    def _on_device(self) -> _OnDevice:
        wants_all = len(self.row_ids) == len(self.token_ids)
        arrays: list[NDArray[Any]] = [self.token_ids, self.row_ids]
        if not wants_all:
            offsets: NDArray[np.int32] = np.searchsorted(self.row_ids, self.cu_seqlens_q).astype(np.int32)
            arrays.append(offsets)
        tensors = to_device([*arrays, *self.arrays], self.device)
        input_ids, sample_rows = tensors[:2]
        if self.device_ids is not None:
            self.copy_device_ids(input_ids)
        metadata = self.over(tensors[len(arrays) :])
        if wants_all:
            return _OnDevice(input_ids, sample_rows, metadata, None)
        longest = int(np.diff(offsets).max())
        cu_seqlens_q = tensors[2]
        plan = AttentionPlan(cu_seqlens_q, metadata.seq_lens, max_seqlen_q=longest, max_seqlen_k=self.max_seqlen_k)
        return _OnDevice(input_ids, sample_rows, metadata, OutputRows(sample_rows, cu_seqlens_q, longest, plan))
