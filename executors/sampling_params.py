"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paged.errors import InvalidInputError


@dataclass(frozen=True)
class SamplingParams:
    """Of one request; the names are those of other engines.

    n: completions of the prompt, which is run once. max_tokens: new tokens at the most, None for as many as fit.
    temperature: 0 takes the best token. top_k: 0 or -1 for all. min_p: a share of the best token's probability.
    They apply in this order: allowed_token_ids, logit_bias, penalties, temperature, top_k, top_p of what is left,
    min_p. Tokens that tie with the last one of top_k or top_p stay.
    repetition_penalty: logits of tokens that occurred, the prompt included, are divided by it where positive, else
    multiplied (Keskar et al., 2019). presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for
    tokens of the output.
    stop: the text ends before the first of these strings. stop_token_ids: the output ends with the first of these.
    ignore_eos: the engine's end tokens do not end it. min_tokens: before that many no end token is chosen, nor does a
    stop string end the text.
    seed: the same tokens whatever else runs; None draws one. The i-th of n completions derives its own.
    logprobs: for every token its log probability and that many best ones', before anything above applies.

    Raises:
        InvalidInputError: a value is outside of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        allowed, longest = self.allowed_token_ids, self.max_tokens
        for name, is_right, expected in (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "a finite number above 0"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a finite number"),
            ("allowed_token_ids", allowed is None or len(allowed) > 0, "at least one token id"),
            ("stop", "" not in self.stop_strings, "strings that are not empty"),
            ("max_tokens", longest is None or longest >= 1, "at least 1"),
            (
                "min_tokens",
                0 <= self.min_tokens <= (self.min_tokens if longest is None else longest),
                "0 to max_tokens",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
        ):
            if not is_right:
                raise InvalidInputError(f"{name}: {getattr(self, name)!r}, expected {expected}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also where it is one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred weigh less or more."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def token_ids(self) -> list[int]:
        """Every id named anywhere, for a check against the vocabulary."""
        return [*(self.logit_bias or ()), *(self.allowed_token_ids or ()), *self.stop_token_ids]
