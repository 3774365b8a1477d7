"""A request in the engine, with its parameters and completions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.retention import Retention
from paged.cache.tiers.files import FileRead
from paged.errors import InvalidInputError
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.requests.token_rules import AwaitedMask, LogitsProcessor, TextEnd, TokenMask
from paged.executors.text.detokenizer import Detokenizer, Tokenizer
from paged.executors.text.stop_strings import StopReader
from paged.prompt_embeds import PromptEmbeds
from paged.seq_id import SeqId
from paged.step.batch import FullLogits, LogitsPolicy, UnifiedBatchItem, VerifyLogits

# Placeholder for a token if all logits are NaN or -inf.
NO_TOKEN = -1

# Size of prompt chunks under `EngineConfig.batch_invariant`.
FIXED_CHUNK = 256
_UNKNOWN = 0  # placeholder for a token that only the device knows, see `UnifiedBatch.device_ids`


def namespace_of(adapter: str | None, cache_salt: str | None) -> Hashable:
    """Return the namespace of the cached K/V of requests with this adapter and salt."""
    if cache_salt is None:
        return adapter
    return (adapter, cache_salt)


class State(Enum):
    """State of a completion: in the queue (perhaps swapped out), running its prompt, decoding, or done."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """A request and its progress; times are in seconds of `perf_counter`.

    Attributes:
        turn: sort key of its completions; earlier turns run first.
        name: unique prefix of its sequence ids in the executor.
        cache_salt: only requests with the same salt share K/V.
        retention: priority of the prompt's cached blocks, or None.
        embeds: rows in place of the embeddings of some prompt tokens, or None.
        num_begun: number of completions that were queued or forked; the others fork when the first one's prompt has
            run.
        has_begun: whether a completion has run.
        token_masks, logits_processors, text_ends: one for each completion, or none.
        unfinished: completions that have not ended.
        num_prompt_rows: number of prompt tokens whose next token's log probability has been computed.
        num_preemptions, num_recomputed: see `RequestMetrics`.
        generating_s: sum over ended completions of the time from the first token to their last.
    """

    request_id: SeqId
    prompt: tuple[int, ...]
    params: SamplingParams
    turn: tuple[int, int]
    metadata: Mapping[str, Any]
    max_tokens: int
    end_token_ids: frozenset[int]
    output: RequestOutput
    arrived: float
    name: str = ""
    cache_salt: str | None = None
    retention: Retention | None = None
    embeds: PromptEmbeds | None = None
    deadline: float = math.inf
    token_masks: list[TokenMask] = field(default_factory=list)
    logits_processors: list[LogitsProcessor] = field(default_factory=list)
    text_ends: list[TextEnd] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    num_begun: int = 0
    has_begun: bool = False
    unfinished: dict[Completion, None] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_prompt_rows: int = 0
    first_token: float | None = None
    num_preemptions: int = 0
    num_recomputed: int = 0
    generating_s: float = 0.0

    @cached_property
    def allowed_ids(self) -> NDArray[np.int64]:
        """Allowed tokens without repetition; empty if all are allowed."""
        return np.unique(np.array(self.params.allowed_token_ids or (), np.int64))

    @cached_property
    def biases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens with a bias, and their biases."""
        biases = self.params.logit_bias or {}
        return np.fromiter(biases, np.int64, len(biases)), np.fromiter(biases.values(), np.float32, len(biases))

    @cached_property
    def ending_ids(self) -> frozenset[int]:
        """Sampled ids that end a completion: end tokens and NO_TOKEN."""
        return self.end_token_ids | {NO_TOKEN}

    @cached_property
    def end_ids(self) -> NDArray[np.int64]:
        """Tokens that end a completion."""
        return np.fromiter(self.end_token_ids, np.int64, len(self.end_token_ids))

    def begin_prompt_again(self) -> None:
        """Drop the prompt's log probabilities after a change of weights, unless the first new token exists."""
        has_tokens = any(completion.token_ids for completion in self.completions)
        if self.output.prompt_table is not None and not has_tokens:
            self.num_prompt_rows, self.output.prompt_table = 0, [None]  # a new list, because copies share the old one

    @property
    def adapter(self) -> str | None:
        """Name of the request's adapter, or None."""
        return self.metadata.get("lora_adapter")

    @property
    def namespace(self) -> Hashable:
        """Namespace of the request's cached K/V."""
        return namespace_of(self.adapter, self.cache_salt)


