"""Room in the KV cache for completions: by blocks where the executor has a cache manager, else by counting tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paged.batch import KvSlotRequest
from paged.errors import OutOfBlocksError
from paged.executors.model_executor import ModelExecutor
from paged.executors.request import Completion
from paged.kv_cache_manager import PagedKvCacheManager


class BlockSpace:
    """Sequences in a `PagedKvCacheManager`: shared prefixes, forks, swap.

    admission_tokens: see `EngineConfig`.
    """

    def __init__(self, executor: ModelExecutor, manager: PagedKvCacheManager, admission_tokens: int | None) -> None:
        self._executor = executor
        self._manager = manager
        self._admission_tokens = admission_tokens

    def admit(self, completion: Completion, running: Sequence[Completion]) -> bool:
        """Blocks for all tokens it has, those of a published prefix shared. Alone it needs no room to grow."""
        manager = self._manager
        try:
            if completion.is_swapped:
                assert completion.handle is not None
                if running and not manager.can_allocate(self._target(completion)):
                    return False
                manager.swap_in(completion.handle)
                completion.is_swapped = False
                return True
            namespace = completion.request.namespace
            handle = manager.allocate(completion.seq_id, token_ids=completion.tokens, namespace=namespace)
        except OutOfBlocksError:
            return False
        completion.hold(handle)
        if running and not self._can_grow([*running, completion]):
            self.release(completion)
            completion.hold(None)
            return False
        return True

    def release(self, completion: Completion) -> None:
        """Give its blocks back; through the executor, which may know more of the sequence."""
        if completion.handle is not None:
            self._executor.release_cache(completion.seq_id)

    def swap_out(self, completion: Completion) -> bool:
        """Move its own blocks to host memory."""
        assert completion.handle is not None
        try:
            self._manager.swap_out(completion.handle)
        except OutOfBlocksError:
            return False
        return True

    def fork(self, source: Completion, target: Completion) -> None:
        """`target` begins with what `source` holds, over the same blocks."""
        assert source.handle is not None
        target.hold(self._manager.fork(source.handle, target.seq_id))

    def _can_grow(self, completions: Sequence[Completion]) -> bool:
        requests = [
            KvSlotRequest(one.seq_id, one.handle.num_tokens, self._target(one))
            for one in completions
            if one.handle is not None
        ]
        try:
            with self._manager.reserve(requests):
                return True
        except OutOfBlocksError:
            return False

    def _target(self, completion: Completion) -> int:
        if self._admission_tokens is None:
            return completion.longest
        return min(max(completion.num_tokens, len(completion.tokens)) + self._admission_tokens, completion.longest)


class TokenSpace:
    """Tokens of sequences that an executor keeps its own way: each is counted at its longest, so none has to stop."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        self._capacity = executor.kv_capacity()
        self._max_sequences = executor.capabilities().max_batch_size

    def admit(self, completion: Completion, running: Sequence[Completion]) -> bool:
        """Whether all of them fit at their longest."""
        if self._max_sequences is not None and len(running) >= self._max_sequences:
            return False
        needed = sum(one.longest for one in running) + completion.longest
        completion.hold(None)
        return self._capacity is None or needed <= self._capacity

    def release(self, completion: Completion) -> None:
        """Tell the executor to forget it."""
        if completion.cached:
            handle = completion.handle
            self._executor.release_cache(completion.seq_id if handle is None else handle.cache_id)

    def swap_out(self, completion: Completion) -> bool:
        """There is no host memory known to move it to."""
        return False
