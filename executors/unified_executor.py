"""Base of both executors: checks, conversion of rows to items, rollback and counters around one forward."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

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
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor, check_capture, check_metadata
from paged.executors.row_batches import (
    decode_items,
    inputs_of,
    is_decode_step,
    prefill_items,
    results_mismatch,
    verify_item,
)
from paged.executors.types import (
    ExecutorCapabilities,
    ExecutorState,
    ExecutorStatus,
    MemoryRequirements,
    ModelInfo,
)
from paged.forward_step import validate_items
from paged.kernels.common.scalars import as_int, shown
from paged.models.logits_policy import apply_policies
from paged.seq_id import SeqId
from paged.step_embeds import check_embeds

_LOG = logging.getLogger("paged")
# One entry for each item, or what `UnifiedBatch.is_stacked` asks for.
Answers = list[torch.Tensor | None] | torch.Tensor


class UnifiedExecutor(ModelExecutor):
    """An executor in which every call that runs the model is one forward over batch items; a subclass runs it.

    Caches are identified by their cache_id: that of the handle if the caller gives one, else the item's seq_id.
    """

    metadata_keys = frozenset({"lora_adapter"})
    # Why calls are refused, where another process drives this one.
    refusal: str | None = None

    def __init__(
        self, info: ModelInfo, sequences: PagedKvCacheManager | AdaptedModel, memory: MemoryRequirements
    ) -> None:
        self._info, self._memory = info, memory
        self._sequences = sequences
        self._meter = WorkMeter(info.device, lambda: memory.weight_bytes + sequences.used_bytes)
        self._prompts = PromptProgress(lambda item: item.kv_cache or sequences.get_handle(item.seq_id))

    @abstractmethod
    def _run(self, batch: UnifiedBatch) -> Answers:
        """Run the forward of items that were checked; return what `unified_decode` returns."""

    def _choose_adapters(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Select the adapters that items with metadata name, before the forward."""
        for item in items:
            if item.metadata.get("lora_adapter") is not None:
                raise UnsupportedError(f"item {item.seq_id!r}: {type(self).__name__} takes no adapters")

    @property
    def takes_device_ids(self) -> bool:
        """Whether `UnifiedBatch.device_ids` are taken."""
        return True

    def info(self) -> ModelInfo:
        return self._info

    def capabilities(self) -> ExecutorCapabilities:
        manager, capacity = self.kv_manager, self.kv_capacity()
        num_blocks = None if manager is None else manager.stats().num_blocks
        max_sequence_length = self._info.max_sequence_length
        if capacity is not None:
            max_sequence_length = min(max_sequence_length, capacity)
        return ExecutorCapabilities(
            max_batch_size=num_blocks,
            max_sequence_length=max_sequence_length,
            supports_native_unified_decode=self.supports_native_unified_decode(),
            supports_chunked_prefill=True,
            supports_truncate=True,
            supports_prefix_cache=manager is not None and manager.config.enable_prefix_cache,
            supports_lora=False,
            supports_device_ids=self.takes_device_ids,
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
            groups = [prefill_items(rows) for rows in inputs_of(PrefillInput, inputs)]
            prompts = list(chain.from_iterable(groups))
            num_tokens = sum(len(prompt.q_tokens) for prompt in prompts)
            logits = self._logits_of(groups, ForwardWork(len(prompts), num_tokens, 0))
            outputs = []
            for rows, group in zip(logits, groups, strict=True):
                handles = [self._live_handle(item.cache_id) for item in group]
                outputs.append(PrefillOutput(rows.unsqueeze(1), handles))
            return outputs

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run all tokens in one forward."""
        with self._call():
            groups = [decode_items(step) for step in inputs_of(DecodeInput, inputs)]
            logits = self._logits_of(groups, ForwardWork(0, 0, sum(map(len, groups))))
            return [DecodeOutput(rows, step.kv_cache) for rows, step in zip(logits, inputs, strict=True)]

    def unified_decode(self, batch: UnifiedBatch) -> Answers:  # type: ignore[override]
        with self._call():
            if not isinstance(batch, UnifiedBatch):
                raise InvalidInputError(f"batch: {shown(batch)}, expected UnifiedBatch(items)")
            if batch.prepared is not None and batch.prepared.only_decodes:
                return self._forward(batch, ForwardWork(0, 0, len(batch.columns.counts)))
            if batch.returns_hidden and not self.capabilities().supports_hidden_states:
                raise UnsupportedError(f"returns_hidden: {self._info.model_id} returns logits only")
            if batch.captured is not None:
                check_capture(self, has_experts=batch.captured.has_experts)
            _ = batch.columns  # an item of another type is refused here
            self._check_device_ids(batch)
            work = self._prompts.work_of(batch)
            answers = self._forward(batch, work)
            if work.prefill_tokens:
                self._prompts.update(batch.items)
            return answers

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run all tokens of the sequence in one forward; each counts as a decode."""
        with self._call():
            if not inputs_of(DecodeInput, inputs):
                return []
            policies = [step.logits_policy for step in inputs]

            def choose(answers: Answers) -> Answers:
                (logits,) = answers
                assert logits is not None
                return list(apply_policies(logits, policies))

            work = ForwardWork(0, 0, len(inputs))
            rows = self._forward(UnifiedBatch([verify_item(inputs)]), work, choose)
            outputs = []
            for row, step in zip(rows, inputs, strict=True):
                assert row is not None
                outputs.append(DecodeOutput(logits=row.unsqueeze(0), kv_cache=step.kv_cache))
            return outputs

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

    def _call(self) -> _Call:
        """Return the context of a call, after checking that calls are taken."""
        if self._meter.state is ExecutorState.SHUTDOWN:
            raise ExecutorShutDownError(f"{self._info.model_id}: the executor was shut down")
        if self.refusal is not None:
            raise UnsupportedError(self.refusal)
        return _Call(self._meter)

    def _logits_of(self, groups: Sequence[Sequence[UnifiedBatchItem]], work: ForwardWork) -> list[torch.Tensor]:
        """Run all groups of final items in one forward; return the logits [len(group), V] of each."""
        results = self._forward(UnifiedBatch(list(chain.from_iterable(groups))), work)
        rows = [row for row in results if row is not None]
        logits = []
        start = 0
        for group in groups:
            logits.append(torch.stack(rows[start : start + len(group)]))
            start += len(group)
        return logits

    def _forward(
        self, batch: UnifiedBatch, work: ForwardWork, finish: Callable[[Answers], Answers] | None = None
    ) -> Answers:
        """Check the items, run them and count the work; if anything raises, roll every cache back.

        finish: turns the answers into the result; if it raises, the caches are rolled back, too.
        """
        if not batch.columns.counts:
            return []
        is_prepared = batch.prepared is not None
        new_ids: set[SeqId] = set()
        if not is_prepared:
            new_ids = self._check_items(batch)
        try:
            if not is_prepared:
                with_metadata = [item for item in batch.items if item.metadata]
                for item in with_metadata:
                    check_metadata(self, f"item {item.seq_id!r}: metadata", item.metadata)
                self._choose_adapters(with_metadata)
            start = self._meter.begin()
            answers = self._run(batch)
            if not isinstance(answers, torch.Tensor):
                answers = _answers_by_item(batch.items, answers)
            if finish is not None:
                answers = finish(answers)
            self._meter.end(work, start)
        except BaseException:
            for item in batch.items:
                handle = self._sequences.get_handle(item.cache_id)
                if handle is not None:
                    length = None if handle.cache_id in new_ids else item.pos_offset
                    self._roll_back(handle, length)
            raise
        return answers

    def _check_device_ids(self, batch: UnifiedBatch) -> None:
        """Check the items whose tokens only the device knows."""
        info, ids, count = self._info, batch.device_ids, len(batch.items)
        if ids is None:
            return
        if not self.takes_device_ids:
            raise UnsupportedError(f"device_ids: {info.model_id} takes token ids of the host only")
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) > count or ids.device != info.device:
            shape = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            raise InvalidInputError(f"device_ids: {shape}, expected int64 [n <= {count}] on {info.device}")
        longest = max(batch.columns.counts[: len(ids)], default=1)
        if longest > 1:
            raise InvalidInputError(f"device_ids: beside {longest} q_tokens of an item, expected 1")

    def _check_items(self, batch: UnifiedBatch) -> set[SeqId]:
        """Raise unless the items can run; return the caches that do not exist yet."""
        seq_ids, kv_caches = batch.columns.seq_ids, batch.columns.kv_caches
        cache_ids = []
        for seq_id, kv_cache in zip(seq_ids, kv_caches, strict=True):
            cache_id = seq_id if kv_cache is None else kv_cache.cache_id
            cache_ids.append(cache_id)
        handles = self._sequences.get_handles(cache_ids)
        if kv_caches != handles:
            for kv_cache, handle in zip(kv_caches, handles, strict=True):
                if kv_cache is not None and handle is not kv_cache:
                    self._check_handle(kv_cache)
        validate_items(
            batch.items, handles, vocab_size=self._info.vocab_size, max_seq_len=self._info.max_sequence_length
        )
        if batch.columns.has_embeds:
            check_embeds(batch.items, self.embeds_limits)
        if None not in handles:
            return set()
        new_ids = set()
        for cache_id, handle in zip(cache_ids, handles, strict=True):
            if handle is None:
                new_ids.add(cache_id)
        return new_ids

    def _roll_back(self, handle: KvCacheHandle, length: int | None) -> None:
        """Truncate a cache to its former length; free it if `length` is None, as it did not exist before the call."""
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


