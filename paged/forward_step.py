"""A forward as a transaction on the cache: either all sequences advance, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import KvSlotRequest, UnifiedBatchItem, VerifyLogits
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.cache.slot_reservation import KvSlotReservation
from paged.errors import InvalidInputError, PagedError, SequenceTooLongError
from paged.kernels.attention.plan import AttentionPlan
from paged.metadata import AttentionMetadata, HostMetadata, OutputRows
from paged.seq_id import SeqId
from paged.staging import to_device


@dataclass(eq=False)
class ForwardStep:
    """The input of a model's forward: host arrays, copied to the device together on first use there.

    Attributes:
        token_ids: int64 [num_tokens], the items' tokens one after the other; `input_ids` on the device.
        device_ids: the tokens, if only the device knows them; `token_ids` are then placeholders.
        host: the metadata; `metadata` on the device.
        row_ids: int64 [num_sampled_rows], in order, the last row of every item with `is_final_chunk`, or all of its
            rows under VerifyLogits; `sample_rows` on the device.
        handles: one for each item.
    """

    token_ids: NDArray[np.int64]
    host: HostMetadata
    row_ids: NDArray[np.int64]
    handles: tuple[KvCacheHandle, ...]
    device: torch.device
    device_ids: torch.Tensor | None = None

    @property
    def input_ids(self) -> torch.Tensor:
        return self._moved[0] if self.device_ids is None else self.device_ids

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

    def upload(self) -> None:
        """Copy the arrays to the device unless they are already there."""
        _ = self._moved

    def fill(self, token_ids: NDArray[np.int64]) -> None:
        """Replace the tokens of the same rows, on the device too if they are there."""
        self.token_ids = token_ids
        if "_moved" in self.__dict__:
            to_device((token_ids,), self.device, out=self._moved[0].view(torch.uint8))

    @cached_property
    def _moved(self) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, OutputRows | None]:
        offsets: NDArray[np.int32] = np.searchsorted(self.row_ids, self.host.cu_seqlens_q).astype(np.int32)
        arrays: list[NDArray[Any]] = [self.token_ids, self.row_ids, offsets, *self.host.arrays]
        input_ids, sample_rows, cu_seqlens_q, *rest = to_device(arrays, self.device)
        metadata = self.host.over(rest)
        if len(self.row_ids) == len(self.token_ids):
            return input_ids, sample_rows, metadata, None
        longest = int(np.diff(offsets).max())
        plan = AttentionPlan(cu_seqlens_q, metadata.seq_lens, max_seqlen_q=longest, max_seqlen_k=self.host.max_seqlen_k)
        return input_ids, sample_rows, metadata, OutputRows(sample_rows, cu_seqlens_q, longest, plan)


class PreparedStep:
    """A forward of one more token of each sequence, with its blocks and metadata, before the tokens are known.

    If another call changes one of the sequences meanwhile, that sequence keeps its blocks, and the step can only be
    cancelled. is_used: whether a forward has taken the step.
    """

    def __init__(
        self, manager: PagedKvCacheManager, handles: Sequence[KvCacheHandle], *, vocab_size: int, max_seq_len: int
    ) -> None:
        """vocab_size, max_seq_len: the model's.

        Raises:
            SequenceTooLongError: a sequence would reach beyond `max_seq_len`.
            InvalidInputError, StaleHandleError, OutOfBlocksError: as `forward_step`; nothing has changed.
        """
        for handle in handles:
            if handle.num_tokens >= max_seq_len:
                raise SequenceTooLongError(f"{handle!r}: full, expected at most {max_seq_len} tokens with the next one")
        rows = np.arange(len(handles), dtype=np.int64)
        self.step, self._reservation = _reserve(manager, handles, [1] * len(handles), np.zeros_like(rows), rows)
        self.is_used = False
        self._manager = manager
        self._vocab_size = vocab_size
        self._fitting: Sequence[UnifiedBatchItem] | None = None

    def fits(self, items: Sequence[UnifiedBatchItem]) -> bool:
        """Return whether this is the forward of `items`, which are then valid.

        They must be final and have one token of the vocabulary for each of these sequences, none of which has changed
        since.
        """
        if not self._reservation.is_whole:
            return False
        if items is not self._fitting:  # both the executor and its model check
            handles = tuple([item.kv_cache or self._manager.get_handle(item.seq_id) for item in items])
            if handles != self.step.handles or len({item.seq_id for item in items}) != len(items):
                return False
            for item, position in zip(items, self.step.host.positions.tolist(), strict=True):
                is_next = len(item.q_tokens) == 1 and item.pos_offset == position and item.is_final_chunk
                if not is_next or not 0 <= item.q_tokens[0] < self._vocab_size:
                    return False
            self._fitting = items
        return True

    def use_ids(self, token_ids: torch.Tensor) -> None:
        """Run these tokens, int64 [num_seqs] on the device, instead of those of the items, which may then be anything.

        The cache does not record them, see `PagedKvCacheManager.append_tokens`.
        """
        self.step.device_ids = token_ids

    def take(self, items: Sequence[UnifiedBatchItem]) -> tuple[ForwardStep, KvSlotReservation]:
        """Return the step with the tokens of items that fit, and its reservation."""
        self.step.fill(np.array([item.q_tokens[0] for item in items], np.int64))
        self.is_used = True
        return self.step, self._reservation

    def cancel(self) -> None:
        """Free its blocks; does nothing if it was used or cancelled."""
        self._reservation.rollback()


@contextmanager
def forward_step(
    manager: PagedKvCacheManager, items: Sequence[UnifiedBatchItem], prepared: PreparedStep | None = None
) -> Iterator[ForwardStep]:
    """Reserve capacity for all items and yield their forward; then lengths grow and full blocks are published.

    An item without `kv_cache` uses the manager's sequence `seq_id`, created on first use. An exception rolls back
    lengths, capacity and the sequences created here. prepared: a step that fits the items.

    Raises:
        InvalidInputError: a handle is not the manager's, or two items use the same one.
        StaleHandleError: a handle has been freed or is swapped out.
        SequenceTooLongError: a sequence would exceed the cache's `max_seq_len`.
        OutOfBlocksError: the pool has too few free blocks.
    """
    new_ids: list[SeqId] = []  # recorded before the sequences are made, so that an interrupt loses none
    reservation: KvSlotReservation | None = None
    try:
        if prepared is not None:
            step, reservation = prepared.take(items)
        else:
            handles = []
            for item in items:
                handle = item.kv_cache or manager.get_handle(item.seq_id)
                if handle is None:
                    new_ids.append(item.seq_id)
                    handle = manager.allocate(item.seq_id)
                handles.append(handle)
            counts = [len(item.q_tokens) for item in items]
            tokens = np.fromiter(chain.from_iterable(item.q_tokens for item in items), np.int64, sum(counts))
            step, reservation = _reserve(manager, handles, counts, tokens, _sample_rows(items, counts))
        yield step
        known_ids = [item.q_tokens for item in items] if step.device_ids is None else None
        reservation.commit(known_ids)  # last, because it cannot be undone
    except BaseException:
        if reservation is not None:
            reservation.rollback()
        for seq_id in new_ids:
            if (made := manager.get_handle(seq_id)) is not None:
                manager.free(made)
        raise


def _reserve(
    manager: PagedKvCacheManager,
    handles: Sequence[KvCacheHandle],
    counts: Sequence[int],
    token_ids: NDArray[np.int64],
    row_ids: NDArray[np.int64],
) -> tuple[ForwardStep, KvSlotReservation]:
    requests = [
        KvSlotRequest(handle.cache_id, handle.num_tokens + count) for handle, count in zip(handles, counts, strict=True)
    ]
    reservation: KvSlotReservation | None = None
    try:
        reservation = manager.reserve(requests)
        host = manager.host_metadata(zip(handles, counts, strict=True))
        return ForwardStep(token_ids, host, row_ids, tuple(handles), manager.device), reservation
    except BaseException:
        if reservation is not None:
            reservation.rollback()
        raise


def _sample_rows(items: Sequence[UnifiedBatchItem], counts: Sequence[int]) -> NDArray[np.int64]:
    ends: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
    final = np.array([item.is_final_chunk for item in items], bool)
    verified = np.array([isinstance(item.logits_policy, VerifyLogits) for item in items], bool)
    if not (final & verified).any():
        last_rows: NDArray[np.int64] = ends[final] - 1
        return last_rows
    firsts = np.where(verified, ends - counts, ends - 1)
    return np.concatenate([np.arange(*rows) for rows in zip(firsts[final], ends[final], strict=True)])


class StepPreparer:
    """Holds at most one prepared step. The next forward uses or cancels it; preparing another cancels it."""

    def __init__(self, manager: PagedKvCacheManager, *, vocab_size: int, max_seq_len: int) -> None:
        """vocab_size, max_seq_len: the model's."""
        self._manager = manager
        self._limits = {"vocab_size": vocab_size, "max_seq_len": max_seq_len}
        self._prepared: PreparedStep | None = None

    def prepare(self, handles: Sequence[KvCacheHandle]) -> PreparedStep | None:
        """Prepare a forward of one more token of each sequence; None if blocks are missing."""
        self._cancel()
        try:
            self._prepared = PreparedStep(self._manager, handles, **self._limits)
        except PagedError:
            return None
        return self._prepared

    def expects(self, items: Sequence[UnifiedBatchItem]) -> bool:
        """Return whether the forward of `items` is prepared, which implies that they are valid."""
        return self._prepared is not None and self._prepared.fits(items)

    def forward(self, items: Sequence[UnifiedBatchItem]) -> AbstractContextManager[ForwardStep]:
        """Run `forward_step` with the prepared step if it fits."""
        if not self.expects(items):
            self._cancel()
        prepared, self._prepared = self._prepared, None
        return forward_step(self._manager, items, prepared)

    def _cancel(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.cancel()


def validate_items(
    items: Sequence[UnifiedBatchItem],
    *,
    vocab_size: int,
    max_seq_len: int,
    length_of: Callable[[UnifiedBatchItem], int],
) -> None:
    """Check a batch before anything is written. An empty batch is legal.

    Args:
        length_of: returns the number of tokens in the cache for an item, 0 for an unknown sequence.

    Raises:
        InvalidInputError: two items of the same sequence, an item without tokens, a `pos_offset` that is not the
            cache's length, or a token id outside [0, vocab_size).
        SequenceTooLongError: an item would reach beyond `max_seq_len`.
    """
    for name in ("seq_id", "cache_id"):
        ids = list(map(attrgetter(name), items))
        if len(set(ids)) != len(ids):
            raise InvalidInputError(f"item {Counter(ids).most_common(1)[0][0]!r}: its {name} is given twice")
    for item in items:
        tokens, length = item.q_tokens, length_of(item)
        end = length + len(tokens)
        is_known = length == item.pos_offset and length < end <= max_seq_len
        if not is_known or min(tokens) < 0 or max(tokens) >= vocab_size:
            _refuse(item, length, vocab_size, max_seq_len)


def _refuse(item: UnifiedBatchItem, length: int, vocab_size: int, max_seq_len: int) -> NoReturn:
    """Raise the error of an invalid item."""
    name, end = f"item {item.seq_id!r}", length + len(item.q_tokens)
    if end == length:
        raise InvalidInputError(f"{name}: q_tokens is empty, expected at least one token")
    if item.pos_offset != length:
        raise InvalidInputError(f"{name}: pos_offset {item.pos_offset}, expected {length}, the length of its cache")
    for token in item.q_tokens:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"{name}: token id {token}, expected 0 <= id < {vocab_size}")
    raise SequenceTooLongError(f"{name}: would reach {end} tokens, expected at most {max_seq_len}")
