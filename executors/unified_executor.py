"""Base of both executors: checks, conversion of rows to items, rollback and counters around one forward."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from paged.batch import (
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
    UnifiedBatchItem,
)
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, StaleHandleError, UnsupportedError
from paged.executors.adapted_model import AdaptedModel
from paged.executors.isolation import describe, quietly, raise_exit
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor
from paged.executors.row_batches import decode_items, prefill_items, results_mismatch, verify_item
from paged.executors.types import (
    ExecutorCapabilities,
    ExecutorState,
    ExecutorStatus,
    ForwardWork,
    MemoryRequirements,
    ModelInfo,
    PromptProgress,
    WorkMeter,
)
from paged.forward_step import PreparedStep, validate_items
from paged.kernels.common.scalars import as_int
from paged.models.logits_policy import apply_policies
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")


class UnifiedExecutor(ModelExecutor):
    """An executor in which every call that runs the model is one forward over batch items; a subclass runs it.

    Caches are identified by their cache_id: that of the handle if the caller gives one, else the item's seq_id.
    """

    def __init__(
        self, info: ModelInfo, sequences: PagedKvCacheManager | AdaptedModel, memory: MemoryRequirements
    ) -> None:
        self._info, self._memory = info, memory
        self._sequences = sequences
        self._meter = WorkMeter(info.device, lambda: memory.weight_bytes + sequences.used_bytes)
        self._prompts = PromptProgress(lambda item: item.kv_cache or sequences.get_handle(item.seq_id))
        self._expected: tuple[PreparedStep, ForwardWork] | None = None

    @abstractmethod
    def _run(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Run the forward; return one entry for each item, as `unified_decode` does."""

    def _choose_adapters(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Select the adapters that items name, before the forward."""
        for item in items:
            if item.metadata.get("lora_adapter") is not None:
                raise UnsupportedError(f"item {item.seq_id!r}: {type(self).__name__} takes no adapters")

    def _prepare_step(self, handles: Sequence[KvCacheHandle]) -> PreparedStep | None:
        """Implement `prepare_step`; the next forward takes the prepared step by itself."""
        return None

    def info(self) -> ModelInfo:
        return self._info

    def capabilities(self) -> ExecutorCapabilities:
        manager, capacity = self.kv_manager, self.kv_capacity()
        return ExecutorCapabilities(
            max_batch_size=None if manager is None else manager.stats().num_blocks,
            max_sequence_length=min(self._info.max_sequence_length, sys.maxsize if capacity is None else capacity),
            supports_native_unified_decode=self.supports_native_unified_decode(),
            supports_chunked_prefill=True,
            supports_truncate=True,
            supports_prefix_cache=manager is not None and manager.config.enable_prefix_cache,
            supports_lora=False,
            memory_requirements=self._memory,
        )

    def status(self) -> ExecutorStatus:
        return self._meter.status()

    @property
    def prefill_count(self) -> int:
        """Number of prompts completed."""
        return self._meter.prefills

    @property
    def decode_count(self) -> int:
        """Number of tokens run one at a time after a prompt."""
        return self._meter.decodes

    def supports_native_unified_decode(self) -> bool:
        return True

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        return self.batch_prefill([inputs])[0]

    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        return self.batch_decode([inputs])[0]

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Run all prompts in one forward; return the logits of each row's last token, float32 [B, 1, V]."""
        with self._call():
            groups = [prefill_items(one) for one in inputs]
            num_tokens = sum(len(item.q_tokens) for group in groups for item in group)
            logits = self._logits_of(groups, ForwardWork(sum(map(len, groups)), num_tokens, 0))
            return [
                PrefillOutput(rows.unsqueeze(1), [self._live_handle(item.cache_id) for item in group])
                for rows, group in zip(logits, groups, strict=True)
            ]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run all tokens in one forward."""
        with self._call():
            groups = [decode_items(one) for one in inputs]
            logits = self._logits_of(groups, ForwardWork(0, 0, sum(map(len, groups))))
            return [DecodeOutput(rows, one.kv_cache) for rows, one in zip(logits, inputs, strict=True)]

    def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        with self._call():
            expected, self._expected = self._expected, None
            is_expected = expected is not None and expected[0].fits(batch.items)
            work = expected[1] if expected is not None and is_expected else self._prompts.work_of(batch)
            try:
                results = self._forward_items(batch.items, work, is_checked=is_expected)
            finally:  # an error may come before the forward takes it
                if expected is not None:
                    expected[0].cancel()
            if work.prefill_tokens:
                self._prompts.update(batch.items)
            return results

    def prepare_step(self, handles: Sequence[KvCacheHandle]) -> PreparedStep | None:
        """Prepare a `unified_decode` of one more token of each sequence, in this order, while the device is busy.

        Blocks are reserved and metadata is built. If the next call that runs tokens is this step, it uses them;
        otherwise it frees the blocks.

        Returns:
            The step; None if the cache is full or the step cannot be prepared.
        """
        prepared, self._expected = self._prepare_step(handles), None
        if prepared is not None:
            self._expected = prepared, self._prompts.work_of_next_tokens(handles)
        return prepared

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run all tokens of the sequence in one forward; each counts as a decode."""
        with self._call():
            if not inputs:
                return []
            item = verify_item(inputs)
            with self._all_or_nothing([item], ForwardWork(0, 0, len(inputs))):
                logits = torch.cat([row for row in self._run([item]) if row is not None])
                if logits.shape[0] != len(inputs):
                    raise PagedError(f"the forward returned {logits.shape[0]} rows of logits for {len(inputs)} tokens")
                rows = apply_policies(logits, [one.logits_policy for one in inputs])
            return [
                DecodeOutput(logits=row.unsqueeze(0), kv_cache=one.kv_cache)
                for row, one in zip(rows, inputs, strict=True)
            ]

    def truncate_kv(self, kv_cache: KvCacheHandle, new_len: int) -> None:
        with self._call():
            self._check_handle(kv_cache)
            self._truncate(kv_cache, new_len)

    def release_cache(self, seq_id: SeqId) -> None:
        with self._call():
            handle = self._sequences.get_handle(seq_id)
            if handle is not None:
                self._sequences.free(handle)

    def shutdown(self) -> None:
        self._meter.state = ExecutorState.SHUTDOWN

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self._meter.state is ExecutorState.SHUTDOWN:
            raise ExecutorShutDownError(f"{self._info.model_id}: the executor was shut down")
        with self._meter.call(), torch.no_grad():
            yield

    def _logits_of(self, groups: Sequence[Sequence[UnifiedBatchItem]], work: ForwardWork) -> list[torch.Tensor]:
        """Run all groups of final items in one forward; return the logits [len(group), V] of each."""
        results = self._forward_items([item for group in groups for item in group], work)
        rows = (row for row in results if row is not None)
        return [torch.stack([*islice(rows, len(group))]) for group in groups]

    def _forward_items(
        self, items: Sequence[UnifiedBatchItem], work: ForwardWork, *, is_checked: bool = False
    ) -> list[torch.Tensor | None]:
        if not items:
            return []

        with self._all_or_nothing(items, work, is_checked=is_checked):
            results = self._run(items)
            if (mismatch := results_mismatch(items, results)) is not None:
                raise PagedError(f"the forward returned {mismatch}")
        return [row if item.is_final_chunk else None for item, row in zip(items, results, strict=True)]

    @contextmanager
    def _all_or_nothing(
        self, items: Sequence[UnifiedBatchItem], work: ForwardWork, *, is_checked: bool = False
    ) -> Iterator[None]:
        """Check the items and count the work; if the checks or the forward raise, roll every cache back.

        Args:
            is_checked: the items have been checked, and all their sequences exist.
        """
        new = set() if is_checked else self._check_items(items)
        try:
            self._choose_adapters(items)
            with self._meter.forward(work):
                yield
        except BaseException:
            for item in items:
                handle = self._sequences.get_handle(item.cache_id)
                if handle is not None:
                    self._roll_back(handle, None if handle.cache_id in new else item.pos_offset)
            raise

    def _check_items(self, items: Sequence[UnifiedBatchItem]) -> set[SeqId]:
        """Raise unless the items can run; return the caches that do not exist yet."""
        validate_items(
            items,
            vocab_size=self._info.vocab_size,
            max_seq_len=self._info.max_sequence_length,
            length_of=self._length,
        )
        started = {item.cache_id for item in items if item.pos_offset == 0}
        return {cache_id for cache_id in started if self._sequences.get_handle(cache_id) is None}

    def _roll_back(self, handle: KvCacheHandle, length: int | None) -> None:
        """Truncate a cache to its former length, or free it if that is None, because it did not exist."""
        if length is not None:
            try:
                if handle.num_tokens > length:
                    self._sequences.truncate(handle, length)
                return
            except BaseException as error:
                raise_exit(error)
                # Its number of tokens is unknown, so it is dropped and its handle becomes invalid.
                _LOG.warning("sequence %r is dropped: %s", handle.cache_id, describe(error))
        quietly(self._sequences.free, handle)

    def _truncate(self, handle: KvCacheHandle, new_len: int) -> None:
        new_len, length = as_int("new_len", new_len, low=None), handle.num_tokens
        if not 0 <= new_len <= length:
            raise InvalidInputError(f"new_len: {new_len}, expected 0 to {length}, the length of {handle.cache_id!r}")
        self._sequences.truncate(handle, new_len)

    def _length(self, item: UnifiedBatchItem) -> int:
        handle = self._sequences.get_handle(item.cache_id)
        if item.kv_cache is not None and handle is not item.kv_cache:
            self._check_handle(item.kv_cache)
        return 0 if handle is None else handle.num_tokens

    def _check_handle(self, handle: KvCacheHandle) -> None:
        if not handle.is_valid:
            raise StaleHandleError(f"kv_cache: {handle!r} has been freed")
        if self._sequences.get_handle(handle.cache_id) is not handle:
            raise InvalidInputError(f"kv_cache: {handle!r} belongs to another executor or manager")

    def _live_handle(self, cache_id: SeqId) -> KvCacheHandle:
        handle = self._sequences.get_handle(cache_id)
        if handle is None:
            raise InvalidInputError(f"cache_id: {cache_id!r} has no cache")
        return handle
