"""Engine with speculative decoding by a draft model, the target's draft head, or n-grams of the text."""

from __future__ import annotations

from collections.abc import Iterable

from paged.errors import InvalidInputError
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.engine import Engine
from paged.executors.model_executor import ModelExecutor
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.drafting import Proposer
from paged.executors.speculation.head_proposer import HeadProposer
from paged.executors.speculation.prompt_lookup import PromptLookup
from paged.executors.text.detokenizer import Tokenizer


class SpeculativeDecoder(Engine):
    """Engine with speculative decoding: drafts come from a draft model, a draft head or the text itself.

    A step verifies the drafts of all sequences in one forward of the target. Greedy output equals the target's; sampled
    output has the target's distribution (see `rejection_sample`). `metrics` counts verified and accepted drafts. For
    all other arguments see `Engine`.

    Args:
        target: executor of the target model, which determines the output.
        draft: executor of the draft model. None takes the draft head that the target was loaded with, or without a
            head, n-grams of the text (`PromptLookup`).
        num_draft_tokens: maximum number of drafts for a sequence in a step.
        max_ngram: length of the longest n-gram to look up.
        draft_min_probability: see `HeadProposer` and `DraftModel`; 0 verifies all drafts.

    Raises:
        InvalidInputError: a number is out of range, the vocabularies differ, or the token budget is too small.
        UnsupportedError: an executor cannot roll tokens back, or the draft executor has no cache manager.
    """

    def __init__(
        self,
        target: ModelExecutor,
        draft: ModelExecutor | None = None,
        *,
        num_draft_tokens: int = 4,
        max_ngram: int = 3,
        draft_min_probability: float = 0.0,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
    ) -> None:
        proposer: Proposer
        if draft is None and target.capabilities().has_draft_head:
            proposer = HeadProposer(target, num_draft_tokens, min_probability=draft_min_probability)
        elif draft is None:
            if draft_min_probability:
                raise InvalidInputError(
                    f"draft_min_probability: {draft_min_probability}, expected 0 for n-grams, which have no probability"
                )
            proposer = PromptLookup(num_draft_tokens, max_ngram=max_ngram)
        else:
            if config is None:
                config = EngineConfig()
            proposer = DraftModel(
                draft, num_draft_tokens, token_budget=config.token_budget, min_probability=draft_min_probability
            )
        super().__init__(target, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, proposer=proposer, seed=seed)

    @property
    def acceptance_rate(self) -> float:
        """Fraction of verified drafts that were accepted; 0 before the first draft."""
        return self.metrics.accepted_tokens / max(self.metrics.draft_tokens, 1)
