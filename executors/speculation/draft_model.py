"""Speculative decoding with a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, OutOfBlocksError, PagedError, UnsupportedError
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import NO_TOKEN, Completion
from paged.executors.sampling.rows import index_tensor, row_matrix
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.seq_id import SeqId


@dataclass
class _DraftSequence:
    """A text in the draft model's cache: `length` tokens of the completion, then `drafts`."""

    handle: KvCacheHandle
    length: int = 0
    drafts: list[int] = field(default_factory=list)


class DraftModel:
    """A `Proposer` that runs a draft model with the target's vocabulary, for all completions in one forward.

    The draft model has its own K/V. A sequence gets no drafts while it catches up, or if the cache has no free blocks.
    The output does not depend on drafts.

    Args:
        num_tokens: most drafts for a sequence.
        token_budget: tokens per step for prefilling texts that the draft model has not seen.

    Raises:
        InvalidInputError: num_tokens is not positive.
        UnsupportedError: the executor has no cache manager, or cannot roll tokens back.
    """

    def __init__(self, executor: ModelExecutor, num_tokens: int = 4, *, token_budget: int = 2048) -> None:
        if num_tokens < 1:
            raise InvalidInputError(f"num_tokens: {num_tokens}, expected at least 1")
        info, manager = executor.info(), executor.kv_manager
        if manager is None or not executor.capabilities().supports_truncate:
            raise UnsupportedError(f"{info.model_id}: a draft model needs a cache manager that can truncate")
        self.num_tokens = num_tokens
        self.vocab_size: int | None = info.vocab_size
        self._executor = executor
        self._manager = manager
        self._token_budget = token_budget
        self._longest = info.max_sequence_length
        self._device = info.device
        self._sampler = Sampler(info.vocab_size, info.device)
        self._takes_device_ids = executor.capabilities().supports_device_ids
        self._sequences: dict[SeqId, _DraftSequence] = {}

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        # The last draft is not run, so it may lie one position beyond the longest sequence.
        limits = [
            min(limit, self.num_tokens, self._longest + 1 - one.num_tokens)
            for one, limit in zip(completions, limits, strict=True)
        ]
        items, active = self._catch_up(completions, limits)
        drafted = active  # each has at least one draft
        drafts = torch.full((len(completions), self.num_tokens), NO_TOKEN, dtype=torch.int64, device=self._device)
        probs: torch.Tensor | None = None
        device_ids: torch.Tensor | None = None
        index = index_tensor(active, self._device)
        for position in range(self.num_tokens):
            answers = self._executor.unified_decode(UnifiedBatch(items, device_ids)) if items else []
            if not active:  # all are catching up
                break
            rows = row_matrix([row for row in answers if row is not None])
            tokens, shares = self._sampler.propose(rows, [completions[i] for i in active], drafts[index, :position])
            drafts[index, position] = tokens
            if shares is not None:
                if probs is None:
                    probs = shares.new_zeros(len(completions), self.num_tokens, shares.shape[1])
                probs[index, position] = shares
            following = [i for i in active if position + 1 < limits[i]]
            if not following:
                break
            if following != active:
                active, index = following, index_tensor(following, self._device)
            newest, followers = drafts[index, position], [completions[i] for i in active]
            device_ids = newest if self._takes_device_ids else None  # `_read` sees a -1, which is no token
            known = [0] * len(followers) if self._takes_device_ids else newest.tolist()
            items = [self._item(one, [draft]) for one, draft in zip(followers, known, strict=True)]
        return Drafts(self._read(drafts, completions, drafted, limits), probs)

    def _read(
        self, drafts: torch.Tensor, completions: Sequence[Completion], drafted: Sequence[int], limits: Sequence[int]
    ) -> list[list[int]]:
        """Copy the drafts of all completions to the host at once, and record them with their sequences."""
        known: list[list[int]] = [[] for _ in completions]
        table = drafts.tolist() if drafted else []
        for row in drafted:
            completion, ids = completions[row], table[row][: limits[row]]
            if min(ids) < 0:
                raise PagedError(f"the draft model returned no token for {completion!r}")
            sequence = self._sequences[completion.seq_id]
            sequence.length, sequence.drafts, known[row] = completion.num_tokens, ids, ids
        ran = [self._sequences[completions[row].seq_id] for row in drafted]
        self._manager.append_tokens([(sequence.handle, sequence.drafts[:-1]) for sequence in ran])
        return known

    def forget(self, completion: Completion) -> None:
        self._sequences.pop(completion.seq_id, None)
        if self._manager.get_handle(_draft_id(completion.seq_id)) is not None:  # even if it was not recorded yet
            self._executor.release_cache(_draft_id(completion.seq_id))
        self._sampler.forget(completion)

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        if manager is not self._manager or not self._sequences:
            return False
        for seq_id in self._sequences:
            self._executor.release_cache(_draft_id(seq_id))
        self._sequences.clear()
        return True

    def _catch_up(
        self, completions: Sequence[Completion], limits: Sequence[int]
    ) -> tuple[list[UnifiedBatchItem], list[int]]:
        """Return items with the tokens that the draft model lacks, and the indices of completions they complete."""
        items, active, budget = [], [], self._token_budget
        for index, (completion, limit) in enumerate(zip(completions, limits, strict=True)):
            sequence = self._sequence(completion) if limit > 0 and budget > 0 else None
            if sequence is None:
                continue
            start = self._roll_back(sequence, completion)
            tokens = completion.tokens_from(start)
            chunk = tokens[:budget]
            budget -= len(chunk)
            sequence.length, sequence.drafts = start + len(chunk), []
            is_final = len(chunk) == len(tokens)
            items.append(self._item(completion, chunk, is_final=is_final))
            if is_final:
                active.append(index)
        return items, active

    def _sequence(self, completion: Completion) -> _DraftSequence | None:
        found = self._sequences.get(completion.seq_id)
        if found is None:
            try:
                handle = self._manager.allocate(
                    _draft_id(completion.seq_id),
                    token_ids=completion.tokens_from(0),
                    namespace=completion.request.namespace,
                )
            except OutOfBlocksError:
                return None
            found = self._sequences[completion.seq_id] = _DraftSequence(handle, handle.num_tokens)
        return found

    def _roll_back(self, sequence: _DraftSequence, completion: Completion) -> int:
        """Roll back rejected drafts; return the number of remaining tokens."""
        kept = sequence.length
        for draft, token in zip(sequence.drafts, completion.tokens_from(sequence.length), strict=False):
            if draft != token:
                break
            kept += 1
        kept = min(kept, completion.num_tokens - 1, sequence.handle.num_tokens)
        if kept < sequence.handle.num_tokens:
            self._executor.truncate_kv(sequence.handle, kept)
        return kept

    def _item(self, completion: Completion, tokens: Sequence[int], *, is_final: bool = True) -> UnifiedBatchItem:
        handle = self._sequences[completion.seq_id].handle
        return UnifiedBatchItem(
            handle.cache_id, tokens, kv_cache=handle, pos_offset=handle.num_tokens, is_final_chunk=is_final
        )


def _draft_id(seq_id: SeqId) -> SeqId:
    """Return an id for the draft sequence; target and draft model may share a cache."""
    return f"draft of {seq_id}"
