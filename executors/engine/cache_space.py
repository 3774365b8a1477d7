"""Capacity of the KV cache for the scheduler: in blocks if the executor has a cache manager, else in tokens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import torch

from paged.batch import UnifiedBatch
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.cache.recurrent_states import SCAN_CHUNK
from paged.cache.tiers.files import FileRead
from paged.errors import InvalidInputError, OutOfBlocksError
from paged.executors.engine.batch import captured_of
from paged.executors.isolation import attempt
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion, State
from paged.executors.unified_executor import UnifiedExecutor
from paged.forward_step import prepare

_LOG = logging.getLogger("paged")


class BlockSpace:
    """Sequences in a `PagedKvCacheManager`: prefix caching, forks and swap; see `EngineConfig.admission_tokens`."""

    can_fork = True

    def __init__(
        self,
        executor: ModelExecutor,
        manager: PagedKvCacheManager,
        admission_tokens: int | None,
        *,
        runs_fixed_chunks: bool = False,
    ) -> None:
        """runs_fixed_chunks: whether steps are those of `EngineConfig.batch_invariant`."""
        self._executor = executor
        self.manager = manager
        self._admission_tokens = admission_tokens
        self._runs_fixed_chunks = runs_fixed_chunks
        # Other executors check and reserve by themselves.
        self._takes_prepared = isinstance(executor, UnifiedExecutor)
        has_invariant_rows = executor.capabilities().has_invariant_rows
        self.is_invariant = runs_fixed_chunks and self._takes_prepared and has_invariant_rows
        self.takes_rows = self._takes_prepared
        self.device = executor.info().device
        self._has_draft_head = executor.capabilities().has_draft_head
        self._growth = 0
        recurrent = manager.config.recurrent
        # In a step each sequence may read one slot of states and write another.
        self._max_sequences = sys.maxsize if recurrent is None else recurrent.num_slots // 2
        self._num_sequences = 0
        self.publish_every = _publish_every(manager.config)

    @property
    def free_blocks(self) -> str:
        """Return how many blocks are free, in words."""
        stats = self.manager.stats()
        return f"{stats.free_blocks} of {stats.num_blocks}"

    def runs_apart(self, completions: Sequence[Completion]) -> bool:
        """Return whether each must be a forward of its own, so that its bits do not depend on the others.

        Embeddings, adapters and captured states have kernels, masks and rows of their own for all of a forward.
        """
        if not self.is_invariant:
            return True
        for completion in completions:
            request = completion.request
            if request.embeds is not None or request.metadata or completion.states is not None:
                return True
        return False

    def begin(self, running: Sequence[Completion]) -> None:
        """Count the blocks that running sequences may still take, once for all that are admitted beside them."""
        self._growth = sum(map(self._growth_of, running))
        self._num_sequences = sum(completion.num_sequences for completion in running)

    def is_reading(self, completion: Completion, wait_s: float) -> bool:
        """Return whether blocks that a waiting completion begins with are still to come from files, after `wait_s`."""
        if self.manager.files is None or completion.is_swapped:
            return False
        if completion.from_files is None:
            # Without a read, admission meets the same error, and refuses the completion.
            completion.from_files = attempt(partial(_LOG.warning, "no files: %s"), self._read_files, completion)
        return completion.from_files is not None and not completion.from_files.wait(wait_s)

    def admit(self, completion: Completion, *, is_alone: bool) -> bool:
        """Allocate the blocks of a waiting completion; return False if blocks or state slots are too few.

        After an error it holds what it held before. If it is alone, it starts even if the cache has no blocks for its
        growth.
        """
        was_swapped = completion.is_swapped
        num_sequences = self._num_sequences + completion.num_sequences
        if num_sequences > self._max_sequences and not is_alone:
            return False
        try:
            if was_swapped:
                if not is_alone and self._growth >= self.manager.stats().free_blocks:
                    return False
                # Nothing may raise once it is swapped in. A swap changes neither its length nor its capacity.
                growth = self._growth + self._growth_of(completion)
                # It then stays: to swap it out again costs more than to preempt another.
                self._take_blocks(completion)
            else:
                self._take_blocks(completion)
                growth = self._growth + self._growth_of(completion)
                if not is_alone and growth > self.manager.stats().free_blocks:
                    self._drop(completion)
                    return False
        except OutOfBlocksError:
            return False
        except BaseException:
            if not was_swapped:
                self._drop(completion)
            raise
        self._growth, self._num_sequences = growth, num_sequences
        completion.from_files = None
        return True

    def chunk(self, completion: Completion, count: int, *, max_chunk: int) -> int:
        """Return how many of the next `count` prompt tokens to run; see `PagedKvCacheManager.chunk_end`.

        max_chunk: prompt tokens that this step could run of one completion, 0 if nothing else runs.
        """
        assert completion.handle is not None
        limit, total = completion.cached + count, len(completion.tokens)
        may_leave_grid = max_chunk < SCAN_CHUNK
        end = self.manager.chunk_end(completion.handle, limit, total, may_leave_grid=may_leave_grid)
        return end - completion.cached

    def fitting(self, completion: Completion, count: int, planned: Iterable[tuple[Completion, int]]) -> int:
        """Return how many of the next `count` prompt tokens have free blocks beside the planned tokens of others."""
        assert completion.handle is not None
        planned_handles = []
        for other, num_tokens in planned:
            if other.handle is not None:
                planned_handles.append((other.handle, num_tokens))
        return self.manager.fitting_tokens(completion.handle, count, planned_handles)

    def reserve(self, completions: list[Completion], device_ids: torch.Tensor | None = None) -> UnifiedBatch:
        """Return the batch of what completions run next, with its capacity.

        device_ids: int64 [n], the tokens of the first n.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        batch = _batch_of(completions, device_ids)
        if self._takes_prepared:
            prepare(self.manager, batch)
            if self._runs_fixed_chunks:
                assert batch.prepared is not None
                batch.prepared.is_invariant = self.is_invariant
                published: list[Sequence[int] | None] = []
                for completion in completions:
                    published.append(completion.chunk if completion.has_full_chunk else None)
                batch.prepared.published = published
            return batch
        handles = [handle for handle in batch.columns.kv_caches if handle is not None]
        reservation, _ = self.manager.reserve_step(handles, batch.columns.counts)
        reservation.leave()  # the capacity stays for the executor's own reservation
        return batch

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Let waits for files depend on the time that a step took for prompt tokens."""
        if self.manager.files is not None:
            self.manager.files.observe_prefill(num_tokens, seconds)

    def release(self, completion: Completion) -> None:
        """Free what a completion holds, if anything, through the executor, which may hold more for it."""
        # Look it up by id: an interrupt may have come before the completion got its handle.
        if self.manager.get_handle(completion.seq_id) is not None:
            self._executor.release_cache(completion.seq_id)

    def publish(self, completions: Iterable[Completion]) -> None:
        """Publish the blocks that decodes have filled in the prefix cache. After an error they stay unpublished."""
        config = self.manager.config
        if not config.enable_prefix_cache or self._runs_fixed_chunks:
            return
        known = []
        for completion in completions:
            handle = completion.handle
            if handle is None or completion.state is not State.DECODE:
                continue
            start, end = handle.num_known_tokens, handle.num_tokens
            if end // config.block_size > start // config.block_size:
                known.append((handle, completion.tokens_from(start)[: end - start]))
        if known:
            attempt(partial(_LOG.warning, "blocks were not published: %s"), self.manager.append_tokens, known)

    def swap_out(self, completion: Completion) -> bool:
        """Swap out the completion's own blocks; False if the host has too few."""
        assert completion.handle is not None
        try:
            self.manager.swap_out(completion.handle)
        except OutOfBlocksError:
            return False
        return True

    def fork(self, source: Completion, target: Completion) -> None:
        """Let `target` begin with the blocks of `source`."""
        assert source.handle is not None
        target.hold(self.manager.fork(source.handle, target.seq_id))

    def _drop(self, completion: Completion) -> None:
        """Free what a waiting completion has taken."""
        self.release(completion)
        completion.hold(None)

    def _take_blocks(self, completion: Completion) -> None:
        if completion.is_swapped:
            assert completion.handle is not None
            self.manager.swap_in(completion.handle)
            completion.is_swapped = False
        else:
            request, num_tokens = completion.request, len(completion.tokens)
            namespace = self._namespace_of(completion)
            handle = self.manager.allocate(
                completion.seq_id,
                num_tokens,
                token_ids=self._ids_to_match(completion),
                namespace=namespace,
                from_files=completion.from_files,
            )
            num_usable = handle.num_tokens
            if self._runs_fixed_chunks:
                num_usable = completion.full_chunks(num_usable)
            elif self._has_draft_head and num_usable and self.manager.config.recurrent is None:
                # The head needs the hidden state of the token before the first that runs: that token runs again.
                # With recurrent layers there is no state before it, and the head sees 0 once.
                num_usable -= 1
            if num_usable < handle.num_tokens:
                try:
                    self.manager.truncate(handle, num_usable)
                except InvalidInputError:  # that token's window reaches back to a block that the prefix lacks
                    self.manager.free(handle)
                    handle = self.manager.allocate(completion.seq_id, num_tokens, namespace=namespace)
            completion.hold(handle)
            if request.first_token is None:
                request.num_cached_tokens = request.output.num_cached_tokens = handle.num_tokens
                request.output.num_loaded_tokens = handle.num_loaded_tokens

    def _read_files(self, completion: Completion) -> FileRead | None:
        ids = self._ids_to_match(completion)
        if ids is None:
            return None
        return self.manager.read_files(ids, namespace=self._namespace_of(completion))

    def _ids_to_match(self, completion: Completion) -> Sequence[int] | None:
        """Return the ids by which the cache knows a completion's tokens; None if all of them have to run."""
        request = completion.request
        if completion.wants_prompt_rows or completion.states is not None:
            return None  # a cached prefix has no logits, hidden states or experts
        if self._runs_fixed_chunks and (request.embeds is not None or not self._takes_prepared):
            return None  # embeddings have masks, which other kernels compute; other executors publish all that they run
        if request.embeds is None:
            return completion.tokens
        return request.embeds.ids(completion.tokens, 0)

    def _namespace_of(self, completion: Completion) -> Hashable:
        request = completion.request
        if not self._runs_fixed_chunks:
            return request.namespace
        # Steps of other kinds publish blocks with other bits.
        return (request.adapter, request.cache_salt, "fixed chunks", int(self.is_invariant))

    def _growth_of(self, completion: Completion) -> int:
        """Return the number of blocks that a completion lacks for the tokens that the admission policy counts."""
        handle, target = completion.handle, completion.longest
        assert handle is not None
        if self._admission_tokens is not None:
            target = min(completion.num_tokens + self._admission_tokens, target)
        return self.manager.config.blocks_to_grow(handle.num_tokens, handle.capacity, target)


