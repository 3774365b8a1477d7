"""Checks of prompts and their options before a request is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.engine.config import EngineConfig
from paged.executors.model_executor import ModelExecutor, check_adapter, check_metadata
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.text.detokenizer import Message, PromptTokenizer, Tokenizer
from paged.kernels.core.errors import shown
from paged.prompt_embeds import PromptEmbeds
from paged.token_ids import as_token_ids

Prompt = str | Sequence[int] | Sequence[Message]


class PromptChecks:
    """Encodes prompts and checks that they can run; `Engine` documents the arguments."""

    def __init__(self, executor: ModelExecutor, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._executor = executor
        self._token_budget = config.token_budget
        info, capacity = executor.info(), executor.kv_capacity()
        self._vocab_size = info.vocab_size
        self._longest = info.max_sequence_length
        self._room = self._longest
        if capacity is not None:
            self._room = min(self._longest, capacity)

    def item_metadata(self, metadata: object, adapter: str | None) -> Mapping[str, Any]:
        """Return the metadata for all batch items of a request, after checking that the executor reads its keys."""
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
            raise InvalidInputError(f"metadata: {shown(metadata)}, expected values by text")
        values = dict(metadata)
        check_metadata(self._executor, "metadata", values)
        if adapter is not None:
            if values.get("lora_adapter") is not None:
                raise InvalidInputError("adapter: named in metadata, too, expected one of them")
            values["lora_adapter"] = adapter
        check_adapter(self._executor, values.get("lora_adapter"))
        return MappingProxyType(values)

    def check_embeds(self, embeds: object, num_tokens: int) -> None:
        if not isinstance(embeds, PromptEmbeds):
            raise InvalidInputError(f"prompt_embeds: {shown(embeds)}, expected PromptEmbeds or None")
        embeds.check(num_tokens, self._executor.embeds_limits)
        if embeds.longest_span > self._token_budget:
            expected = f"at most {self._token_budget}, the token budget, as it runs in one step"
            raise InvalidInputError(f"prompt_embeds: a span of {embeds.longest_span} tokens, expected {expected}")

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Encode a text or messages; return any other prompt unchanged; see `Engine.encode_prompt`."""
        if not is_text(prompt):
            return cast("Sequence[int]", prompt)
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, PromptTokenizer):
            raise InvalidInputError(
                f"prompt_token_ids: {shown(prompt)}, expected token ids, or a ChatTokenizer as the engine's tokenizer"
            )
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return tokenizer.encode_chat(cast("Sequence[Message]", prompt))

    def token_ids(self, prompt: Prompt) -> list[int]:
        return as_token_ids("prompt_token_ids", self.encode(prompt))

    def max_tokens(
        self, name: str, prompt: Sequence[int], params: SamplingParams, chunks: Iterable[tuple[int, int]] = ()
    ) -> int:
        """Check that a request can run, at least alone; return the number of new tokens that it may have.

        chunks: (start, end) of prompt tokens that must run in one step.
        """
        if not prompt:
            raise InvalidInputError(f"{name}: an empty prompt, expected at least one token")
        ids = params.token_ids
        self.check_ids(name, [min(prompt), max(prompt)])
        if ids:
            self.check_ids(name, [min(ids), max(ids)])
        if params.stop_strings and self.tokenizer is None:
            raise InvalidInputError(f"{name}: stop strings, and the engine has no tokenizer")
        room, manager = self._room, self._executor.kv_manager
        if manager is not None:
            room = min(room, manager.config.longest_with(chunks))
        # + 1: the last new token is never run and needs no slot.
        fitting = room + 1 - len(prompt)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(fitting, 1)
        longest = len(prompt) + max_tokens - 1
        if longest > self._longest:
            raise SequenceTooLongError(
                f"{name}: {longest} tokens with what it may generate, the longest sequence is {self._longest}"
            )
        if longest > room:
            raise InvalidInputError(f"{name}: {longest} tokens with what it may generate, the cache holds {room}")
        return max_tokens

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(f"{name}: token id {shown(token)}, expected 0 <= id < {self._vocab_size}")


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt is a text or messages, which need a tokenizer."""
    is_listed = isinstance(prompt, list | tuple) and len(prompt) > 0
    return isinstance(prompt, str) or (is_listed and isinstance(prompt[0], Mapping))
