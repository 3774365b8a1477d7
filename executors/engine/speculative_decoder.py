"""Speculative decoding: the target's own output, several tokens a forward where the drafts are good."""

from __future__ import annotations

from collections.abc import Iterable

from paged.executors.engine.config import EngineConfig
from paged.executors.engine.engine import Engine
from paged.executors.model_executor import ModelExecutor
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.prompt_lookup import PromptLookup
from paged.executors.text.detokenizer import Tokenizer


class SpeculativeDecoder(Engine):
    """An engine whose decodes carry drafts, of a draft model or, without one, of the text itself.

    A step verifies the drafts of all sequences in one forward of the target. Greedy output is the target's own, and
    sampled output is distributed as the target's (see `rejection_sample`). `metrics` counts drafts, and those accepted.

    num_draft_tokens: for each sequence and step, at the most. max_ngram: of the text's lookup.

    Raises:
        InvalidInputError: a number is not positive, the vocabularies differ, or a step's budget is too small.
        UnsupportedError: one of the executors cannot take tokens back, or the draft's has no cache manager.
    """

    def __init__(
        self,
        target: ModelExecutor,
        draft: ModelExecutor | None = None,
        *,
        num_draft_tokens: int = 4,
        max_ngram: int = 3,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if draft is None:
            proposer: DraftModel | PromptLookup = PromptLookup(num_draft_tokens, max_ngram=max_ngram)
        else:
            proposer = DraftModel(draft, num_draft_tokens, token_budget=(config or EngineConfig()).token_budget)
        super().__init__(target, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, proposer=proposer, seed=seed)

    @property
    def acceptance_rate(self) -> float:
        """Drafts that stayed, of those proposed so far; 0 before the first."""
        return self.metrics.accepted_tokens / max(self.metrics.draft_tokens, 1)
