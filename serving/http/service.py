"""Shared service of all routes: engine, tokenizer, limits of requests, pieces of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.requests.output import CompletionOutput, RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.prompt_embeds import PromptEmbeds
from paged.serving.formats.tool_formats import MarkedTokenizer, Tongue
from paged.serving.grammar.structured import GrammarCompiler, GrammarLimitError
from paged.serving.http.adapters import Adapters
from paged.serving.http.config import ServeConfig
from paged.serving.http.errors import ApiError
from paged.serving.http.gate import Generation, RequestLog
from paged.serving.http.kv_events import KvEventPublisher
from paged.serving.http.metrics import ServerMetrics
from paged.serving.http.schemas import Grammar, Sampling
from paged.serving.text.chat_tokenizer import ChatTokenizer
from paged.serving.text.token_texts import TokenReader, TokenTexts
from paged.serving.vision.images import ByteBudget
from paged.serving.vision.vision_model import VisionModel
from paged.tools.bounded_process import ProcessLostError
from paged.tools.printable import one_line

R = TypeVar("R")
_LONG = 1 << 14  # size of work (bytes, characters, tokens) from which it runs in another thread
_LONGEST_GRAMMAR = 1 << 16  # in characters
_MAX_TOKENIZED = 1 << 16  # in tokens; the model's maximum if it is larger
# Arguments that may forbid every token.
_LEAVES_NONE = ("allowed_token_ids", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WITH_IDS = ("logit_bias", "allowed_token_ids", "stop_token_ids")
_SAME_NAME = frozenset(SamplingParams.__dataclass_fields__) - {"max_tokens", "logprobs"}


class Piece(NamedTuple):
    """New part of a choice, and the output of its prompt. The last part has a finish_reason, "stop" or "length"."""

    choice: int
    output: RequestOutput
    part: CompletionOutput


def service_of(request: Request) -> Service:
    """Return the service of a request's app."""
    service: Service = request.app.state.service
    return service


def event_publisher(manager: PagedKvCacheManager, endpoint: str, config: ServeConfig) -> KvEventPublisher:
    replay, topic = config.kv_events_replay, config.kv_events_topic
    return KvEventPublisher(manager, endpoint, replay_endpoint=replay, topic=topic)


