"""Admission of requests: from what a caller asks for to a request that can run."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.lora_loader import check_adapter
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import CompletionOutput, RequestOutput
from paged.executors.requests.request import Completion, Request
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys
from paged.executors.text.detokenizer import Tokenizer
from paged.kernels.common.scalars import as_float, as_int, shown
from paged.seq_id import SeqId
from paged.token_ids import as_token_ids

# A priority beyond this is one of a mistake; products with `priority_requests` stay small numbers.
_MAX_PRIORITY = 1 << 31
_MASK = (1 << 64) - 1


class Admission:
    """Checks requests against the model and the cache, and gives them their rank and their seeds.

    eos_token_ids: None for the executor's own. priority_requests: see `EngineConfig`. seed: of the seeds of requests
    that have none; drawn where None.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int] | None,
        priority_requests: int,
        seed: int | None,
    ) -> None:
        info, capacity = executor.info(), executor.kv_capacity()
        self._executor = executor
        self._vocab_size = info.vocab_size
        self._longest = info.max_sequence_length
        self._room = self._longest if capacity is None else min(self._longest, capacity)
        self._tokenizer = tokenizer
        if eos_token_ids is None:
            # A checkpoint may name tokens that its vocabulary does not have.
            self._eos_token_ids = frozenset(one for one in info.eos_token_ids if one < info.vocab_size)
        else:
            given = set(eos_token_ids) if isinstance(eos_token_ids, set | frozenset) else eos_token_ids
            self._eos_token_ids = frozenset(as_token_ids("eos_token_ids", list(given)))
            self._check_ids("eos_token_ids", sorted(self._eos_token_ids))
        self._priority_requests = priority_requests
        self._seed = secrets.randbits(64) if seed is None else as_int("seed", seed, low=-(1 << 63), high=_MASK)
        self._arrivals = itertools.count()
        # Several engines may share an executor, and callers may have sequences of their own in its cache.
        self._name = f"engine-{secrets.token_hex(8)}"

    def request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: SeqId | None,
        priority: int,
        metadata: Mapping[str, Any] | None,
        timeout_s: float | None,
        cache_salt: str | None,
    ) -> Request:
        """Check the arguments of `Engine.add_request`; a request with its completions, none of them begun."""
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"params: {shown(params)}, expected SamplingParams")
        params = params.snapshot()
        metadata = _checked_metadata(metadata)
        check_adapter(self._executor, metadata.get("lora_adapter"))
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidInputError(f"cache_salt: {shown(cache_salt)}, expected a text that is not empty, or None")
        cache_salt = None if cache_salt is None else str.__str__(cache_salt)
        priority = as_int("priority", priority, low=-_MAX_PRIORITY, high=_MAX_PRIORITY)
        now = perf_counter()
        deadline = math.inf
        if timeout_s is not None:
            deadline = now + as_float("timeout_s", timeout_s, 0.0, math.inf)
        prompt = list(as_token_ids("prompt_token_ids", prompt_token_ids))
        max_tokens = self._check(
            "prompt_token_ids" if request_id is None else f"request {request_id!r}", prompt, params
        )
        arrival = next(self._arrivals)
        name = f"{self._name}-{arrival}"
        # Not to be guessed, so that no id that a caller gives can be taken already.
        request_id = f"request-{arrival}-{secrets.token_hex(4)}" if request_id is None else request_id
        outputs = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)
        ]
        eos_token_ids = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            rank=(arrival - priority * self._priority_requests, arrival),
            metadata=metadata,
            max_tokens=max_tokens,
            end_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
            output=RequestOutput(request_id, prompt.copy(), outputs),
            arrived=now,
            name=name,
            cache_salt=cache_salt,
            deadline=deadline,
        )
        seed = self._seed + arrival if params.seed is None else params.seed
        hashed = hash_seeds(np.array([seed & _MASK], np.uint64))
        seeds = noise_keys(hashed, np.arange(params.n), Stream.TOKEN).tolist()
        request.num_left = params.n
        request.completions = [Completion(request, index, seed, self._tokenizer) for index, seed in enumerate(seeds)]
        return request

    def _check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> int:
        """The new tokens it may have, after checking that it can run at all."""
        if not prompt:
            raise InvalidInputError(f"{name}: an empty prompt, expected at least one token")
        ids = params.token_ids
        self._check_ids(name, [min(prompt), max(prompt), *((min(ids), max(ids)) if ids else ())])
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInputError(f"{name}: stop strings, and the engine has no tokenizer")
        # The last new token is never run, so it takes no slot.
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

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(f"{name}: token id {shown(token)}, expected 0 <= id < {self._vocab_size}")


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    if metadata is None:
        return {}
    try:
        items: dict[Any, Any] = dict(metadata) if isinstance(metadata, Mapping) else {None: None}
    except Exception as error:
        raise InvalidInputError(f"metadata: {shown(metadata)}, which cannot be read") from error
    if not all(isinstance(key, str) for key in items):
        raise InvalidInputError(f"metadata: {shown(metadata)}, expected values by text")
    # The adapter's name is compared with those of others.
    checked: dict[str, Any] = {str.__str__(key): value for key, value in items.items()}
    if isinstance(name := checked.get("lora_adapter"), str):
        checked["lora_adapter"] = str.__str__(name)
    return checked
