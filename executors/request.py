"""A request on its way through the engine: what was asked, its completions, and what callers see of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from paged.batch import FullLogits, UnifiedBatchItem, VerifyLogits
from paged.executors.detokenizer import Detokenizer, Tokenizer, find_stop, held_back
from paged.executors.sampling_params import SamplingParams
from paged.kv_cache import KvCacheHandle
from paged.seq_id import SeqId

# Given in place of a token where the logits left none to choose: all of them NaN or -inf.
NO_TOKEN = -1


@dataclass(eq=False)
class CompletionOutput:
    """One completion, as far as it has come.

    token_ids: the new tokens, an end token included. logprobs: for each of them log probability by token id, the chosen
    one first; None unless asked for. finish_reason: "stop", "length", "abort", "error", or None while it runs.
    stop_reason: the token id or the string that ended it.
    text: of token_ids without the end token, up to the stop string; empty where the engine has no tokenizer.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


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

    def copy(self) -> RequestOutput:
        """This moment, kept."""
        outputs = [
            CompletionOutput(
                index=one.index,
                token_ids=one.token_ids.copy(),
                text=one.text,
                logprobs=None if one.logprobs is None else one.logprobs.copy(),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for one in self.outputs
        ]
        return RequestOutput(
            self.request_id, self.prompt_token_ids, outputs, self.finished, self.num_cached_tokens, self.error
        )


class RunningItem(UnifiedBatchItem):
    """An item that moves on with its sequence: to make 256 of them anew takes 220 us a step."""

    def move(self, q_tokens: Sequence[int], pos_offset: int, **fields: Any) -> None:
        """The next tokens and where they stand."""
        self.__dict__.update(q_tokens=q_tokens, pos_offset=pos_offset, **fields)


class State(Enum):
    """Of a completion: in the queue (perhaps swapped out), with prompt left to run, decoding, or done."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """What was asked. rank: completions of lower rank go first. arrived, first_token: seconds of `perf_counter`.

    num_begun: completions that are in the engine's hands; the others wait for the first one's prompt, to fork from it.
    """

    request_id: SeqId
    prompt: list[int]
    params: SamplingParams
    rank: tuple[int, int]
    metadata: Mapping[str, Any]
    max_tokens: int
    end_token_ids: frozenset[int]
    output: RequestOutput
    arrived: float
    completions: list[Completion] = field(default_factory=list)
    num_begun: int = 0
    first_token: float | None = None

    @property
    def namespace(self) -> Hashable:
        """Requests share cached K/V within one: they depend on the adapter."""
        return self.metadata.get("lora_adapter")


class Completion:
    """One completion of a request: its tokens and its place in the cache.

    handle: where the executor's cache manager knows the sequence. item: what runs next. tokens: what has to run before
    the next token can be sampled: the prompt, after a preemption with the output until then. cached: how many tokens
    the cache holds. is_swapped: in host memory. token_ids: the output's.
    reported: the request's id and output.
    """

    def __init__(self, request: Request, index: int, seed: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.seq_id: SeqId = f"{request.request_id}/{index}"
        self.params = request.params
        self.output = request.output.outputs[index]
        self.token_ids = self.output.token_ids
        self.reported = request.request_id, request.output
        self.state = State.WAITING
        self.handle: KvCacheHandle | None = None
        self.is_swapped = False
        self.tokens: list[int] = request.prompt
        self.cached = 0
        self.item = RunningItem(self.seq_id, (), metadata=dict(request.metadata))
        self._item_fields = self.item.__dict__
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._last_of_prompt = len(request.prompt) - 1
        self._max_tokens = request.max_tokens
        self._end_token_ids = request.end_token_ids | {NO_TOKEN}

    def __repr__(self) -> str:
        return f"Completion({self.seq_id!r}, {self.state.name}, {self.num_tokens} tokens)"

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return (*self.request.rank, self.index)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.request.prompt) + len(self.token_ids)

    @property
    def longest(self) -> int:
        """Tokens the cache may have to hold: the last new one is never run."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def num_to_prefill(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return len(self.tokens) - self.cached

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest token are in the cache."""
        return self.cached > 0 and self.cached == self.num_tokens - 1 and bool(self.token_ids)

    @property
    def is_ending(self) -> bool:
        """Whether the next token is the last it may have."""
        return len(self.token_ids) + 1 >= self._max_tokens

    def tokens_from(self, start: int) -> list[int]:
        """The tokens from that position on."""
        beyond = start - len(self.request.prompt)
        return self.token_ids[beyond:] if beyond >= 0 else self.request.prompt[start:] + self.token_ids

    def hold(self, handle: KvCacheHandle | None) -> None:
        """It has a sequence in the cache, and whatever that holds need not run."""
        self.handle, self.cached = handle, 0 if handle is None else handle.num_tokens
        self.item.move((), self.cached, kv_cache=handle)

    def requeue(self) -> None:
        """It lost its K/V: all of its tokens will run again."""
        self.hold(None)
        self.tokens = self.tokens_from(0)

    def take_chunk(self, count: int) -> None:
        """Run the next `count` tokens of those that are left to prefill."""
        end = self.cached + count
        is_final = end == len(self.tokens)
        self.item.move(self.tokens[self.cached : end], self.cached, is_final_chunk=is_final, logits_policy=FullLogits())

    def follow(self, drafts: Sequence[int] = ()) -> None:
        """Run the newest token next, and drafts after it."""
        policy = VerifyLogits() if drafts else FullLogits()
        self.item.move([self.token_ids[-1], *drafts], self.cached, logits_policy=policy)

    def advance(self, token: int) -> bool:
        """One more token of the output, which is what runs next; True where it may be the last.

        Most of the engine's time goes by here: 256 calls take 100 us.
        """
        token_ids, fields = self.token_ids, self._item_fields
        token_ids.append(token)
        count = len(token_ids)
        self.cached = fields["pos_offset"] = self._last_of_prompt + count
        fields["q_tokens"] = [token]
        return token in self._end_token_ids or count >= self._max_tokens or self._detokenizer is not None

    def finish_reason(self) -> str | None:
        """What the newest token ends the output by, or None; brings the text up to date."""
        token, count = self.token_ids[-1], len(self.token_ids)
        if token < 0:
            self.token_ids.pop()
            return "error"
        is_end, is_full = token in self._end_token_ids, count >= self._max_tokens
        if self._detokenizer is not None and self._read_text(count - is_end, is_last=is_end or is_full):
            return "stop"
        if is_end:
            self.output.stop_reason = token
            return "stop"
        return "length" if is_full else None

    def _read_text(self, count: int, *, is_last: bool) -> bool:
        """Bring the text up to `count` tokens; whether a stop string ended it."""
        assert self._detokenizer is not None
        output, stops = self.output, self.params.stop_strings
        before = len(self._detokenizer.text)
        text = self._detokenizer.read(self.token_ids[:count], is_last=is_last)
        if stops and len(self.token_ids) >= self.params.min_tokens:
            found = find_stop(text, stops, before - max(map(len, stops)) + 1)
            if found >= 0:
                output.text = text[:found]
                output.stop_reason = next(stop for stop in stops if text.startswith(stop, found))
                return True
        output.text = text if is_last else text[: len(text) - held_back(text, stops)]
        return False
