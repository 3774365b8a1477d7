"""What all routes share: the engine, its texts, the limits of a request, and the pieces of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

from starlette.requests import Request

from paged.cache.manager import PagedKvCacheManager
from paged.errors import UnsupportedError
from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.requests.output import CompletionOutput, RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.serving.config import ServeConfig
from paged.executors.serving.errors import ApiError
from paged.executors.serving.gate import Record
from paged.executors.serving.metrics import ServerMetrics
from paged.executors.serving.schemas import OpenAiSampling, Sampling
from paged.executors.serving.tool_formats import TOOL_FORMATS, ToolFormat
from paged.executors.text.chat_tokenizer import ChatTokenizer
from paged.executors.vision.images import ByteBudget
from paged.executors.vision.vision_model import VisionModel
from paged.interop.kv_events import KvEventPublisher
from paged.interop.structured import GrammarCompiler, Kind
from paged.prompt_embeds import PromptEmbeds

P = ParamSpec("P")
R = TypeVar("R")
_OWN_VARIABLES = {"messages", "images", "longest", "parse_special", "expand"}
_SAME_NAME = frozenset(SamplingParams.__dataclass_fields__) - {"max_tokens", "logprobs"}


class Piece(NamedTuple):
    """What a choice has gained, and the output of its prompt. part.finish_reason: "stop" or "length" with its last."""

    choice: int
    output: RequestOutput
    part: CompletionOutput


def service_of(request: Request) -> Service:
    """Return the service behind an app."""
    service: Service = request.app.state.service
    return service


def event_publisher(manager: PagedKvCacheManager, endpoint: str, config: ServeConfig) -> KvEventPublisher:
    replay, topic = config.kv_events_replay, config.kv_events_topic
    return KvEventPublisher(manager, endpoint, replay_endpoint=replay, topic=topic)


class Service:
    """An engine with the server's limits. Texts are encoded, rendered and compiled in threads of its own."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: ChatTokenizer,
        config: ServeConfig,
        defaults: SamplingParams,
        vision: VisionModel | None = None,
    ) -> None:
        """defaults: what the checkpoint says of sampling. vision: None if the model takes no images."""
        self.engine, self.tokenizer, self.config, self.defaults = engine, tokenizer, config, defaults
        self._vision = vision
        self.created, self.metrics = int(time.time()), ServerMetrics(engine, config.model_name)
        executor = engine.engine.executor
        self.info = executor.info()
        self.longest = min(self.info.max_sequence_length, executor.kv_capacity() or self.info.max_sequence_length)
        template = "".join(tokenizer.template.templates.values())
        fitting = (form for form in TOOL_FORMATS.values() if form.hint in template)
        auto = next(fitting, None) if config.tool_parser == "auto" else None
        self.tool_format: ToolFormat | None = TOOL_FORMATS.get(config.tool_parser, auto)
        parser = config.reasoning_parser
        self.has_thoughts = parser == "think" or (parser == "auto" and "</think>" in template)
        self.grammars = GrammarCompiler(tokenizer.tokenizer, self.info.vocab_size, tokenizer.eos_token_ids)
        # Two: one long text, or one template that takes its whole time, leaves the other.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="paged-text")
        self._image_threads = ThreadPoolExecutor(2, thread_name_prefix="paged-images")
        self.image_bytes = ByteBudget(config.max_server_image_bytes)

    async def in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def encode_chat(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[int], PromptEmbeds | None]:
        """Return the token ids of a conversation, and the rows of its images, None without images.

        Args:
            messages: with a part {"type": "image", "url": ...} in the content for every image; the URLs are taken out.
            variables: of the chat template.
        """
        if taken := sorted(_OWN_VARIABLES & variables.keys()):
            raise ApiError(400, f"chat_template_kwargs: {', '.join(taken)} cannot be set", "chat_template_kwargs")
        contents = [content for one in messages if isinstance(content := one.get("content"), list)]
        urls = [part.pop("url") for content in contents for part in content if part["type"] == "image"]
        vision = self._vision
        if vision is None:
            if urls:
                raise ApiError(400, "image_url: this server takes no images, see --max-images", "image_url")
            return await self.in_thread(self.tokenizer.encode_chat, messages, **variables), None
        longest = min(self.longest, self.config.max_prompt_tokens or self.longest)

        def encode() -> tuple[list[int], PromptEmbeds | None]:
            with self.config.image_rules.loaded(urls, self.image_bytes) as images:
                return vision.encode_chat(messages, images, longest=longest, **variables)

        return await asyncio.get_running_loop().run_in_executor(self._image_threads if urls else self._threads, encode)

    async def encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return token ids of prompts that are texts or token ids."""
        encode = self.tokenizer.encode
        return [await self.in_thread(encode, one) if isinstance(one, str) else one for one in prompts]

    async def adapters(self) -> tuple[str, ...]:
        with suppress(UnsupportedError):  # the executor takes none
            return await self.engine.list_loras()
        return ()

    async def adapter(self, model: str | None) -> str | None:
        """Return the adapter that the name of a model stands for, None for the model itself."""
        if model is None or model == self.config.model_name:
            return None
        if model in await self.adapters():
            return model
        raise ApiError(404, f"model: {model!r} is not served here, see /v1/models", "model", "model_not_found")

    def params(self, body: Sampling, max_tokens: int | None, **given: Any) -> SamplingParams:
        """Return the parameters of a request: what it says, else the checkpoint, else the defaults."""
        values = {name: getattr(body, name) for name in _SAME_NAME if name in type(body).model_fields} | given
        named = {name: value for name, value in values.items() if value is not None}
        return replace(self.defaults, max_tokens=max_tokens, **named)

    def check_choices(self, num_prompts: int, n: int) -> int:
        """Check and return the number of choices that a request asks for."""
        if num_prompts * n > (most := self.config.max_choices):
            raise ApiError(400, f"n: {num_prompts} x {n} choices, expected at most {most} in all", "n")
        return num_prompts * n

    def check_prompts(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SamplingParams:
        """Check the limits of a request; return its parameters, with as many new tokens as fit if it names none."""
        config, n = self.config, self.check_choices(len(prompts), params.n)
        longest = max(map(len, prompts), default=0)
        if config.max_prompt_tokens is not None and longest > config.max_prompt_tokens:
            message = f"a prompt of {longest} tokens, expected at most {config.max_prompt_tokens}"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        if params.max_tokens is None:
            fitting = self.longest + 1 - longest
            return replace(params, max_tokens=max(1, min(fitting, config.max_new_tokens // n)))
        if n * params.max_tokens > config.max_new_tokens:
            message = f"max_tokens: {n} x {params.max_tokens}, expected at most {config.max_new_tokens} in all"
            raise ApiError(400, message, "max_tokens")
        return params

    @asynccontextmanager
    async def in_time(self, request: Request) -> AsyncIterator[None]:
        """Raise ApiError with 504 if what is inside takes longer than the request may, from its arrival."""
        seconds = self.config.request_seconds
        try:
            async with asyncio.timeout(request.state.began + seconds - time.time()):
                yield
        except TimeoutError:
            raise ApiError(504, f"not done within {seconds} s", code="timeout") from None

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.tokenizer.decode([token], skip_special_tokens=False))

    async def options(self, body: Sampling) -> dict[str, Any]:
        """Return what else `pieces` is given; only what the request asks for."""
        options: dict[str, Any] = {"deltas": bool(body.stream), "timeout_s": self.config.request_seconds}
        if (adapter := await self.adapter(body.model)) is not None:
            options["metadata"] = {"lora_adapter": adapter}
        if not isinstance(body, OpenAiSampling):
            return options
        if body.cache_salt is not None:
            options["cache_salt"] = body.cache_salt
        asked, form = body.structured_outputs, body.response_format
        if asked is None and form is not None and form.type != "text":
            if form.json_schema is None and form.type == "json_schema":
                raise ApiError(400, "response_format: no json_schema", "response_format.json_schema")
            asked = {"json": {"type": "object"} if form.json_schema is None else form.json_schema.schema_}
        if asked is not None:
            options["token_mask"] = await self.compiled(*next(iter(asked.items())))
        return options

    async def compiled(self, kind: Kind, grammar: Any) -> Any:
        """Return a fresh matcher of a grammar, within the limit of time."""
        return await self.grammars.compile(kind, grammar, seconds=self.config.compile_seconds)

    async def pieces(
        self, request: Request, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[Piece, None]:
        """Run all prompts; yield what each choice gains, or without `deltas` all of it at its end.

        Choices of a prompt have consecutive numbers.
        """
        record: Record = request.state.record
        record.prompt_tokens = sum(map(len, prompts))
        ended: dict[int, str] = {}
        last: dict[int, RequestOutput] = {}
        times: dict[int, float] = {}  # of the last tokens of a prompt
        mask = options.pop("token_mask", None)
        own = [options if mask is None else {**options, "token_mask": mask.fork()} for _ in prompts]
        runs: list[Any] = [
            self.engine.generate(prompt, params, **one) for prompt, one in zip(prompts, own, strict=True)
        ]
        try:
            async with aclosing(_merged(runs) if len(runs) > 1 else runs[0]) as outputs:
                async for given in outputs:
                    prompt, output = given if isinstance(given, tuple) else (0, given)
                    last[prompt], now = output, time.perf_counter()
                    if prompt in times:
                        self.metrics.between_tokens.observe(now - times[prompt])
                    times[prompt] = now
                    if not (options["deltas"] or output.finished):
                        continue
                    for one in output.outputs:
                        choice, reason = prompt * params.n + one.index, one.finish_reason
                        if choice in ended or (reason is None and one.mark == one.begin):
                            continue
                        if reason is not None:
                            ended[choice] = reason
                            self._check_end(reason, output)
                        yield Piece(choice, output, one)
        finally:
            lengths = [one.mark.token_ids for output in last.values() for one in output.outputs]
            record.new_tokens, record.most_tokens = sum(lengths), max(lengths, default=0)
            record.cached_tokens = sum(output.num_cached_tokens for output in last.values())
            for known in (output.metrics for output in last.values() if output.finished):
                record.queued_s, record.first_token_s = known.queued_s, record.first_token_s or known.first_token_s
            record.end = record.end or ",".join(dict.fromkeys(ended.values()))

    def _check_end(self, reason: str, output: RequestOutput) -> None:
        if reason == "error" and "no token" in str(output.error):  # of NaN, or a grammar beyond the vocabulary
            raise ApiError(400, f"response_format: {output.error}", "response_format")
        if reason == "timeout":
            raise ApiError(504, f"not done within {self.config.request_seconds} s", code="timeout")
        if reason in ("error", "abort"):
            raise ApiError(500 if output.error else 503, f"the request failed: {output.error or 'it was aborted'}")


async def _merged(runs: Sequence[Any]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield what any of several generators yields, with its number."""
    waiting = {asyncio.ensure_future(anext(run, None)): number for number, run in enumerate(runs)}
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
