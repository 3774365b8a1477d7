"""Speculative decoding with a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion
from paged.executors.sampling.rows import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.executors.speculation.drafting import cut_limits, draw
from paged.kernels.core.errors import as_float
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatch, UnifiedBatchItem


@dataclass
class _DraftSequence:
    """Sequence in the draft model's cache: `length` tokens of the completion, then `drafts`."""

    handle: KvCacheHandle
    length: int = 0
    drafts: list[int] = field(default_factory=list)


class DraftModel:
    """`Proposer` that runs a draft model with the target's vocabulary, for all completions in one forward.

    The draft model has its own K/V. A sequence gets no drafts while the draft model catches up, or if the cache has no
    free blocks. Drafts do not change the output.

    Args:
        num_tokens: maximum number of drafts for a sequence.
        min_probability: verify the drafts up to the first whose estimated probability of acceptance, together with all
            drafts before it, is lower. The estimate for a draft is the largest probability that the draft model gives
            to a token there.
        token_budget: tokens per step to prefill texts that the draft model has not seen.

    Raises:
        InvalidInputError: num_tokens is not positive, or min_probability is not from 0 to 1.
        UnsupportedError: the executor has no cache manager, or cannot roll tokens back.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        num_tokens: int = 4,
        *,
        token_budget: int = 2048,
        min_probability: float = 0.0,
    ) -> None:
        if num_tokens < 1:
            raise InvalidInputError(f"num_tokens: {num_tokens}, expected at least 1")
        info, manager = executor.info(), executor.kv_manager
        if manager is None or not executor.capabilities().supports_truncate:
            raise UnsupportedError(f"{info.model_id}: a draft model needs a cache manager that can truncate")
        self.num_tokens = num_tokens
        self._min_probability = as_float("min_probability", min_probability, 0, 1)
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
        limits = cut_limits(completions, limits, num_tokens=self.num_tokens, longest=self._longest)
        items, active = self._catch_up(completions, limits)

        def run(rows: Sequence[int], newest: torch.Tensor | None) -> torch.Tensor:
            chosen, device_ids = items, None
            if newest is not None:
                if self._takes_device_ids:
                    device_ids = newest  # `draw` handles -1 (no token)
                    token_ids = [0] * len(rows)  # placeholders
                else:
                    token_ids = newest.tolist()
                chosen = []
                for row, token in zip(rows, token_ids, strict=True):
                    chosen.append(self._item(completions[row], [token]))
            answers = self._executor.unified_decode(UnifiedBatch(chosen, device_ids))
            return row_matrix([row for row in answers if row is not None])

        if not active:  # the draft model still lacks tokens of every completion
            if items:
                self._executor.unified_decode(UnifiedBatch(items))
            return Drafts.empty(len(completions))
        drafts, num_verified = draw(
            self._sampler, completions, limits, active, run, min_probability=self._min_probability
        )
        ran_tokens = []
        for row in active:
            sequence = self._sequences[completions[row].seq_id]
            sequence.length, sequence.drafts = completions[row].num_tokens, drafts.token_ids[row]
            ran_tokens.append((sequence.handle, sequence.drafts[:-1]))
        self._manager.append_tokens(ran_tokens)
        return drafts.first(num_verified)

    def forget(self, completion: Completion) -> None:
        self._sequences.pop(completion.seq_id, None)
        if self._manager.get_handle(_draft_id(completion.seq_id)) is not None:  # `_sequences` may not have it yet
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
        """Return items with the tokens that the draft model lacks, and the indices of completions then up to date."""
        items: list[UnifiedBatchItem] = []
        active: list[int] = []
        budget = self._token_budget
        for index, (completion, limit) in enumerate(zip(completions, limits, strict=True)):
            if limit <= 0 or budget <= 0:
                continue
            sequence = self._sequence(completion)
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
        sequence = self._sequences.get(completion.seq_id)
        if sequence is None:
            try:
                handle = self._manager.allocate(
                    _draft_id(completion.seq_id),
                    token_ids=completion.tokens_from(0),
                    namespace=completion.request.namespace,
                )
            except OutOfBlocksError:
                return None
            sequence = self._sequences[completion.seq_id] = _DraftSequence(handle, handle.num_tokens)
        return sequence

    def _roll_back(self, sequence: _DraftSequence, completion: Completion) -> int:
        """Roll back rejected drafts; return the number of tokens left in the cache."""
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
    """Return the id of the draft sequence, distinct because target and draft model may share a cache."""
    return f"draft of {seq_id}"
