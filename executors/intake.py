"""From what a caller asks for to a request that can run."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.detokenizer import Tokenizer
from paged.executors.model_executor import ModelExecutor
from paged.executors.request import Completion, CompletionOutput, Request, RequestOutput
from paged.executors.sampling_params import SamplingParams
from paged.executors.token_noise import Stream, hash_seeds, noise_keys
from paged.seq_id import SeqId


class Intake:
    """Checks requests against the model and the cache, and gives them their place in the order and their seeds.

    priority_requests: see `EngineConfig`. seed: of the seeds of requests that have none; drawn where None.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        priority_requests: int,
        seed: int | None,
    ) -> None:
        info, capacity = executor.info(), executor.kv_capacity()
        self._vocab_size = info.vocab_size
        self._longest = info.max_sequence_length
        self._room = self._longest if capacity is None else min(self._longest, capacity)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._priority_requests = priority_requests
        self._seed = secrets.randbits(64) if seed is None else seed
        self._arrivals = itertools.count()

    def request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: SeqId | None,
        priority: int,
        metadata: Mapping[str, Any] | None,
    ) -> Request:
        """A request with its completions, none of them begun.

        Raises:
            InvalidInputError: the prompt is empty, a token id is outside of the vocabulary, there are stop strings and
                no tokenizer, or prompt and max_tokens do not fit the cache.
            SequenceTooLongError: prompt and max_tokens are longer than the model allows.
        """
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        prompt = [int(token) for token in prompt_token_ids]
        max_tokens = self._check(f"request {request_id!r}", prompt, params)
        outputs = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)
        ]
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            rank=(arrival - priority * self._priority_requests, arrival),
            metadata={} if metadata is None else dict(metadata),
            max_tokens=max_tokens,
            end_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
            output=RequestOutput(request_id, prompt, outputs),
            arrived=perf_counter(),
        )
        seed = self._seed + arrival if params.seed is None else params.seed
        hashed = hash_seeds(np.array([seed % (1 << 64)], np.uint64))
        seeds = noise_keys(hashed, np.arange(params.n), Stream.TOKEN).tolist()
        request.completions = [Completion(request, index, seed, self._tokenizer) for index, seed in enumerate(seeds)]
        return request

    def _check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> int:
        """The new tokens it may have, after checking that it can run at all."""
        if not prompt:
            raise InvalidInputError(f"{name}: an empty prompt, expected at least one token")
        for token in (min(prompt), max(prompt), *params.token_ids):
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(f"{name}: token id {token}, expected 0 <= id < {self._vocab_size}")
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInputError(f"{name}: stop strings, and the engine has no tokenizer")
        # The last new token is never run, so it takes no room.
        fitting = self._room + 1 - len(prompt)
        max_tokens = max(fitting, 1) if params.max_tokens is None else params.max_tokens
        longest = len(prompt) + max_tokens - 1
        if longest > self._longest:
            raise SequenceTooLongError(
                f"{name}: {longest} tokens with what it may generate, the longest sequence is {self._longest}"
            )
        if longest > self._room:
            raise InvalidInputError(f"{name}: {longest} tokens with what it may generate, the cache holds {self._room}")
        return max_tokens
