"""Speculative decoding with a draft head of the target: a multi-token head, a drafter of blocks or an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.executors.speculation.drafting import cut_limits, draw
from paged.kernels.core.errors import as_float
from paged.models.paged_lm import PagedCausalLM


class HeadProposer:
    """`Proposer` that runs the draft head that the target was loaded with (`LoadOptions.draft`).

    The head reads the target's hidden states of the previous step, and its K/V are in the target's blocks. If free
    blocks are short, only half of the sequences get drafts, or a quarter, and so on. Drafts do not change the output.

    Args:
        target: executor of the target.
        num_tokens: maximum number of drafts for a sequence. After the first draft, the head reads its own hidden state.
            A drafter of blocks gives at most the drafts of one block.
        min_probability: verify the drafts up to the first whose estimated probability of acceptance, together with all
            drafts before it, is lower. The estimate for a draft is that of the confidence head, if there is one, else
            the largest probability that the head gives to a token there.

    Raises:
        InvalidInputError: num_tokens is not positive, or min_probability is not from 0 to 1.
        UnsupportedError: the target was loaded without a head.
    """

    def __init__(self, target: ModelExecutor, num_tokens: int = 4, *, min_probability: float = 0.0) -> None:
        if num_tokens < 1:
            raise InvalidInputError(f"num_tokens: {num_tokens}, expected at least 1")
        info = target.info()
        model = target.model if isinstance(target, LlmExecutor) else None
        if not isinstance(model, PagedCausalLM) or model.drafts is None:
            raise UnsupportedError(f"{info.model_id}: no draft head; load it with draft='mtp' or the folder of a head")
        self.num_tokens = min(num_tokens, model.drafts.most_drafts or num_tokens)
        self._min_probability = as_float("min_probability", min_probability, 0, 1)
        self.vocab_size: int | None = info.vocab_size
        self._steps, self._longest = model.drafts, info.max_sequence_length
        self._sampler = Sampler(info.vocab_size, info.device)

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        limits = cut_limits(completions, limits, num_tokens=self.num_tokens, longest=self._longest)
        active = []
        for row, (completion, limit) in enumerate(zip(completions, limits, strict=True)):
            handle = completion.handle
            if limit > 0 and handle is not None and self._steps.can_draft(handle):
                active.append(row)
        while active:
            try:
                return self._draw(completions, limits, active)
            except OutOfBlocksError:
                active = active[: len(active) // 2]  # keep the sequences that would be preempted last
        return Drafts.empty(len(completions))

    def forget(self, completion: Completion) -> None:
        self._sampler.forget(completion)

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        return False

    def _draw(self, completions: Sequence[Completion], limits: Sequence[int], active: Sequence[int]) -> Drafts:
        places = {row: place for place, row in enumerate(active)}
        handles = []
        for row in active:
            handle = completions[row].handle
            assert handle is not None  # `propose` has checked it
            handles.append(handle)

        def run(rows: Sequence[int], newest: torch.Tensor | None) -> torch.Tensor:
            if newest is None:
                token_ids = [completions[row].token_ids[-1] for row in rows]
                newest = index_tensor(token_ids, self._sampler.device)
            row_places = [places[row] for row in rows]
            return steps.logits(row_places, newest)

        active_limits = [limits[row] for row in active]
        with torch.no_grad(), self._steps.drafting(handles, active_limits) as steps:
            drafts, num_verified = draw(
                self._sampler,
                completions,
                limits,
                active,
                run,
                min_probability=self._min_probability,
                confidences=steps.confidences,
            )
            return drafts.first(num_verified)
