"""What callers see of a request: its completions as far as they have come, and its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paged.seq_id import SeqId


class Growth(NamedTuple):
    """What a completion has put out; these lists only grow, so a moment of them is kept by how long they are."""

    token_ids: list[int]
    texts: list[str]
    logprobs: list[dict[int, float]] | None


class Mark(NamedTuple):
    """A length of each list of a `Growth`; log probabilities are as many as tokens."""

    token_ids: int = 0
    texts: int = 0


_START = Mark()


@dataclass(eq=False)
class CompletionOutput:
    """One completion as far as it has come; a copy keeps the moment, and costs the same however long the text is.

    Lists that it gives are the reader's own: to change one changes no output.
    token_ids: the new tokens, an end token included. logprobs: for each of them log probability by token id, the chosen
    one first; None unless asked for.
    finish_reason: "stop", "length", "abort", "timeout", "error", or None while it runs.
    stop_reason: the token id or the string that ended it.
    text: of token_ids without the end token, up to the stop string; empty where the engine has no tokenizer.
    """

    index: int
    growth: Growth = field(default_factory=lambda: Growth([], [], None))
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # The part of `growth` that this is; to None for all that it comes to.
    begin: Mark = _START
    end: Mark | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.growth.token_ids[self.begin.token_ids : self.mark.token_ids]

    @property
    def text(self) -> str:
        return "".join(self.growth.texts[self.begin.texts : self.mark.texts])

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        found = self.growth.logprobs
        return None if found is None else found[self.begin.token_ids : self.mark.token_ids]

    @property
    def mark(self) -> Mark:
        """The end of this part, a `Mark` of all."""
        return Mark(len(self.growth.token_ids), len(self.growth.texts)) if self.end is None else self.end

    def since(self, begin: Mark) -> CompletionOutput:
        """This moment, kept, from `begin` on."""
        return CompletionOutput(self.index, self.growth, self.finish_reason, self.stop_reason, begin, self.mark)


@dataclass(frozen=True)
class RequestMetrics:
    """A request's own times in seconds, None until they are known.

    queued_s: from its arrival until it first had room in the cache. first_token_s: from its arrival to its first token.
    mean_token_s: between tokens after that, the mean over those of all its completions, known when it has ended.
    """

    queued_s: float | None = None
    first_token_s: float | None = None
    mean_token_s: float | None = None


@dataclass(eq=False)
class RequestOutput:
    """A request, as far as it has come; the same object from `step` to `step`, which grows.

    num_cached_tokens: tokens of the prompt whose K/V were found in the cache. error: why it failed.
    """

    request_id: SeqId
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def copy(self) -> RequestOutput:
        """This moment, kept; its cost does not depend on how long the outputs are."""
        return self.since([one.begin for one in self.outputs])

    def since(self, begins: Sequence[Mark]) -> RequestOutput:
        """This moment, kept, of each completion what came after its mark."""
        outputs = [one.since(begin) for one, begin in zip(self.outputs, begins, strict=True)]
        fields = self.finished, self.num_cached_tokens, self.error, self.metrics
        return RequestOutput(self.request_id, self.prompt_token_ids, outputs, *fields)