def _answers_by_item(
    items: Sequence[UnifiedBatchItem], answers: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return one answer for each item, None for those that are not final.

    Raises:
        PagedError: an answer is missing, or has another number of rows.
    """
    mismatch = results_mismatch(items, answers)
    if mismatch is not None:
        raise PagedError(f"the forward returned {mismatch}")
    final = []
    for item, answer in zip(items, answers, strict=True):
        if not item.is_final_chunk:
            answer = None
        final.append(answer)
    return final


class _Call:
    """Tracks the state during a call, and whether it fails; no gradients are recorded in it."""

    def __init__(self, meter: WorkMeter) -> None:
        self._meter = meter
        self._records_gradients = torch.is_grad_enabled()

    def __enter__(self) -> None:
        self._meter.state = ExecutorState.BUSY
        if self._records_gradients:  # with `torch.no_grad` a call takes 9 us in place of 5
            torch.set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._records_gradients:
            torch.set_grad_enabled(True)
        if error is None or isinstance(error, PagedError):
            self._meter.state = ExecutorState.READY
        else:
            self._meter.state = ExecutorState.FAILED
        self._meter.failed_calls += error is not None


@dataclass(frozen=True)
class ForwardWork:
    """Work of one forward: prompts completed, tokens run for prompts, and tokens decoded."""

    prefills: int
    prefill_tokens: int
    decodes: int


class PromptProgress:
    """Tracks which prompts have chunks left; `handle_of` returns the live handle of an item, None without one."""

    def __init__(self, handle_of: Callable[[UnifiedBatchItem], KvCacheHandle | None]) -> None:
        self._handle_of = handle_of
        self._unfinished: set[KvCacheHandle] = set()

    def work_of(self, batch: UnifiedBatch) -> ForwardWork:
        """Return the work of a batch's forward."""
        num_decodes = num_decode_tokens = 0
        for item in batch.items:
            if is_decode_step(item) and not self._is_unfinished(self._handle_of(item), item.pos_offset):
                num_decodes += 1
                num_decode_tokens += len(item.q_tokens)
        num_prefill_tokens = batch.total_q_tokens - num_decode_tokens
        return ForwardWork(batch.num_sampled_items - num_decodes, num_prefill_tokens, num_decode_tokens)

    def update(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Record which prompts have chunks left, after a forward with some."""
        unfinished = self._unfinished.copy()
        for item in items:
            handle = self._handle_of(item)
            if handle is None:
                continue
            if item.is_final_chunk:
                unfinished.discard(handle)
            else:
                unfinished.add(handle)
        self._unfinished = {handle for handle in unfinished if handle.is_valid}

    def _is_unfinished(self, handle: KvCacheHandle | None, length: int) -> bool:
        """Return whether the next token belongs to a prompt: chunks are left, or only a cached prefix is done."""
        if handle is None:
            return False
        return 0 < handle.num_cached_tokens == length or handle in self._unfinished


class WorkMeter:
    """Counts the work of an executor; `memory_bytes` returns the memory it uses at the moment."""

    def __init__(self, device: torch.device, memory_bytes: Callable[[], int]) -> None:
        self.state = ExecutorState.READY
        self._device = device
        self._memory_bytes = memory_bytes
        self._peak_memory_bytes = memory_bytes()
        self.prefills = self.decodes = self._prefill_tokens = self._forwards = self.failed_calls = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._untimed: deque[tuple[ForwardWork, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> torch.cuda.Event | float:
        """Return the start of a forward: on a GPU an event of the stream, else the time in seconds."""
        return self._event() if self._device.type == "cuda" else perf_counter()

    def end(self, work: ForwardWork, start: torch.cuda.Event | float) -> None:
        """Count and time the work of a forward that has succeeded since `start`."""
        if isinstance(start, float):
            self._add_seconds(work, perf_counter() - start)
        else:
            self._untimed.append((work, start, self._event()))
            self._collect_times(wait=False)
        self._forwards += 1
        self.prefills += work.prefills
        self._prefill_tokens += work.prefill_tokens
        self.decodes += work.decodes
        self._peak_memory_bytes = max(self._peak_memory_bytes, self._memory_bytes())

    def status(self) -> ExecutorStatus:
        """Return the totals; waits for forwards that still run on a GPU."""
        self._collect_times(wait=True)
        return ExecutorStatus(
            state=self.state,
            prefill_count=self.prefills,
            decode_count=self.decodes,
            prefill_tokens=self._prefill_tokens,
            failed_calls=self.failed_calls,
            forwards=self._forwards,
            average_prefill_seconds=self._prefill_seconds / max(self.prefills, 1),
            average_decode_seconds=self._decode_seconds / max(self.decodes, 1),
            memory_bytes=self._memory_bytes(),
            peak_memory_bytes=self._peak_memory_bytes,
        )

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect_times(self, *, wait: bool) -> None:
        while self._untimed and (wait or self._untimed[0][2].query()):
            work, start, end = self._untimed.popleft()
            end.synchronize()
            self._add_seconds(work, start.elapsed_time(end) / 1e3)

    def _add_seconds(self, work: ForwardWork, seconds: float) -> None:
        prefill_share = work.prefill_tokens / (work.prefill_tokens + work.decodes)
        self._prefill_seconds += seconds * prefill_share
        self._decode_seconds += seconds * (1 - prefill_share)
