"""Steps of a drafter of blocks beside its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.models.drafts.block_head import BlockDraftHead
from paged.step.staging import to_device
from paged.step.step import Step


class BlockDraftSteps:
    """Runs a drafter of blocks on the sequences of its target, as `DraftSteps` runs other heads.

    The keys that a block reads are in the cache, so nothing else is kept of a sequence.

    Attributes:
        most_drafts: number of tokens of a block.
    """

    def __init__(
        self,
        head: BlockDraftHead,
        manager: PagedKvCacheManager,
        computing: Callable[[], AbstractContextManager[None]],
        num_positions: int,
    ) -> None:
        """computing, num_positions: see `Network.computing` and `PagedCausalLM`."""
        self._head, self._manager, self._computing = head, manager, computing
        self.most_drafts = head.block_size
        self._last_start = num_positions - head.block_size

    def follow(self, step: Step, features: torch.Tensor) -> None:
        """Write the drafter's keys of a step's tokens. features: [num_tokens, hidden_size]."""
        self._head.write_context(features, step.metadata)

    def can_draft(self, handle: KvCacheHandle) -> bool:
        """Return whether a block behind the sequence has positions."""
        return handle.num_tokens <= self._last_start

    @contextmanager
    def drafting(self, handles: Sequence[KvCacheHandle], counts: Sequence[int]) -> Iterator[BlockDraftRun]:
        """Reserve capacity for a block of each sequence that can draft; free it at the end.

        counts: number of drafts that each sequence takes of its block.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        lengths = np.array([handle.num_tokens for handle in handles], np.int64)
        step = Step(handles, [self._head.block_size] * len(handles))
        self._manager.reserve_for(step)
        try:
            with self._computing():
                yield BlockDraftRun(self._head, max(counts), lengths, step.block_tables, self._manager)
        finally:
            step.rollback()


class BlockDraftRun:
    """One block of each sequence; the logits of its drafts are returned one by one."""

    def __init__(
        self,
        head: BlockDraftHead,
        num_drafts: int,
        lengths: NDArray[np.int64],
        tables: NDArray[np.int32],
        manager: PagedKvCacheManager,
    ) -> None:
        self._head, self._num_drafts, self._lengths, self._tables = head, num_drafts, lengths, tables
        self._block_size, self._device, self._num_steps = manager.config.block_size, manager.device, 0
        self._hidden = self._logits = self._rows = self._embeddings = torch.empty(0)

    def logits(self, sequences: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the drafts behind the last tokens of some sequences, int64 [n]: float32 [n, V].

        sequences: indices of sequences: first all in their order, then some that the previous call took.
        """
        token_ids = token_ids.clamp(min=0)
        if self._num_steps == 0:
            self._logits = self._run_blocks(token_ids)
        (self._rows,) = to_device((np.array(sequences, np.int64),), self._device)
        self._embeddings = self._head.markov_embeddings(token_ids)
        logits = self._logits[self._rows, self._num_steps] + self._head.markov_logits(self._embeddings)
        self._num_steps += 1
        return logits

    def confidences(self) -> torch.Tensor | None:
        """Return the estimated probabilities that the drafts of the last `logits` are accepted, float32 [n].

        They hold if all drafts before are accepted. None if the drafter has no confidence head.
        """
        head = self._head.confidence_head
        if head is None:
            return None
        confidences: torch.Tensor = head(self._hidden[self._rows, self._num_steps - 1], self._embeddings)
        return confidences

    def _run_blocks(self, newest: torch.Tensor) -> torch.Tensor:
        """Return the logits without those of tokens before, float32 [n, num_drafts, V]. newest: int64 [n]."""
        size, num_sequences = self._head.block_size, len(self._lengths)
        positions = (self._lengths[:, None] + np.arange(size)).reshape(-1)
        step = Step()
        step.place(positions, None, np.repeat(self._tables, size, axis=1), self._block_size)
        # Each row is a sequence that ends with its block.
        step.seq_lens = np.repeat(self._lengths + size, size).astype(np.int32)
        step.max_seqlen_k = int(step.seq_lens.max())
        hidden = self._head(newest, step.over(to_device(step.arrays, self._device)))  # [n, size, hidden_size]
        self._hidden = hidden[:, : self._num_drafts]
        logits = self._head.logits(self._hidden.flatten(0, 1))
        return logits.view(num_sequences, self._num_drafts, -1)