class Service:
    """Engine with the server's limits. Texts are encoded, rendered and compiled in separate threads."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: ChatTokenizer,
        config: ServeConfig,
        defaults: SamplingParams,
        vision: VisionModel | None = None,
    ) -> None:
        """defaults: the checkpoint's sampling defaults. vision: None if the model does not support images."""
        self.engine, self.tokenizer, self.config, self.defaults = engine, tokenizer, config, defaults
        self._vision, self.adapters = vision, Adapters(engine)
        self.created, self.metrics = int(time.time()), ServerMetrics(engine, config.model_name)
        executor = engine.engine.executor
        self.info = executor.info()
        self.longest = min(self.info.max_sequence_length, executor.kv_capacity() or self.info.max_sequence_length)
        self.longest_prompt = min(self.longest, config.max_prompt_tokens or self.longest)
        self.longest_text = max(self.longest, _MAX_TOKENIZED)  # limit for encoding or decoding alone
        self.tongue = Tongue.of(tokenizer, config.tool_parser, config.reasoning_parser)
        self.grammars = GrammarCompiler(
            tokenizer.tokenizer,
            self.info.vocab_size,
            tokenizer.eos_token_ids,
            token_seconds=config.mask_seconds,
            max_waiting=config.max_waiting,
        )
        self.token_texts, self._decoder = TokenTexts(tokenizer), MarkedTokenizer(tokenizer, self.tongue)
        self._hidden_tokens = {text: token for token, text in self._decoder.hidden_tokens.items()}
        # Two threads each, so that a single long text or slow template does not block others.
        self._short_threads = ThreadPoolExecutor(2, thread_name_prefix="paged-short")
        self._long_threads = ThreadPoolExecutor(2, thread_name_prefix="paged-long")
        self._image_threads = ThreadPoolExecutor(2, thread_name_prefix="paged-images")
        self.image_bytes = ByteBudget(config.max_server_image_bytes)

    async def in_thread(self, call: Callable[[], R], size: int) -> R:
        """Call in another thread if the work is large enough, else directly."""
        if size < _LONG:
            return call()
        return await _in_thread_of(self._long_threads, call)

    async def _encoding(self, call: Callable[[], R], size: int) -> R:
        """Call in another thread. Short work has its own threads, so it does not wait for long work."""
        threads = self._short_threads if size < _LONG else self._long_threads
        return await _in_thread_of(threads, call)

    def seconds_left(self, request: Request) -> float:
        """Return the remaining time of a request within its limit."""
        arrived: float = request.state.arrived
        return max(0.0, arrived + self.config.request_seconds - time.perf_counter())

    def timeout_error(self) -> ApiError:
        return ApiError(504, f"not done within {self.config.request_seconds} s", code="timeout")

    async def encode_chat(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], size: int, *, longest: int | None = None
    ) -> tuple[list[int], PromptEmbeds | None]:
        """Return the token ids of a conversation and the rows of its images (None without images).

        Args:
            messages: messages with a content part {"type": "image", "url": ...} for each image. The URLs are removed.
            variables: variables of the chat template.
            size: bytes of both in the request's body.
            longest: maximum number of tokens; None for the longest prompt.
        """
        urls = []
        for message in messages:
            if not isinstance(message.get("content"), list):
                continue
            for part in message["content"]:
                if part["type"] == "image":
                    urls.append(part.pop("url"))
        longest = longest or self.longest_prompt
        vision = self._vision

        def conversation() -> list[dict[str, Any]]:
            return self.tongue.replayed(messages)

        if vision is None:
            if urls:
                raise ApiError(400, "image_url: this server takes no images, see --max-images", "image_url")
            return await self._encoding(
                lambda: (self.tokenizer.encode_chat(conversation(), longest=longest, **variables), None), size
            )

        def encode() -> tuple[list[int], PromptEmbeds | None]:
            with self.config.image_rules.loaded(urls, self.image_bytes) as images:
                return vision.encode_chat(conversation(), images, longest=longest, **variables)

        if urls:
            return await _in_thread_of(self._image_threads, encode)
        return await self._encoding(encode, size)

    async def encoded(self, prompt: str | list[int], *, longest: int | None = None) -> list[int]:
        """Return the token ids of a prompt (a text or token ids). longest: see `encode_chat`."""
        longest = longest or self.longest_prompt
        if isinstance(prompt, str):
            return await self._encoding(lambda: self.tokenizer.encode(prompt, longest=longest), len(prompt))
        if len(prompt) > longest:
            raise SequenceTooLongError(f"prompt: {len(prompt)} tokens, expected at most {longest}")
        return prompt

    async def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request's model name selects, or None for the model itself."""
        if model is None or model == self.config.model_name:
            return None
        if model in await self.adapters.names():
            return model
        raise ApiError(404, f"model: {model!r} is not served here, see /v1/models", "model", "model_not_found")

    def params(self, body: Sampling, max_tokens: int | None, **renamed: Any) -> SamplingParams:
        """Return the sampling parameters: from the request, else from the checkpoint, else the defaults."""
        values = {name: getattr(body, name, None) for name in _SAME_NAME} | renamed
        named = {name: value for name, value in values.items() if value is not None}
        params = self._with_special_stops(replace(self.defaults, max_tokens=max_tokens, **named))
        for name in _WITH_IDS:
            ids, size = getattr(params, name) or (0,), self.info.vocab_size
            if min(ids) < 0 or max(ids) >= size:
                raise ApiError(400, f"{name}: token ids {min(ids)} to {max(ids)}, expected 0 <= id < {size}", name)
        self.check_new_tokens(1, params)
        return params

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """Replace stop strings that are special tokens by stop ids, because answers' texts hide special tokens.

        Raises:
            ApiError: a stop string contains a special token and other text.
        """
        token_ids = list(params.stop_token_ids)
        for string in params.stop_strings:
            token = self._hidden_tokens.get(string)
            if token is not None:
                token_ids.append(token)
                continue
            for content in self._hidden_tokens:
                if content in string:
                    message = f"stop: {string!r} holds the special token {content!r}, expected it alone or not at all"
                    raise ApiError(400, message, "stop")
        return replace(params, stop_token_ids=token_ids)

    def stop_string(self, params: SamplingParams, reason: int | str | None) -> str | None:
        """Return the stop string that ended an answer, also for a special token. reason: `stop_reason`."""
        if isinstance(reason, int):
            for string in params.stop_strings:
                if self._hidden_tokens.get(string) == reason:
                    return string
            return None
        return reason

    def check_choices(self, num_prompts: int, n: int) -> int:
        """Check and return the requested number of choices."""
        limit = self.config.max_choices
        if num_prompts * n > limit:
            raise ApiError(400, f"n: {num_prompts} x {n} choices, expected at most {limit} in all", "n")
        return num_prompts * n

    def check_new_tokens(self, num_prompts: int, params: SamplingParams) -> int:
        """Check the requested number of new tokens; return the number of choices."""
        choices, limit = self.check_choices(num_prompts, params.n), self.config.max_new_tokens
        if params.max_tokens is not None and choices * params.max_tokens > limit:
            message = f"max_tokens: {choices} x {params.max_tokens}, expected at most {limit} in all"
            raise ApiError(400, message, "max_tokens")
        return choices

    def check_prompts(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SamplingParams:
        """Check the limits of a request; return its parameters, with max_tokens set to what fits if it was None."""
        choices, longest = self.check_new_tokens(len(prompts), params), max(map(len, prompts), default=0)
        if params.max_tokens is not None:
            return params
        fitting = self.longest + 1 - longest
        return replace(params, max_tokens=max(1, min(fitting, self.config.max_new_tokens // choices)))

    def token_reader(self, offset: int = 0) -> TokenReader:
        """Return a reader of a text's tokens, as the engine decodes them. offset: characters before the text."""
        return TokenReader(self.token_texts, self._decoder, offset)

    async def options(self, body: Sampling, request: Request) -> dict[str, Any]:
        """Return the options for `pieces` that the request uses."""
        options: dict[str, Any] = {"deltas": bool(body.stream)}
        adapter = await self.adapter(body.model)
        if adapter is not None:
            options["adapter"] = adapter
        cache_salt = getattr(body, "cache_salt", None)
        if cache_salt is not None:
            options["cache_salt"] = cache_salt
        if body.retention is not None:
            options["retention"] = body.retention
        grammar = body.grammar()
        if grammar is not None:
            options |= {"token_mask": await self.compiled(grammar, request), "constraint": grammar.param}
        return options

    async def compiled(self, grammar: Grammar, request: Request) -> Any:
        """Compile a grammar within the time limit and return a fresh matcher; clients are served in turn."""
        param, kind, text = grammar
        length = len(text) if isinstance(text, str) else len(msgspec.json.encode(text))
        if length > _LONGEST_GRAMMAR:
            raise ApiError(400, f"{param}: {length} characters, expected at most {_LONGEST_GRAMMAR}", param)
        client = request.client.host if request.client else None
        try:
            async with asyncio.timeout(self.seconds_left(request)):
                return await self.grammars.compile(kind, text, seconds=self.config.compile_seconds, client=client)
        except TimeoutError:
            raise self.timeout_error() from None
        except InvalidInputError as error:
            raise ApiError(400, f"{param}: {error}", param) from error
        except GrammarLimitError as error:
            raise ApiError(429, f"{param}: {error}", param) from error

    async def pieces(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        constraint: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[Piece, None]:
        """Run all prompts; yield the new parts of each choice, or without `deltas` each choice at its end.

        Choices of a prompt have consecutive numbers.

        Args:
            constraint: the argument that restricts the allowed tokens, for error messages.
        """
        log: RequestLog = request.state.log
        log.prompt_tokens = sum(map(len, prompts))
        other = self._changed_constraint(params)
        constraint = constraint or other
        options["timeout_s"] = self.seconds_left(request)
        runs = self._runs(log.id, prompts, params, **options)
        ended: dict[int, str] = {}
        last: dict[int, RequestOutput] = {}
        times: dict[int, float] = {}  # time of the newest tokens, by prompt
        model = options.get("adapter", self.config.model_name)
        request.state.generation = Generation(model, params, time.perf_counter(), last, times)
        try:
            async with aclosing(_merged(runs)) as outputs:
                async for number, output in outputs:
                    last[number], now = output, time.perf_counter()
                    if number in times:
                        self.metrics.between_tokens.observe(now - times[number])
                    times[number] = now
                    if not (options["deltas"] or output.finished):
                        continue
                    for part in output.outputs:
                        choice, reason = number * params.n + part.index, part.finish_reason
                        if choice in ended or (reason is None and part.mark == part.begin):
                            continue
                        if reason is not None:
                            ended[choice] = reason
                            self._check_end(reason, output, constraint, other)
                        yield Piece(choice, output, part)
        finally:
            _note(log, last.values(), ended.values())

    def _changed_constraint(self, params: SamplingParams) -> str | None:
        """Return the first argument besides a grammar that restricts the allowed tokens, or None."""
        for name in _LEAVES_NONE:
            if getattr(params, name) != getattr(self.defaults, name):
                return name
        return None

    def _runs(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        token_mask: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Return a generator of outputs for each prompt. request_id: id in the answer's header and in the log."""
        if "adapter" in options:
            options["adapter"] = self.adapters.engine_name(options["adapter"])
        runs: list[Any] = []
        for number, prompt in enumerate(prompts):
            prompt_id = request_id
            if len(prompts) > 1:
                prompt_id = f"{request_id}-{number}"
            mask = None
            if token_mask is not None:
                mask = token_mask.fork()
            runs.append(self.engine.generate(prompt, params, request_id=prompt_id, token_mask=mask, **options))
        return runs

    def _check_end(self, reason: str, output: RequestOutput, constraint: str | None, other: str | None) -> None:
        """Raise the error of a choice that failed. other: argument besides a grammar that restricts tokens, or None."""
        if reason == "error" and constraint is not None and "no token" in str(output.error):
            message = output.error
            if constraint not in _LEAVES_NONE:
                message = "the vocabulary has no token that continues this grammar"
                if other is not None:
                    message = f"no token that continues this grammar is left by {other}"
            raise ApiError(400, f"{constraint}: {message}", constraint)
        if reason == "error" and GrammarLimitError.__name__ in str(output.error):
            raise ApiError(400, f"{output.error}", constraint)
        if reason == "error" and ProcessLostError.__name__ in str(output.error):
            raise ApiError(503, f"{output.error}")
        if reason == "timeout":
            raise self.timeout_error()
        if reason in ("error", "abort"):
            if not output.error:
                raise ApiError(503, "the request failed: it was aborted")
            raise ApiError(500, f"the request failed: {output.error}")


async def _in_thread_of(threads: ThreadPoolExecutor, call: Callable[[], R]) -> R:
    """Call in a thread; answer 503 if the system cannot start a thread."""
    try:
        result = asyncio.get_running_loop().run_in_executor(threads, call)
    except RuntimeError as error:
        raise ApiError(503, f"no thread for the request: {one_line(error, 200)}") from error
    return await result


def _note(log: RequestLog, outputs: Iterable[RequestOutput], reasons: Iterable[str]) -> None:
    """Write a request's result to its log, from its prompts' last outputs and its choices' finish reasons."""
    lengths: list[int] = []
    log.cached_tokens = log.loaded_tokens = 0
    for output in outputs:
        lengths += [part.mark.token_ids for part in output.outputs]
        log.cached_tokens += output.num_cached_tokens
        log.loaded_tokens += output.num_loaded_tokens
        if output.finished:
            log.queued_s = output.metrics.queued_s
            log.first_token_s = log.first_token_s or output.metrics.first_token_s
    log.new_tokens, log.most_tokens = sum(lengths), max(lengths, default=0)
    log.end = log.end or ",".join(dict.fromkeys(reasons))


async def _merged(runs: Sequence[Any]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several generators as they come, each with its generator's number."""
    if len(runs) == 1:  # fast path without a task for each output
        async with aclosing(runs[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    waiting: dict[asyncio.Future[Any], int] = {}  # number of the generator by its pending output
    for number, run in enumerate(runs):
        waiting[asyncio.ensure_future(anext(run, None))] = number
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if (output := task.result()) is not None:
                    yield number, output
                    waiting[asyncio.ensure_future(anext(runs[number], None))] = number
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(run.aclose() for run in runs))
