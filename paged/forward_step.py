"""A forward as a transaction on the cache: either all sequences advance, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import add, gt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import BatchColumns, CapturedStates, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.cache.slot_reservation import KvSlotReservation
from paged.errors import InvalidInputError, SequenceTooLongError
from paged.kernels.common.attention.plan import AttentionPlan
from paged.metadata import AttentionMetadata, HostMetadata, OutputRows
from paged.seq_id import SeqId
from paged.staging import to_device
from paged.step_embeds import StepEmbeds, embed_step


@dataclass(eq=False)
class ForwardStep:
    """The input of a model's forward, and the cache capacity that is reserved for it.

    Attributes:
        token_ids: int64 [num_tokens], the items' tokens one after the other; `input_ids` on the device.
        device_ids: int64 [n], the first n tokens, if only the device knows them; in `token_ids` these are placeholders.
        host: the metadata; `metadata` on the device.
        row_ids: int64 [num_sampled_rows], in order, the last row of every item with `is_final_chunk`, or all of its
            rows under VerifyLogits; `sample_rows` on the device.
        handles, counts: the sequence of each item, and the number of its tokens.
        returns_hidden, captured: as in `UnifiedBatch`.
        embeds: rows in place of token embeddings; None if there are none.
        reservation: the capacity; None where another process holds it.
        published: the tokens of each item for the prefix index; None if they are unknown or stay private.
        new_ids: sequences that were created for this forward.
        only_decodes: whether every token follows a prompt that has run.
        is_invariant: whether no row's bits may depend on the rows beside it.
    """

    token_ids: NDArray[np.int64]
    host: HostMetadata
    row_ids: NDArray[np.int64]
    handles: Sequence[KvCacheHandle]
    counts: Sequence[int]
    device: torch.device
    device_ids: torch.Tensor | None = None
    returns_hidden: bool = False
    embeds: StepEmbeds | None = None
    captured: CapturedStates | None = None
    reservation: KvSlotReservation | None = None
    published: Sequence[Sequence[int] | None] | None = None
    manager: PagedKvCacheManager | None = None
    new_ids: Sequence[SeqId] = ()
    only_decodes: bool = False
    is_invariant: bool = False

    def commit(self) -> None:
        """Let lengths grow, and publish full blocks."""
        assert self.reservation is not None
        self.reservation.commit(self.published)

    def rollback(self) -> None:
        """Give back the capacity and the sequences that were created for it; does nothing after the end."""
        if self.reservation is not None:
            self.reservation.rollback()
        _free_all(self.manager, self.new_ids)

    @property
    def input_ids(self) -> torch.Tensor:
        return self._moved[0]

    @property
    def sample_rows(self) -> torch.Tensor:
        return self._moved[1]

    @property
    def metadata(self) -> AttentionMetadata:
        return self._moved[2]

    @property
    def outputs(self) -> OutputRows | None:
        """`sample_rows` in the form for the last layer; None if they are all rows."""
        return self._moved[3]

    def copy_device_ids(self, input_ids: torch.Tensor) -> None:
        """Copy `device_ids` to where they belong in `input_ids` [num_tokens]; -1, which is no token, runs as 0."""
        if self.device_ids is None:
            return
        if self.device_ids.shape[0] < len(self.token_ids):
            input_ids = input_ids[: self.device_ids.shape[0]]
        torch.clamp(self.device_ids, min=0, out=input_ids)

    @cached_property
    def _moved(self) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, OutputRows | None]:
        wants_all = len(self.row_ids) == len(self.token_ids)
        arrays: list[NDArray[Any]] = [self.token_ids, self.row_ids]
        if not wants_all:
            offsets: NDArray[np.int32] = np.searchsorted(self.row_ids, self.host.cu_seqlens_q).astype(np.int32)
            arrays.append(offsets)
        tensors = to_device([*arrays, *self.host.arrays], self.device)
        input_ids, sample_rows = tensors[:2]
        if self.device_ids is not None:
            self.copy_device_ids(input_ids)
        metadata = self.host.over(tensors[len(arrays) :])
        if wants_all:
            return input_ids, sample_rows, metadata, None
        longest = int(np.diff(offsets).max())
        cu_seqlens_q = tensors[2]
        plan = AttentionPlan(cu_seqlens_q, metadata.seq_lens, max_seqlen_q=longest, max_seqlen_k=self.host.max_seqlen_k)
        return input_ids, sample_rows, metadata, OutputRows(sample_rows, cu_seqlens_q, longest, plan)


@contextmanager
def forward_step(manager: PagedKvCacheManager, batch: UnifiedBatch) -> Iterator[ForwardStep]:
    """Reserve capacity for all items and yield their forward; then lengths grow and full blocks are published.

    An item without `kv_cache` uses the manager's sequence `seq_id`, created on first use. An exception rolls back
    lengths, capacity and the sequences created here.

    Raises:
        InvalidInputError: a handle is not the manager's, or two items use the same one.
        StaleHandleError: a handle has been freed or is swapped out.
        SequenceTooLongError: a sequence would exceed the cache's `max_seq_len`.
        OutOfBlocksError: the pool has too few free blocks.
    """
    step: ForwardStep | None = None
    try:
        step = batch.prepared or _reserved_step(manager, batch)
        yield step
        step.commit()
    except BaseException:
        if step is not None:
            step.rollback()
        raise


def _reserved_step(manager: PagedKvCacheManager, batch: UnifiedBatch) -> ForwardStep:
    """Reserve capacity for all items and return their forward; errors as `forward_step`."""
    new_ids: list[SeqId] = []  # recorded before the sequences are made, so that an interrupt loses none
    reservation: KvSlotReservation | None = None
    items, columns = batch.items, batch.columns
    counts = columns.counts
    try:
        handles = _handles(manager, columns, new_ids)
        num_unknown = 0 if batch.device_ids is None else batch.device_ids.shape[0]
        published: list[Sequence[int] | None] = [item.q_tokens for item in items]
        published[:num_unknown] = [None] * num_unknown
        tokens: NDArray[np.int64] = np.zeros(sum(counts), np.int64)
        if num_unknown < len(items):
            known = [item.q_tokens for item in items[num_unknown:]]
            tokens[num_unknown:] = list(chain.from_iterable(known))
        reservation, host = manager.reserve_step(handles, counts)
        rows = np.arange(len(counts)) if columns.is_decode else _sample_rows(items, counts)
        embeds = None
        if columns.has_embeds:
            embeds, host = embed_step(items, host, manager.device)
            for index, item in enumerate(items[num_unknown:], num_unknown):
                if item.embeds is not None:
                    published[index] = item.embeds.ids(item.q_tokens, item.pos_offset)
        is_private = batch.returns_hidden or num_unknown == len(items)
        return ForwardStep(
            token_ids=tokens,
            host=host,
            row_ids=rows,
            handles=handles,
            counts=counts,
            device=manager.device,
            device_ids=batch.device_ids,
            returns_hidden=batch.returns_hidden,
            embeds=embeds,
            captured=batch.captured,
            reservation=reservation,
            published=None if is_private else published,
            manager=manager,
            new_ids=new_ids,
        )
    except BaseException:
        if reservation is not None:
            reservation.rollback()
        _free_all(manager, new_ids)
        raise


def prepare(manager: PagedKvCacheManager, batch: UnifiedBatch) -> None:
    """Reserve capacity for the items of a batch that are known to be valid: its executor does not check them again.

    Errors are those of `forward_step`.
    """
    object.__setattr__(batch, "prepared", _reserved_step(manager, batch))


def _handles(manager: PagedKvCacheManager, columns: BatchColumns, new_ids: list[SeqId]) -> list[KvCacheHandle]:
    """Return the sequence of each item; add to `new_ids` those that are created here."""
    handles = [handle for handle in columns.kv_caches if handle is not None]
    if len(handles) == len(columns.seq_ids):
        return handles
    handles = []
    for seq_id, kv_cache in zip(columns.seq_ids, columns.kv_caches, strict=True):
        handle = kv_cache or manager.get_handle(seq_id)
        if handle is None:
            new_ids.append(seq_id)
            handle = manager.allocate(seq_id)
        handles.append(handle)
    return handles


def _free_all(manager: PagedKvCacheManager | None, seq_ids: Sequence[SeqId]) -> None:
    for seq_id in seq_ids:
        assert manager is not None
        handle = manager.get_handle(seq_id)
        if handle is not None:
            manager.free(handle)


def _sample_rows(items: Sequence[UnifiedBatchItem], counts: Sequence[int]) -> NDArray[np.int64]:
    ends: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
    final = [item.is_final_chunk for item in items]
    if VerifyLogits not in {type(item.logits_policy) for item in items}:
        last_rows: NDArray[np.int64] = ends - 1
        if not all(final):
            last_rows = last_rows[np.array(final)]
        return last_rows
    verified = np.array([isinstance(item.logits_policy, VerifyLogits) for item in items])
    firsts = np.where(verified, ends - counts, ends - 1)
    rows: list[NDArray[np.int64]] = []
    for first, end, is_final in zip(firsts, ends, final, strict=True):
        if is_final:
            rows.append(np.arange(first, end))
    return np.concatenate(rows)


def validate_items(
    items: Sequence[UnifiedBatchItem],
    handles: Sequence[KvCacheHandle | None],
    *,
    vocab_size: int,
    max_seq_len: int,
) -> None:
    """Check a batch before anything is written. An empty batch is legal.

    Args:
        handles: the sequence of each item; None if it does not exist yet.

    Raises:
        InvalidInputError: two items of the same sequence, an item without tokens, a `pos_offset` that is not the
            cache's length, or a token id outside [0, vocab_size).
        SequenceTooLongError: an item would reach beyond `max_seq_len`.
    """
    seq_ids = [item.seq_id for item in items]
    cache_ids: list[SeqId] = []
    lengths: list[int] = []
    for item, handle in zip(items, handles, strict=True):
        if handle is None:
            cache_ids.append(item.seq_id)
            lengths.append(0)
        else:
            cache_ids.append(handle.cache_id)
            lengths.append(handle.num_tokens)
    for name, ids in (("seq_id", seq_ids), ("cache_id", cache_ids)):
        if len(set(ids)) != len(ids):
            raise InvalidInputError(f"item {Counter(ids).most_common(1)[0][0]!r}: its {name} is given twice")
    # Check the values of all items at once: a decode step has hundreds.
    rows = [item.q_tokens for item in items]
    tokens, ends = list(chain.from_iterable(rows)), list(map(add, lengths, map(len, rows)))
    continues = [item.pos_offset for item in items] == lengths and all(map(gt, ends, lengths))
    are_ids = min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab_size
    if not continues or not are_ids or max(ends, default=0) > max_seq_len:
        for item, length in zip(items, lengths, strict=True):
            _check_item(item, length, vocab_size, max_seq_len)


def _check_item(item: UnifiedBatchItem, length: int, vocab_size: int, max_seq_len: int) -> None:
    name = f"item {item.seq_id!r}"
    end = length + len(item.q_tokens)
    if end == length:
        raise InvalidInputError(f"{name}: q_tokens is empty, expected at least one token")
    if item.pos_offset != length:
        raise InvalidInputError(f"{name}: pos_offset {item.pos_offset}, expected {length}, the length of its cache")
    for token in item.q_tokens:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"{name}: token id {token}, expected 0 <= id < {vocab_size}")
    if end > max_seq_len:
        raise SequenceTooLongError(f"{name}: would reach {end} tokens, expected at most {max_seq_len}")
