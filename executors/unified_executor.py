"""Base of the executors: checks, conversion of rows to items, rollback and counters around one forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

import torch

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, StaleHandleError, UnsupportedError
from paged.executors.foreign import rows_of
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor, check_capture, check_metadata
from paged.executors.row_batches import (
    decode_items,
    inputs_of,
    prefill_items,
    verify_item,
)
from paged.executors.types import (
    ExecutorCapabilities,
    ExecutorState,
    ExecutorStatus,
    MemoryRequirements,
    ModelInfo,
)
from paged.kernels.core.errors import as_int, shown
from paged.models.logits_policy import Rows, apply_policies, by_item
from paged.seq_id import SeqId
from paged.step.batch import (
    CapturedStates,
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
    UnifiedBatchItem,
)
from paged.step.batch_step import step_of, validate_items
from paged.step.embeds import check_embeds
from paged.step.step import Step

# One entry for each item, or a stacked tensor, see `UnifiedBatch.is_stacked`.
Answers = list[torch.Tensor | None] | torch.Tensor


class UnifiedExecutor(ModelExecutor):
    """Executor base in which every call is one forward over batch items; a subclass gives the forward, `_run`.

    A sequence has the id of its handle if the caller gives one, else the item's seq_id.
    """

    metadata_keys = frozenset({"lora_adapter"})
    # Reason to refuse calls if another process drives this one, else None.
    refusal: str | None = None
    # Whether the model needs the items that a step was made from, see `Step.items`.
    _model_takes_items = False
    # Runs the forward of a step; returns the answers of its wanted rows.
    _run: Callable[[Step], Rows]

    def __init__(self, info: ModelInfo, sequences: PagedKvCacheManager, memory: MemoryRequirements) -> None:
        """sequences: cache manager of the sequences, also if `kv_manager` is None."""
        self._info, self._memory = info, memory
        self.sequences = sequences
        self._meter = WorkMeter(info.device, lambda: memory.weight_bytes + sequences.used_bytes)
        self._prompts = PromptProgress()

    def _choose_adapters(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Select the adapters named in items' metadata, before the forward."""
        for item in items:
            if item.metadata.get("lora_adapter") is not None:
                raise UnsupportedError(f"item {item.seq_id!r}: {type(self).__name__} takes no adapters")

    @property
    def takes_device_ids(self) -> bool:
        """Whether `UnifiedBatch.device_ids` are supported."""
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
        """Number of tokens decoded after a prompt."""
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
            num_tokens = sum(len(item.q_tokens) for item in chain.from_iterable(groups))
            logits = self._logits_of(groups, ForwardWork(sum(map(len, groups)), num_tokens, 0))
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
            if batch.returns_hidden and not self.capabilities().supports_hidden_states:
                raise UnsupportedError(f"returns_hidden: {self._info.model_id} returns logits only")
            if batch.captured is not None:
                check_capture(self, has_experts=batch.captured.has_experts)
            if not batch.counts:
                return []
            self._check_device_ids(batch)
            with self._begun(
                batch.items,
                device_ids=batch.device_ids,
                returns_hidden=batch.returns_hidden,
                captured=batch.captured,
            ) as step:
                rows = self._forward(step)
                if batch.is_stacked and isinstance(rows, torch.Tensor):
                    return rows
                return by_item(batch.items, rows)

    def run(self, step: Step) -> Rows:
        """Run a step with reserved capacity and commit it, or roll it back after an error.

        The one call that an engine makes. Returns the answers of the step's wanted rows.
        """
        if self.is_replaced and not step.is_invariant:  # `UnifiedBatch` has no word for invariant rows
            return self._run_replaced(step)
        with self._call(), step:
            return self._forward(step)

    @property
    def takes_items(self) -> bool:
        """Whether steps need the items that they were made from, see `Step.items`."""
        return self._model_takes_items or self.is_replaced

    @property
    def is_replaced(self) -> bool:
        """Whether a subclass or a caller has put another function in place of `unified_decode`.

        It then gets every batch of an engine too, except for `completion_logprobs`, which needs invariant rows.
        """
        return getattr(self.unified_decode, "__func__", None) is not UnifiedExecutor.unified_decode

    def _run_replaced(self, step: Step) -> Rows:
        """Run a step by the function in place of `unified_decode`, which reserves and commits by itself."""
        with step:
            if step.reservation is not None:
                step.reservation.leave()  # keep the capacity for the reservation of `unified_decode`
                step.reservation = None
            batch = UnifiedBatch(step.items, step.device_ids, is_stacked=True, captured=step.captured)
            return rows_of(step, self.unified_decode(batch))

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run the sequence's tokens in one forward; each counts as a decode."""
        with self._call():
            if not inputs_of(DecodeInput, inputs):
                return []
            policies = [step.logits_policy for step in inputs]
            with self._begun([verify_item(inputs)]) as verified:
                logits = self._forward(verified, ForwardWork(0, 0, len(inputs)))
                assert isinstance(logits, torch.Tensor)
                rows = apply_policies(logits, policies)
            outputs = []
            for row, step in zip(rows, inputs, strict=True):
                outputs.append(DecodeOutput(logits=row.unsqueeze(0), kv_cache=step.kv_cache))
            return outputs

    def truncate_kv(self, kv_cache: KvCacheHandle, new_len: int) -> None:
        with self._call():
            self._check_handle(kv_cache)
            self._truncate(kv_cache, new_len)

    def release_cache(self, seq_id: SeqId) -> None:
        with self._call():
            handle = self.sequences.get_handle(seq_id)
            if handle is not None:
                self.sequences.free(handle)

    def shutdown(self) -> None:
        self._meter.state = ExecutorState.SHUTDOWN

    def _call(self) -> _Call:
        """Return the context of a call, after checking that the executor accepts calls."""
        if self._meter.state is ExecutorState.SHUTDOWN:
            raise ExecutorShutDownError(f"{self._info.model_id}: the executor was shut down")
        if self.refusal is not None:
            raise UnsupportedError(self.refusal)
        return _Call(self._meter)

    def _logits_of(self, groups: Sequence[Sequence[UnifiedBatchItem]], work: ForwardWork) -> list[torch.Tensor]:
        """Run all groups of final items in one forward; return each group's logits [len(group), V]."""
        items = list(chain.from_iterable(groups))
        if not items:
            return [torch.empty(0) for _ in groups]
        with self._begun(items) as step:
            rows = self._forward(step, work)
            logits = []
            start = 0
            for group in groups:
                logits.append(torch.stack(list(rows[start : start + len(group)])))
                start += len(group)
        return logits

    def _begun(
        self,
        items: Sequence[UnifiedBatchItem],
        *,
        device_ids: torch.Tensor | None = None,
        returns_hidden: bool = False,
        captured: CapturedStates | None = None,
    ) -> Step:
        """Check items; return their step, which is a context: it commits at the end, and rolls back after an error.

        device_ids, returns_hidden, captured: as in `UnifiedBatch`.
        """
        self._check_items(items)
        with_metadata = [item for item in items if item.metadata]
        for item in with_metadata:
            check_metadata(self, f"item {item.seq_id!r}: metadata", item.metadata)
        return step_of(
            self.sequences,
            items,
            device_ids=device_ids,
            returns_hidden=returns_hidden,
            captured=captured,
            prepare=lambda: self._choose_adapters(with_metadata),
        )

    def _forward(self, step: Step, work: ForwardWork | None = None) -> Rows:
        """Run a step and count its work; return the answers of its wanted rows.

        work: the work of a step that a call other than `unified_decode` makes.
        """
        if work is None:
            work = self._prompts.work_of(step)
        start = self._meter.begin()
        rows = self._run(step)
        if len(rows) != len(step.row_ids):
            num_items, expected = len(step.counts), len(step.row_ids)
            raise PagedError(f"the forward returned {len(rows)} results for {num_items} items, expected {expected}")
        self._meter.end(work, start)
        if work.prefill_tokens:
            self._prompts.update(step)
        return rows

    def _check_device_ids(self, batch: UnifiedBatch) -> None:
        """Check the items whose tokens are known only on the device."""
        info, ids, count = self._info, batch.device_ids, len(batch.items)
        if ids is None:
            return
        if not self.takes_device_ids:
            raise UnsupportedError(f"device_ids: {info.model_id} takes token ids of the host only")
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) > count or ids.device != info.device:
            shape = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            raise InvalidInputError(f"device_ids: {shape}, expected int64 [n <= {count}] on {info.device}")
        longest = max(batch.counts[: len(ids)], default=1)
        if longest > 1:
            raise InvalidInputError(f"device_ids: beside {longest} q_tokens of an item, expected 1")

    def _check_items(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Raise unless the items can run."""
        kv_caches = [item.kv_cache for item in items]
        handles = self.sequences.get_handles([item.cache_id for item in items])
        if kv_caches != handles:
            for kv_cache, handle in zip(kv_caches, handles, strict=True):
                if kv_cache is not None and handle is not kv_cache:
                    self._check_handle(kv_cache)
        validate_items(items, handles, vocab_size=self._info.vocab_size, max_seq_len=self._info.max_sequence_length)
        if any(item.embeds is not None for item in items):
            check_embeds(items, self.embeds_limits)

    def _truncate(self, handle: KvCacheHandle, new_len: int) -> None:
        new_len, length = as_int("new_len", new_len, low=None), handle.num_tokens
        if not 0 <= new_len <= length:
            raise InvalidInputError(f"new_len: {new_len}, expected 0 to {length}, the length of {handle.cache_id!r}")
        self.sequences.truncate(handle, new_len)

    def _check_handle(self, handle: KvCacheHandle) -> None:
        if not handle.is_valid:
            raise StaleHandleError(f"kv_cache: {handle!r} has been freed")
        if self.sequences.get_handle(handle.cache_id) is not handle:
            raise InvalidInputError(f"kv_cache: {handle!r} belongs to another executor or manager")

    def _live_handle(self, seq_id: SeqId) -> KvCacheHandle:
        handle = self.sequences.get_handle(seq_id)
        if handle is None:
            raise InvalidInputError(f"cache_id: {seq_id!r} has no cache")
        return handle


class _Call:
    """Context of a call: tracks the executor's state and failures, and switches gradients off."""

    def __init__(self, meter: WorkMeter) -> None:
        self._meter = meter
        self._tracks_gradients = torch.is_grad_enabled()

    def __enter__(self) -> None:
        self._meter.state = ExecutorState.BUSY
        if self._tracks_gradients:  # `torch.no_grad` would take 4 us longer
            torch.set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._tracks_gradients:
            torch.set_grad_enabled(True)
        is_ready = error is None or isinstance(error, PagedError)
        if self._meter.state is not ExecutorState.SHUTDOWN:  # another thread may have shut the executor down
            self._meter.state = ExecutorState.READY if is_ready else ExecutorState.FAILED
        self._meter.failed_calls += error is not None


@dataclass(frozen=True)
class ForwardWork:
    """Work of one forward: completed prompts, prompt tokens, decoded tokens."""

    prefills: int
    prefill_tokens: int
    decodes: int


class PromptProgress:
    """Tracks prompts with chunks left."""

    def __init__(self) -> None:
        self._unfinished: set[KvCacheHandle] = set()

    def work_of(self, step: Step) -> ForwardWork:
        """Return the work in a step. A decode is one token after a prompt, or tokens that are verified there."""
        if step.only_decodes:
            return ForwardWork(0, 0, sum(step.counts))
        num_final = num_decodes = num_decode_tokens = 0
        starts = step.positions[step.cu_seqlens_q[:-1]].tolist()
        for handle, count, start, num_rows in zip(step.handles, step.counts, starts, step.num_rows(), strict=True):
            num_final += num_rows > 0
            if start > 0 and num_rows == count and not self._is_unfinished(handle, start):
                num_decodes += 1
                num_decode_tokens += count
        return ForwardWork(num_final - num_decodes, sum(step.counts) - num_decode_tokens, num_decode_tokens)

    def update(self, step: Step) -> None:
        """Note which prompts have chunks left after a forward."""
        unfinished = self._unfinished.copy()
        for handle, num_rows in zip(step.handles, step.num_rows(), strict=True):
            if num_rows:
                unfinished.discard(handle)
            else:
                unfinished.add(handle)
        self._unfinished = {handle for handle in unfinished if handle.is_valid}

    def _is_unfinished(self, handle: KvCacheHandle, length: int) -> bool:
        """Return whether the next token belongs to a prompt: chunks are left, or only a cached prefix exists."""
        return 0 < handle.num_cached_tokens == length or handle in self._unfinished


class WorkMeter:
    """Counts the work of an executor. memory_bytes: returns the memory in use."""

    def __init__(self, device: torch.device, memory_bytes: Callable[[], int]) -> None:
        self.state = ExecutorState.READY
        self._device = device
        self._memory_bytes = memory_bytes
        self._peak_memory_bytes = memory_bytes()
        self.prefills = self.decodes = self._prefill_tokens = self._forwards = self.failed_calls = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._untimed: deque[tuple[ForwardWork, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> torch.cuda.Event | float:
        """Return the start of a forward: on a GPU a stream event, else the time in seconds."""
        return self._event() if self._device.type == "cuda" else perf_counter()

    def end(self, work: ForwardWork, start: torch.cuda.Event | float) -> None:
        """Count and time the work of a forward that began at `start` and succeeded."""
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
        """Return the totals, after waiting for forwards that still run on a GPU."""
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
