"""Sampling parameters: how a request's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paged.errors import CheckpointError, InvalidInputError
from paged.kernels.core.errors import as_bool, as_float, as_int, shown
from paged.models.loading.hf_config import HfConfig
from paged.token_ids import as_token_ids

# Limit, because making this many completions takes a quarter of a second.
MAX_COMPLETIONS = 4096
# Limit of token ids in a parameter; larger than any vocabulary.
MAX_IDS = 1 << 20
# Limit, because log probabilities of a whole vocabulary as Python numbers would take 20 ms for each token.
MAX_LOGPROBS = 1024
# Limit, because every step before `min_tokens` masks stop tokens one by one.
MAX_STOP_TOKENS = 1024
# Limit, because each string is searched for in every new piece of text.
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 1 << 14

# Smallest normal float32 number, the dtype of sampling.
_SMALLEST = 2.0**-126


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, with the names that other engines use.

    None means the default, except for max_tokens. Integers and floats of any library are accepted and converted to
    Python's types; bools are refused. Token ids may be in any sequence.

    Filters apply in this order: allowed_token_ids, logit_bias, penalties, temperature, top_k, top_p (of the remaining
    mass), min_p. Tokens that tie with the last token of top_k or top_p are kept.

    Attributes:
        n: number of completions, at most 4,096. With a cache manager, the prompt runs once.
        temperature: 0 and values below 2^-126 take the best token.
        top_p: share of the probability mass to keep, above 0; values below 2^-126 take the best token.
        top_k: number of best tokens to keep; 0 and -1 keep all.
        min_p: lowest probability to keep, as a fraction of the best token's.
        repetition_penalty: divisor of positive logits, and factor of negative logits, for tokens in prompt or output
            (Keskar et al., 2019).
        presence_penalty, frequency_penalty: numbers subtracted from the logits of tokens in the output, once or for
            each occurrence.
        logit_bias: number to add to the logit, by token id.
        allowed_token_ids: the only token ids to choose from.
        stop: up to 256 stop strings with 16,384 characters in total. The text ends before the first string to complete;
            if several complete at the same character, before the longest.
        stop_token_ids: up to 1,024 token ids; the output ends with the first of them.
        ignore_eos: whether to ignore the engine's end tokens.
        max_tokens: maximum number of new tokens; None for as many as fit.
        min_tokens: number of tokens before which no end or stop token is chosen and no stop string ends the text.
        seed: seed of the draws, which do not depend on other requests; each of n completions derives its own seed. None
            draws a seed.
        logprobs: number of best tokens, at most 1,024, to report for every token besides its own log probability. The
            distribution is before all filters, unless `EngineConfig.logprobs_mode` changes it.
        prompt_logprobs: the same for every prompt token but the first. The prompt is then computed without cached
            prefixes, in chunks whose logits take at most 256 MB.
        return_hidden_states: whether to return the states of prompt and output, see `CompletionOutput.hidden_states`.
            The request then computes its whole prompt, and its steps run without CUDA graphs.
        return_routed_experts: whether to return the experts chosen for each token, with the same cost.

        Raises:
            InvalidInputError: a value has the wrong type, is out of range or not finite, or a list is too long.
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
    prompt_logprobs: int | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        """Check every value and convert it to Python's types."""
        for field in fields(self):
            value = getattr(self, field.name)
            # None is kept for max_tokens, where it means as many as fit.
            if value is None and field.name != "max_tokens":
                value = field.default
            if value is not None:
                value = _read(field.name, value)
            object.__setattr__(self, field.name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens: {self.min_tokens}, expected 0 to max_tokens, {self.max_tokens}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, even if it is one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the best token."""
        return self.temperature < _SMALLEST or self.top_k == 1 or self.top_p <= _SMALLEST

    @property
    def filters(self) -> dict[str, float]:
        """Parameter of each filter of `sample_tokens`; 0, 1 and 0 keep all."""
        return {"top_k": max(self.top_k, 0), "top_p": self.top_p, "min_p": self.min_p}

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def returns_states(self) -> bool:
        """Whether hidden states or routed experts are requested."""
        return self.return_hidden_states or self.return_routed_experts

    @property
    def token_ids(self) -> list[int]:
        """All token ids in these parameters, for a check against the vocabulary."""
        return [*(self.logit_bias or ()), *(self.allowed_token_ids or ()), *self.stop_token_ids]


# Parameters that a generation_config.json may set.
CHECKPOINT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: HfConfig) -> dict[str, Any]:
    """Return the CHECKPOINT_PARAMS set by a generation_config.json. `do_sample: false` means temperature 0.

    Raises:
        CheckpointError: a value has the wrong type or is out of range.
    """
    values = generation_config.values
    named = {}
    for name in CHECKPOINT_PARAMS:
        if values.get(name) is not None:
            named[name] = values[name]
    if values.get("do_sample") is False:
        named["temperature"] = 0.0
    try:
        SamplingParams(**named)
    except InvalidInputError as error:
        raise CheckpointError(f"{generation_config.source}: {error}") from error
    return named


_MOST = (1 << 63) - 1
# Lowest and highest value of each integer parameter.
_INTEGERS = {
    "n": (1, MAX_COMPLETIONS),
    "top_k": (-1, _MOST),
    "max_tokens": (1, _MOST),
    "min_tokens": (0, _MOST),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-_MOST - 1, 2 * _MOST + 1),
}
# Lowest and highest value of each float parameter, which must also be finite in float32.
_FLOATS = {
    "temperature": (0.0,),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_SMALLEST,),
    "presence_penalty": (),
    "frequency_penalty": (),
}


def _read(name: str, value: Any) -> Any:
    if name in _INTEGERS:
        lowest, highest = _INTEGERS[name]
        return as_int(name, value, low=lowest, high=highest)
    if name in _FLOATS:
        number = as_float(name, value, *_FLOATS[name])
        return max(number, _SMALLEST) if name == "top_p" else number
    if name in ("ignore_eos", "return_hidden_states", "return_routed_experts"):
        return as_bool(name, value)
    if name == "logit_bias":
        return _biases(value)
    if name == "stop":
        return _stops(value)
    max_length = MAX_STOP_TOKENS if name == "stop_token_ids" else MAX_IDS
    ids = tuple(as_token_ids(name, value, max_length=max_length, may_be_set=True))
    if name == "allowed_token_ids" and not ids:
        raise InvalidInputError("allowed_token_ids: none, expected at least one token id")
    return ids


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_IDS:
        raise InvalidInputError(f"logit_bias: {shown(value)}, expected numbers by token id, at most {MAX_IDS}")
    biases = {}
    for token, bias in value.items():
        biases[as_int("logit_bias", token)] = as_float("logit_bias", bias)
    return biases


def _stops(value: Any) -> str | tuple[str, ...]:
    stops: tuple[Any, ...] = (None,)
    if isinstance(value, str):
        stops = (value,)
    elif isinstance(value, list | tuple):
        stops = tuple(value)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidInputError(f"stop: {shown(value)}, expected a string, or a list of them, that are not empty")
    num_characters = sum(map(len, stops))
    if len(stops) > MAX_STOP_STRINGS or num_characters > MAX_STOP_CHARACTERS:
        raise InvalidInputError(
            f"stop: {len(stops)} strings of {num_characters} characters, "
            f"expected at most {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS}"
        )
    return value if isinstance(value, str) else stops