class TokenSpace:
    """Capacity without a cache manager; each sequence counts at its longest, so none must be preempted."""

    manager = None
    can_fork = takes_rows = is_invariant = False
    free_blocks = "an unknown number"
    publish_every = sys.maxsize

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        self.device = executor.info().device
        self._capacity = executor.kv_capacity()
        self._max_sequences = executor.capabilities().max_batch_size
        self._tokens = self._sequences = 0

    def runs_apart(self, completions: Sequence[Completion]) -> bool:
        return True

    def is_reading(self, completion: Completion, wait_s: float) -> bool:
        return False

    def begin(self, running: Sequence[Completion]) -> None:
        self._tokens = sum(completion.longest for completion in running)
        self._sequences = len(running)

    def admit(self, completion: Completion, *, is_alone: bool) -> bool:
        tokens, sequences = self._tokens + completion.longest, self._sequences + 1
        if self._capacity is not None and tokens > self._capacity:
            return False
        if self._max_sequences is not None and sequences > self._max_sequences:
            return False
        self._tokens, self._sequences = tokens, sequences
        completion.hold(None)
        return True

    def chunk(self, completion: Completion, count: int, *, max_chunk: int) -> int:
        return count

    def fitting(self, completion: Completion, count: int, planned: Iterable[tuple[Completion, int]]) -> int:
        return count

    def reserve(self, completions: list[Completion], device_ids: torch.Tensor | None = None) -> UnifiedBatch:
        return _batch_of(completions, device_ids)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        pass

    def release(self, completion: Completion) -> None:
        if completion.prefilled or completion.handle is not None:
            cache_id = completion.seq_id
            if completion.handle is not None:
                cache_id = completion.handle.cache_id
            self._executor.release_cache(cache_id)
            completion.handle = None
            completion.prefilled = 0

    def publish(self, completions: Iterable[Completion]) -> None:
        pass

    def swap_out(self, completion: Completion) -> bool:
        return False

    def fork(self, source: Completion, target: Completion) -> None:
        raise AssertionError("forked in a space that cannot fork")


def _publish_every(config: PagedKvCacheConfig) -> int:
    """Return after how many steps the blocks that decodes have filled are published.

    In as many steps as a block has tokens, each sequence fills one, and all are published in one call. Of 64 sequences
    that takes 16 us a step; four blocks in every step take 94. Recurrent layers keep their states at once, and a small
    window frees a block soon after it is full.
    """
    for table in config.tables:
        if table.sliding_window is not None and table.sliding_window < 2 * config.block_size:
            return 1
    return 1 if config.recurrent is not None else config.block_size


def _batch_of(completions: list[Completion], device_ids: torch.Tensor | None) -> UnifiedBatch:
    items = [completion.item() for completion in completions]
    return UnifiedBatch(items, device_ids, is_stacked=True, captured=captured_of(completions))