class Completion:
    """One completion of a request: its tokens and its sequence in the cache.

    Attributes:
        handle: handle of the sequence, if the executor has a cache manager.
        chunk, chunk_start: the tokens to run next, and the position of the first.
        is_final, policy: fields of the batch item that runs the chunk.
        tokens: tokens that must run before the next token is sampled: the prompt and, after a preemption, the output
            so far.
        prefilled: number of `tokens` in the cache or in a running step.
        num_ran: number of tokens that had run when the completion last lost its K/V.
        last_of_prompt: position of the prompt's last token.
        max_tokens: maximum number of output tokens.
        ending_ids: token ids that end the completion.
        is_watched: whether a detokenizer or a mask reads every token.
        reads_tokens: whether sampling the next token needs the earlier tokens on the host.
        is_swapped: whether the K/V are in host memory.
        token_ids, states: fields of the output.
        num_sampled: number of sampled tokens, including tokens that the host does not know yet.
        token_mask, logits_processor: see `Engine.add_request`.
        awaited_mask: the mask if it is computed in another thread, else None.
        from_files: read of its blocks from files while it waits, or None.
    """

    def __init__(self, request: Request, index: int, seed: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.seq_id: SeqId = f"{request.name}/{index}"
        self.params = request.params
        self.output = request.output.outputs[index]
        self.token_ids = self.output.growth.token_ids
        self.states = self.output.growth.states
        self.request_output = request.output
        self.state = State.WAITING
        self.handle: KvCacheHandle | None = None
        self.is_swapped = False
        self.from_files: FileRead | None = None
        self.tokens: Sequence[int] = request.prompt
        self.prefilled = self.num_sampled = self.num_ran = 0
        self.chunk: list[int] = []
        self.chunk_start = 0
        self.is_final = True
        self.policy: LogitsPolicy = FullLogits()
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops: StopReader | None = None
        self.token_mask: TokenMask | None = None
        if request.token_masks:
            self.token_mask = request.token_masks[index]
        self.awaited_mask = self.token_mask if isinstance(self.token_mask, AwaitedMask) else None
        self.logits_processor: LogitsProcessor | None = None
        if request.logits_processors:
            self.logits_processor = request.logits_processors[index]
        self._text_end: TextEnd | None = None
        if request.text_ends:
            self._text_end = request.text_ends[index]
        self.is_watched = tokenizer is not None or self.token_mask is not None
        self.last_of_prompt = len(request.prompt) - 1
        self.max_tokens = request.max_tokens
        self.reads_tokens = self.token_mask is not None or self.logits_processor is not None
        self.ending_ids = request.ending_ids

    def __repr__(self) -> str:
        return f"Completion({self.request.request_id!r}, {self.index}, {self.state.name}, {self.num_tokens} tokens)"

    @property
    def turn(self) -> tuple[int, int, int]:
        """Sort key; earlier turns run first."""
        return (*self.request.turn, self.index)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.request.prompt) + len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """1 plus the number of forks at the end of its prompt."""
        if self.index > 0:
            return 1
        return 1 + len(self.request.completions) - self.request.num_begun

    @property
    def longest(self) -> int:
        """Maximum number of tokens in the cache; the last new token is never run."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def cached(self) -> int:
        """Number of tokens in the cache or in a running step; all but the newest one if it decodes."""
        if self.prefilled < len(self.tokens):
            return self.prefilled
        return max(self.prefilled, self.last_of_prompt + self.num_sampled)

    @property
    def is_full(self) -> bool:
        """Whether the output has `max_tokens`."""
        return len(self.token_ids) >= self.max_tokens

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens to run before the next token can be sampled."""
        return len(self.tokens) - self.cached

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether it still has to compute the prompt's log probabilities, which the first completion does for all."""
        request = self.request
        is_wanted = self.index == 0 and self.params.prompt_logprobs is not None
        return is_wanted and request.num_prompt_rows < len(request.prompt) - 1

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest token are in the cache."""
        return self.cached > 0 and self.cached == self.num_tokens - 1 and bool(self.token_ids)

    @property
    def is_behind(self) -> bool:
        """Whether its newest token is not known on the host yet."""
        return self.num_sampled > len(self.token_ids)

    def has_mask(self, deadline: float, *, is_alone: bool = False) -> bool:
        """Return whether its next mask has arrived.

        If its masks are quick or nothing else can run, wait until `deadline`, in seconds of `perf_counter`.
        """
        if self.awaited_mask is None:
            return True
        if self.is_behind:  # a mask cannot be requested before the host knows the newest token
            return self.awaited_mask.is_quick
        timeout = 0.0
        if is_alone or self.awaited_mask.is_quick:
            timeout = deadline - perf_counter()
        return self.awaited_mask.is_ready(timeout)

    def close_mask(self) -> None:
        """Free the resources of its awaited mask."""
        if self.awaited_mask is not None:
            self.awaited_mask.close()

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens from a position on."""
        beyond = start - len(self.request.prompt)
        if beyond >= 0:
            return self.token_ids[beyond:]
        return [*self.request.prompt[start:], *self.token_ids]

    def hold(self, handle: KvCacheHandle | None) -> None:
        """Set the handle or None. Tokens that the sequence already holds are not run."""
        self.handle = handle
        self.prefilled = 0 if handle is None else handle.num_tokens

    def requeue(self) -> None:
        """Forget the K/V, so that all tokens run again."""
        self.num_ran = max(self.num_ran, self.cached)
        self.hold(None)
        self.tokens = self.tokens_from(0)

    def start_over(self, handle: KvCacheHandle) -> None:
        """Begin again by a new sequence after the chunk is set; the tokens before the chunk join its beginning."""
        end = self.chunk_start + len(self.chunk)
        self.hold(handle)
        self.chunk = self.tokens_from(0)[:end]
        self.chunk_start = 0
        self.prefilled = end

    def item(self) -> UnifiedBatchItem:
        """Return the batch item of the chunk."""
        return UnifiedBatchItem(
            seq_id=self.seq_id,
            q_tokens=self.chunk,
            kv_cache=self.handle,
            pos_offset=self.chunk_start,
            is_final_chunk=self.is_final,
            metadata=self.request.metadata,
            logits_policy=self.policy,
            embeds=self.request.embeds,
        )

    def whole_spans(self, count: int) -> int:
        """Return how many tokens to prefill without cutting a span: up to `count`, or more if a span starts here."""
        embeds = self.request.embeds
        if embeds is None:
            return count
        return embeds.whole_spans(self.cached, self.cached + count) - self.cached

    @property
    def fixed_chunk(self) -> int:
        """Number of tokens to prefill next, which depends only on the request; 1 for output that runs again."""
        start, end = self.cached, len(self.request.prompt)
        if start >= end:
            return 1
        return _fixed_end(start, end, self.request.embeds) - start

    def full_chunks(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` lie in full fixed chunks of the prompt."""
        return min(num_tokens, len(self.request.prompt)) // FIXED_CHUNK * FIXED_CHUNK

    @property
    def has_full_chunk(self) -> bool:
        """Whether its chunk is a full fixed chunk of the prompt, equal in every prompt with the same beginning."""
        end = self.chunk_start + len(self.chunk)
        is_full = len(self.chunk) == FIXED_CHUNK and self.full_chunks(end) == end
        return is_full and self.request.embeds is None

    def take_chunk(self, count: int) -> None:
        """Set the chunk to the next `count` tokens to prefill."""
        start = self.cached
        end = start + count
        wants_all = self.wants_prompt_rows
        self.chunk = list(self.tokens[start:end])
        self.chunk_start = start
        self.policy = VerifyLogits() if wants_all else FullLogits()
        # Output that runs again returns logits, so that it runs exactly like the former decode steps, also in graphs.
        self.is_final = wants_all or end == len(self.tokens) or start >= len(self.request.prompt)

    def follow(self, drafts: Sequence[int] = ()) -> None:
        """Set the chunk to the newest token (perhaps known only on the device) and drafts."""
        newest = _UNKNOWN if self.is_behind else self.token_ids[-1]
        self.chunk = [newest, *drafts]
        self.chunk_start = self.cached
        self.policy = VerifyLogits() if drafts else FullLogits()
        self.is_final = True

    def finish_reason(self) -> str | None:
        """Update the text; return the finish reason if the newest token ends the completion, else None."""
        token, count, is_full = self.token_ids[-1], len(self.token_ids), self.is_full
        if token < 0:
            self.token_ids.pop()
            return "error"
        is_end = token in self.ending_ids
        if self._detokenizer is not None and self._read_text(count - is_end, is_last=is_end or is_full):
            return "stop"
        if is_end:
            self.output.stop_reason = token
            return "stop"
        if not is_full and self.token_mask is not None:
            if not self.token_mask.accept_token(token):
                raise InvalidInputError(f"token_mask: refuses token {token}, which it has allowed")
            if self.token_mask.is_terminated():
                return "stop"
        return "length" if is_full else None

    def _read_text(self, count: int, *, is_last: bool) -> bool:
        """Update the text up to `count` tokens; return whether a stop string or its `TextEnd` ends it here."""
        assert self._detokenizer is not None
        text = self._detokenizer.read(self.token_ids, count, is_last=is_last)
        stop: str | None = None
        may_stop = len(self.token_ids) >= self.params.min_tokens
        if self.params.stop:
            self._stops = self._stops or StopReader(self.params.stop_strings)
            text, stop = self._stops.read(text, may_stop=may_stop)
            if is_last and stop is None:
                text += self._stops.held
        self.output.growth.texts.append(text)
        self.output.stop_reason = stop
        is_complete = self._text_end is not None and self._text_end.read(text)
        return stop is not None or (is_complete and may_stop)


def _fixed_end(start: int, num_tokens: int, embeds: PromptEmbeds | None) -> int:
    """Return where a chunk from `start` of a prompt with `num_tokens` ends under batch_invariant."""
    end = min((start // FIXED_CHUNK + 1) * FIXED_CHUNK, num_tokens)
    return end if embeds is None else embeds.whole_spans(start, end)


def whole_chunks(num_tokens: int, embeds: PromptEmbeds | None, *, is_fixed: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the parts of a prompt that must run in one step.

    is_fixed: whether the prompt runs in fixed chunks; otherwise only its spans must not be cut.
    """
    if not is_fixed:
        if embeds is not None:
            yield from embeds.spans
        return
    start = 0
    while start < num_tokens:
        end = _fixed_end(start, num_tokens, embeds)
        yield start, end
        start = end
