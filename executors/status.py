"""The measured side of `ExecutorStatus`: what forwards do, and counts, times and bytes of those that ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.errors import PagedError
from paged.executors.row_batches import is_decode_step
from paged.executors.types import ExecutorState, ExecutorStatus


@dataclass(frozen=True)
class ForwardWork:
    """What one forward does: prompts it completes and rows of prompts, tokens it decodes (a row each)."""

    prefills: int
    prefill_tokens: int
    decodes: int


class PromptProgress:
    """Knows which prompts have chunks left to run. handle_of: the live handle of an item's cache, None without one."""

    def __init__(self, handle_of: Callable[[UnifiedBatchItem], KvCacheHandle | None]) -> None:
        self._handle_of = handle_of
        self._unfinished: set[KvCacheHandle] = set()

    def work_of(self, batch: UnifiedBatch) -> ForwardWork:
        """What the forward of a batch does."""
        decodes = [
            len(item.q_tokens)
            for item in batch.items
            if is_decode_step(item) and not self._is_unfinished(self._handle_of(item), item.pos_offset)
        ]
        rows = sum(decodes)
        return ForwardWork(batch.num_sampled_items - len(decodes), batch.total_q_tokens - rows, rows)

    def work_of_next_tokens(self, handles: Sequence[KvCacheHandle]) -> ForwardWork:
        """What a forward of one more token of each sequence does."""
        decodes = sum(one.num_tokens > 0 and not self._is_unfinished(one, one.num_tokens) for one in handles)
        return ForwardWork(len(handles) - decodes, len(handles) - decodes, decodes)

    def update(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Note which prompts have chunks left, after a forward with some."""
        handles = [(self._handle_of(item), item.is_final_chunk) for item in items]
        unfinished = self._unfinished | {one for one, is_final in handles if one is not None and not is_final}
        unfinished -= {one for one, is_final in handles if is_final}
        self._unfinished = {handle for handle in unfinished if handle.is_valid}

    def _is_unfinished(self, handle: KvCacheHandle | None, length: int) -> bool:
        """Whether its next token is of a prompt: chunks of it are left, or it begins with a cached prefix."""
        if handle is None:
            return False
        return 0 < handle.num_cached_tokens == length or handle in self._unfinished


class WorkMeter:
    """Adds up what an executor did; `memory_bytes` tells what it holds at this moment."""

    def __init__(self, device: torch.device, memory_bytes: Callable[[], int]) -> None:
        self.state = ExecutorState.READY
        self._device = device
        self._memory_bytes = memory_bytes
        self._peak_memory_bytes = memory_bytes()
        self.prefills = self.decodes = self._prefill_tokens = self._forwards = self._failed_calls = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._untimed: deque[tuple[ForwardWork, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call: the state meanwhile, and whether it failed."""
        self.state = ExecutorState.BUSY
        try:
            yield
        except BaseException as error:
            self._failed_calls += 1
            self.state = ExecutorState.READY if isinstance(error, PagedError) else ExecutorState.FAILED
            raise
        self.state = ExecutorState.READY

    @contextmanager
    def forward(self, work: ForwardWork) -> Iterator[None]:
        """Around a forward that does `work`, counted if it succeeds. On a GPU it is the stream that is timed."""
        on_gpu = self._device.type == "cuda"
        started, start = perf_counter(), self._event() if on_gpu else None
        yield
        if start is not None:
            self._untimed.append((work, start, self._event()))
            self._collect_times(wait=False)
        else:
            self._add_seconds(work, perf_counter() - started)
        self._forwards += 1
        self.prefills += work.prefills
        self._prefill_tokens += work.prefill_tokens
        self.decodes += work.decodes
        self._peak_memory_bytes = max(self._peak_memory_bytes, self._memory_bytes())

    def status(self) -> ExecutorStatus:
        """The totals until now; waits for forwards that are still running on a GPU."""
        self._collect_times(wait=True)
        return ExecutorStatus(
            state=self.state,
            prefill_count=self.prefills,
            decode_count=self.decodes,
            prefill_tokens=self._prefill_tokens,
            failed_calls=self._failed_calls,
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
