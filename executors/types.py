"""Reports of an executor: its model, capabilities and memory needs, and the work it has measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter

import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.executors.row_batches import is_decode_step


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Identity and sizes of the model behind an executor.

    Attributes:
        model_id: name of the model; for a checkpoint, of its folder.
        model_type: architecture of the model.
        num_parameters: number of weights.
        max_sequence_length: longest sequence in tokens, prompt and output together.
        dtype, device: of the model's activations.
        eos_token_ids: tokens that end an answer, from the checkpoint.
    """

    model_id: str
    model_type: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryRequirements:
    """Memory that a model needs, in bytes.

    Attributes:
        weight_bytes: all weights.
        kv_bytes_per_token_per_layer: keys and values of one token; the average if layers differ or share K/V.
        activation_bytes_per_token: peak of a forward for each of its tokens, freed when the forward ends.
    """

    weight_bytes: int
    kv_bytes_per_token_per_layer: int
    activation_bytes_per_token: int

    def total(self, batch_size: int, seq_len: int, num_layers: int) -> int:
        """Return the bytes for `batch_size` sequences of `seq_len` tokens, all of them run in one forward."""
        per_token = num_layers * self.kv_bytes_per_token_per_layer + self.activation_bytes_per_token
        return self.weight_bytes + batch_size * seq_len * per_token


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    """Capabilities and limits of an executor.

    Attributes:
        max_batch_size: upper bound of the sequences that can hold tokens at the same time; None if unknown.
        max_sequence_length: longest sequence in tokens, prompt and output together.
        supports_native_unified_decode: whether any mix of items runs in one forward. Otherwise a batch is split.
        supports_chunked_prefill: whether a prompt can run in chunks.
        supports_truncate: whether sequences can be rolled back.
        supports_prefix_cache: whether sequences share cached prefixes.
        supports_lora: whether items may name an adapter.
        prefers_tokens: whether choosing a token (`DrawToken`) is cheaper than returning logits.
        has_draft_head: whether the model has a draft head, which needs the hidden state of the token before a step's.
        supports_device_ids, supports_hidden_states: whether `UnifiedBatch` may have `device_ids`, and `returns_hidden`
            or `captured`.
        has_routed_experts: whether the model has layers with experts, and `captured` may ask for their ids.
    """

    max_batch_size: int | None
    max_sequence_length: int
    supports_native_unified_decode: bool
    supports_chunked_prefill: bool
    supports_truncate: bool
    supports_prefix_cache: bool
    supports_lora: bool
    prefers_tokens: bool = False
    has_draft_head: bool = False
    supports_device_ids: bool = False
    supports_hidden_states: bool = False
    has_routed_experts: bool = False
    memory_requirements: MemoryRequirements


class ExecutorState(Enum):
    """READY for a call, BUSY in one, FAILED after an error that is no `PagedError`, or SHUTDOWN permanently."""

    READY = "ready"
    BUSY = "busy"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True)
class ExecutorStatus:
    """Work and memory of an executor, measured since it was made.

    Attributes:
        prefill_count: prompts completed, in any number of chunks.
        decode_count: tokens run one at a time after a prompt, verified drafts included.
        prefill_tokens: tokens run for prompts.
        failed_calls: calls that raised.
        forwards: forwards that succeeded.
        average_prefill_seconds, average_decode_seconds: time in forwards for each prompt, and for each decoded token; 0
            before the first. A forward with both is divided between them by tokens.
        memory_bytes, peak_memory_bytes: weights and used KV cache, now and at most.
        graph_replays: forwards that ran as a CUDA graph, or on a CPU as a recording.
        unrecorded_steps: step sizes that the last `warmup` could not record on a CPU; a warning names the operation.
    """

    state: ExecutorState
    prefill_count: int
    decode_count: int
    prefill_tokens: int
    failed_calls: int
    forwards: int
    average_prefill_seconds: float
    average_decode_seconds: float
    memory_bytes: int
    peak_memory_bytes: int
    graph_replays: int = 0
    unrecorded_steps: int = 0


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
