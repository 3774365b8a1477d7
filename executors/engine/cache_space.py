"""KV cache capacity for the scheduler."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from paged.cache.kinds.state_positions import SCAN_CHUNK
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.tiers.files import FileRead
from paged.errors import InvalidInputError, OutOfBlocksError
from paged.executors.engine.step import EngineStep
from paged.executors.foreign import ForeignCache, ForeignExecutor
from paged.executors.isolation import attempt
from paged.executors.requests.request import Completion, State, namespace_of
from paged.executors.unified_executor import UnifiedExecutor
from paged.step.batch_step import reserve_items

_LOG = logging.getLogger("paged")


class BlockSpace:
    """Capacity in a `PagedKvCacheManager`, with prefix caching, forks and swap; see `EngineConfig.admission_tokens`.

    A `ForeignCache` has no blocks that run out. Each sequence then counts with its maximum length against the
    executor's capacity, so none is ever preempted.
    """

    def __init__(
        self,
        executor: UnifiedExecutor | ForeignExecutor,
        admission_tokens: int | None,
        *,
        runs_fixed_chunks: bool = False,
    ) -> None:
        """runs_fixed_chunks: `EngineConfig.batch_invariant`."""
        self.executor = executor
        manager = executor.sequences
        self.manager = manager
        self.can_fork = not isinstance(manager, ForeignCache)
        self._admission_tokens = admission_tokens
        self._runs_fixed_chunks = runs_fixed_chunks
        capabilities = executor.capabilities()
        self._has_invariant_rows = runs_fixed_chunks and capabilities.has_invariant_rows
        self.device = executor.info().device
        self._has_draft_head = capabilities.has_draft_head
        self._growth = 0
        num_slots = manager.config.num_slots
        # In a step, each sequence may read one slot and write another.
        self._max_sequences = sys.maxsize if num_slots is None else num_slots // 2
        self._max_tokens = sys.maxsize
        if not self.can_fork:
            self._max_sequences = capabilities.max_batch_size or sys.maxsize
            self._max_tokens = executor.kv_capacity() or sys.maxsize
        self._num_sequences = self._num_tokens = 0
        self.publish_every = _publish_every(manager.config)

    @property
    def free_blocks(self) -> str:
        """Number of free blocks, as text."""
        stats = self.manager.stats()
        return f"{stats.free_blocks} of {stats.num_blocks}"

    @property
    def _is_ours(self) -> bool:
        """Whether steps run as they are; executors of others, and functions in place of ours, publish by themselves."""
        return isinstance(self.executor, UnifiedExecutor) and not self.executor.is_replaced

    @property
    def is_invariant(self) -> bool:
        """Whether steps are invariant, see `Step.is_invariant`."""
        return self._has_invariant_rows and self._is_ours

    def runs_apart(self, completions: Sequence[Completion]) -> bool:
        """Return whether each completion needs its own forward, so that its bits do not depend on the others.

        Embeddings, adapters and captured states change kernels, masks and rows of the whole forward.
        """
        if not self.is_invariant:
            return True
        for completion in completions:
            request = completion.request
            if request.embeds is not None or request.metadata or completion.states is not None:
                return True
        return False

    def begin(self, running: Sequence[Completion]) -> None:
        """Count the blocks that running sequences may still take, once before a series of admissions."""
        self._growth = sum(map(self._growth_of, running))
        self._num_sequences = sum(completion.num_sequences for completion in running)
        self._num_tokens = sum(completion.longest for completion in running)

    def is_reading(self, completion: Completion, wait_s: float) -> bool:
        """Return whether a waiting completion still waits for blocks from files, after up to `wait_s`."""
        if self.manager.files is None or completion.is_swapped:
            return False
        if completion.from_files is None:
            # If this fails, admission meets the same error and refuses the completion.
            completion.from_files = attempt(partial(_LOG.warning, "no files: %s"), self._read_files, completion)
        return completion.from_files is not None and not completion.from_files.wait(wait_s)

    def admit(self, completion: Completion, *, is_alone: bool) -> bool:
        """Allocate the blocks of a waiting completion; return False if blocks or state slots are too few.

        After an error it holds the same blocks as before. If it is alone, it starts even if the cache lacks blocks for
        its growth.
        """
        was_swapped = completion.is_swapped
        num_sequences = self._num_sequences + completion.num_sequences
        num_tokens = self._num_tokens + completion.longest
        if (num_sequences > self._max_sequences or num_tokens > self._max_tokens) and not is_alone:
            return False
        try:
            if was_swapped:
                if not is_alone and self._growth >= self.manager.stats().free_blocks:
                    return False
                # Computed before the swap, after which nothing may raise. A swap changes neither length nor capacity.
                growth = self._growth + self._growth_of(completion)
                # A swapped-in completion stays, because swapping it out again costs more than preempting another.
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
        self._growth, self._num_sequences, self._num_tokens = growth, num_sequences, num_tokens
        completion.from_files = None
        return True

    def chunk(self, completion: Completion, count: int, *, max_chunk: int) -> int:
        """Return how many of the next `count` prompt tokens to run; see `PagedKvCacheManager.chunk_end`.

        max_chunk: largest number of prompt tokens of one completion in this step, 0 if nothing else runs.
        """
        assert completion.handle is not None
        limit, total = completion.cached + count, len(completion.tokens)
        may_leave_grid = max_chunk < SCAN_CHUNK
        end = self.manager.chunk_end(completion.handle, limit, total, may_leave_grid=may_leave_grid)
        return end - completion.cached

    def fitting(self, completion: Completion, count: int, scheduled: Iterable[tuple[Completion, int]]) -> int:
        """Return how many of the next `count` prompt tokens have free blocks besides the scheduled tokens of others."""
        assert completion.handle is not None
        scheduled_handles = []
        for other, num_tokens in scheduled:
            if other.handle is not None:
                scheduled_handles.append((other.handle, num_tokens))
        return self.manager.fitting_tokens(completion.handle, count, scheduled_handles)

    def reserve(self, step: EngineStep) -> None:
        """Reserve the capacity of a step whose sequences and tokens are set from chunks.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        if self._runs_fixed_chunks:
            published: list[Sequence[int] | None] = []
            for completion in step.completions:
                published.append(completion.chunk if completion.has_full_chunk else None)
            step.published = published
        reserve_items(self.manager, step)

    def recover(self, completion: Completion) -> None:
        """Begin a sequence again if a model of others has lost it; all its tokens join the chunk."""
        handle = completion.handle
        if isinstance(self.manager, ForeignCache) and handle is not None and not handle.is_valid:
            completion.start_over(self.manager.allocate(completion.seq_id))

    def truncate(self, completion: Completion) -> None:
        """Roll a completion's sequence back to the tokens that count, after drafts were rejected."""
        assert completion.handle is not None
        self.executor.truncate_kv(completion.handle, completion.cached)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Adapt the wait for files to the measured time of a step with prompt tokens."""
        if self.manager.files is not None:
            self.manager.files.observe_prefill(num_tokens, seconds)

    def release(self, completion: Completion) -> None:
        """Free a completion's cache, if any, through the executor, which may hold further state for it."""
        # Look up by id, because an interrupt may have come before the completion stored its handle.
        if self.manager.get_handle(completion.seq_id) is not None:
            self.executor.release_cache(completion.seq_id)

    def publish(self, completions: Iterable[Completion]) -> None:
        """Publish the blocks that decodes have filled in the prefix cache. After an error, they stay unpublished."""
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
        """Swap out the blocks that only this completion holds; return False if the host has too few blocks."""
        assert completion.handle is not None
        try:
            self.manager.swap_out(completion.handle)
        except OutOfBlocksError:
            return False
        return True

    def fork(self, source: Completion, target: Completion) -> None:
        """Start `target` with the blocks of `source`."""
        assert source.handle is not None
        target.hold(self.manager.fork(source.handle, target.seq_id))

    def _drop(self, completion: Completion) -> None:
        """Free the blocks that a waiting completion has taken."""
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
                retention=request.retention,
            )
            num_usable = handle.num_tokens
            if self._runs_fixed_chunks:
                num_usable = completion.full_chunks(num_usable)
            elif self._has_draft_head and num_usable and not self.manager.config.has_slots:
                # The head needs the hidden state of the token before the first new one, so run one cached token again.
                # Recurrent layers and open pools keep nothing there; the head then sees zeros once.
                num_usable -= 1
            if num_usable < handle.num_tokens:
                try:
                    self.manager.truncate(handle, num_usable)
                except InvalidInputError:  # the repeated token's window needs a block that the prefix lacks
                    self.manager.free(handle)
                    handle = self.manager.allocate(
                        completion.seq_id, num_tokens, namespace=namespace, retention=request.retention
                    )
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
        """Return the ids to look a completion's prefix up by; None if all its tokens have to run."""
        request = completion.request
        if completion.wants_prompt_rows or completion.states is not None:
            return None  # a cached prefix has no logits, hidden states or experts
        if self._runs_fixed_chunks and (request.embeds is not None or not self._is_ours):
            # The bits of a cached block could differ. Masks of embeddings need other kernels, and executors of other
            # kinds also publish blocks that were not computed in fixed chunks.
            return None
        if request.embeds is None:
            return completion.tokens
        return request.embeds.ids(completion.tokens, 0)

    def namespace(self, adapter: str | None, cache_salt: str | None) -> Hashable:
        """Return the namespace of the cached K/V of requests with this adapter and salt."""
        if self._runs_fixed_chunks:
            # Fixed chunks get their own namespace, because other steps publish blocks with different bits.
            return (adapter, cache_salt, "fixed chunks", int(self.is_invariant))
        return namespace_of(adapter, cache_salt)

    def _namespace_of(self, completion: Completion) -> Hashable:
        request = completion.request
        return self.namespace(request.adapter, request.cache_salt)

    def _growth_of(self, completion: Completion) -> int:
        """Return how many blocks a completion lacks for the growth that the admission policy counts."""
        handle, target = completion.handle, completion.longest
        assert handle is not None
        if self._admission_tokens is not None:
            target = min(completion.num_tokens + self._admission_tokens, target)
        return self.manager.config.blocks_to_grow(handle.num_tokens, handle.capacity, target)


def _publish_every(config: PagedKvCacheConfig) -> int:
    """Return the interval in steps at which blocks filled by decodes are published.

    Once per `block_size` steps, one call publishes a block of every sequence, which is faster than a few blocks in
    every step, see limits.md. Recurrent layers need it in every step to keep their states, and a small window because
    it frees blocks soon after they are full.
    """
    for table in config.tables:
        if table.most_seen is not None and table.most_seen < 2 * config.block_size:
            return 1
    return 1 if config.recurrent is not None else config.block_size
