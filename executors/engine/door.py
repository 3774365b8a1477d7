"""Constructor of an engine, and the checks of prompts before a request is queued."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.core import EngineCore
from paged.executors.model_executor import ModelExecutor, check_adapter, check_metadata
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys
from paged.executors.speculation.drafting import Proposer
from paged.executors.text.chat_template import Message
from paged.executors.text.detokenizer import PromptTokenizer, Tokenizer
from paged.kernels.common.compilation import serving_begins
from paged.kernels.common.scalars import as_int, shown
from paged.prompt_embeds import PromptEmbeds
from paged.token_ids import as_token_ids

Prompt = str | Sequence[int] | Sequence[Message]

_UINT64_MAX = (1 << 64) - 1


class RequestDoor(EngineCore):
    """Encodes prompts and checks that they can run; `Engine` documents the arguments."""

    def __init__(
        self,
        executor: ModelExecutor,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        proposer: Proposer | None = None,
        seed: int | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        super().__init__(executor, config, proposer)
        info, capacity = executor.info(), executor.kv_capacity()
        self._longest = info.max_sequence_length
        self._room = self._longest if capacity is None else min(self._longest, capacity)
        self._tokenizer = tokenizer
        if eos_token_ids is None:
            # A checkpoint may name tokens that its vocabulary does not have.
            self._eos_token_ids = frozenset(token for token in info.eos_token_ids if token < info.vocab_size)
        else:
            self._eos_token_ids = frozenset(as_token_ids("eos_token_ids", list(eos_token_ids)))
            self._check_ids("eos_token_ids", sorted(self._eos_token_ids))
        self._seed = secrets.randbits(64) if seed is None else as_int("seed", seed, low=-(1 << 63), high=_UINT64_MAX)
        self._arrivals = itertools.count()
        # Several engines may share an executor, and callers may have sequences of their own in its cache.
        self._name = f"engine-{secrets.token_hex(8)}"
        serving_begins()

    def _item_metadata(self, metadata: object, adapter: str | None) -> Mapping[str, Any]:
        """Return the metadata of all batch items of a request, after checking that the executor reads it."""
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
            raise InvalidInputError(f"metadata: {shown(metadata)}, expected values by text")
        values = dict(metadata)
        check_metadata(self.executor, "metadata", values)
        if adapter is not None:
            if values.get("lora_adapter") is not None:
                raise InvalidInputError("adapter: named in metadata, too, expected one of them")
            values["lora_adapter"] = adapter
        check_adapter(self.executor, values.get("lora_adapter"))
        return MappingProxyType(values)

    def _seeds(self, params: SamplingParams, arrival: int) -> list[int]:
        """Return a seed for each completion of a request."""
        seed = params.seed
        if seed is None:
            seed = self._seed + arrival
        hashed = hash_seeds(np.array([seed & _UINT64_MAX], np.uint64))
        seeds: list[int] = noise_keys(hashed, np.arange(params.n), Stream.TOKEN).tolist()
        return seeds

    def _check_embeds(self, embeds: object, num_tokens: int) -> None:
        if not isinstance(embeds, PromptEmbeds):
            raise InvalidInputError(f"prompt_embeds: {shown(embeds)}, expected PromptEmbeds or None")
        embeds.check(num_tokens, self.executor.embeds_limits)
        if embeds.longest_span > self.config.token_budget:
            expected = f"at most {self.config.token_budget}, the token budget, as it runs in one step"
            raise InvalidInputError(f"prompt_embeds: a span of {embeds.longest_span} tokens, expected {expected}")

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a text or of messages, and anything else itself. Any thread may call it.

        Raises:
            InvalidInputError: the engine's tokenizer does not encode, or it or the chat template refuses the prompt.
        """
        if not is_text(prompt):
            return cast("Sequence[int]", prompt)
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, PromptTokenizer):
            raise InvalidInputError(
                f"prompt_token_ids: {shown(prompt)}, expected token ids, or a ChatTokenizer as the engine's tokenizer"
            )
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return tokenizer.encode_chat(cast("Sequence[Message]", prompt))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return as_token_ids("prompt_token_ids", self.encode_prompt(prompt))

    def _max_tokens(
        self, name: str, prompt: Sequence[int], params: SamplingParams, chunks: Iterable[tuple[int, int]] = ()
    ) -> int:
        """Check that a request can run, alone at least; return the number of new tokens it may have.

        chunks: (start, end) of prompt tokens that must run in one step.
        """
        if not prompt:
            raise InvalidInputError(f"{name}: an empty prompt, expected at least one token")
        ids = params.token_ids
        self._check_ids(name, [min(prompt), max(prompt)])
        if ids:
            self._check_ids(name, [min(ids), max(ids)])
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInputError(f"{name}: stop strings, and the engine has no tokenizer")
        room, manager = self._room, self.executor.kv_manager
        if manager is not None:
            room = min(room, manager.config.longest_with(chunks))
        # The last new token is never run, so it takes no slot.
        fitting = room + 1 - len(prompt)
        max_tokens = max(fitting, 1) if params.max_tokens is None else params.max_tokens
        longest = len(prompt) + max_tokens - 1
        if longest > self._longest:
            raise SequenceTooLongError(
                f"{name}: {longest} tokens with what it may generate, the longest sequence is {self._longest}"
            )
        if longest > room:
            raise InvalidInputError(f"{name}: {longest} tokens with what it may generate, the cache holds {room}")
        return max_tokens

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(f"{name}: token id {shown(token)}, expected 0 <= id < {self._vocab_size}")


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt is a text or messages, which a tokenizer encodes."""
    is_listed = isinstance(prompt, list | tuple) and len(prompt) > 0
    return isinstance(prompt, str) or (is_listed and isinstance(prompt[0], Mapping))
