"""OpenAI's client against the server: answers, streams, limits of arguments; a crowd of it and of Anthropic's."""

import asyncio
import inspect
import random
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import anthropic
import openai
import pytest

from paged import RequestOutput, SamplingParams
from paged.models.recall.task import sample_prompts
from tests.deadline import HANG_S
from tests.serving.served import Served
from tests.tolerance import assert_logprobs

PROMPT = "otter: brass lantern; wren: kite; otter:"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def own(served: Served, prompt: str, params: SamplingParams) -> RequestOutput:
    """The engine's own answer, through the engine that serves."""

    async def run() -> RequestOutput:
        ids = served.service.tokenizer.encode(prompt)
        return [output async for output in served.service.engine.generate(ids, params)][-1]

    return served.call(run())


def test_completion_is_the_engines_own(served: Served, client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 5, "max_tokens": 12, "n": 2, "stop": ["; ;"]}
    given |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {"7": 1.5}}
    more = {"ignore_eos": True, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    answer = client.completions.create(model="recall", prompt=PROMPT, logprobs=3, extra_body=more, **given)
    bias = {"logit_bias": {7: 1.5}}
    expected = own(served, PROMPT, SamplingParams(logprobs=3, **given | more | bias))
    assert [one.text for one in answer.choices] == [one.text for one in expected.outputs]
    assert [one.finish_reason for one in answer.choices] == ["length", "length"]
    values = [next(iter(row.values())) for row in expected.outputs[0].logprobs or ()]
    assert answer.choices[0].logprobs is not None
    assert_logprobs(answer.choices[0].logprobs.token_logprobs, values)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 24)


def test_streams_join_to_the_whole(client: openai.OpenAI) -> None:
    given: Any = {"model": "recall", "temperature": 1.5, "seed": 9, "max_tokens": 8, "n": 2}
    prompts = [PROMPT, "wren: kite; wren:"]
    whole = client.completions.create(prompt=prompts, echo=True, **given)
    assert whole.choices[0].text.startswith(PROMPT)
    texts = [""] * 4
    events = list(client.completions.create(prompt=prompts, echo=True, stream=True, **given))
    for event in events:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [one.text for one in whole.choices]
    assert all(event.usage is None for event in events)
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **given)
    contents, tops, last = ["", ""], [0, 0], None
    for part in client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **given
    ):
        for choice in part.choices:
            contents[choice.index] += choice.delta.content or ""
            tops[choice.index] += choice.finish_reason is not None
        last = part.usage
    assert contents == [one.message.content for one in chat.choices]
    assert tops == [1, 1]
    assert last == chat.usage
    first = chat.choices[0].logprobs
    assert first is not None
    assert len(first.content or ()) == own_length(chat, 0)
    assert {len(one.top_logprobs) for one in first.content or ()} <= {2, 3}


def test_echo_has_the_prompts_logprobs(served: Served, client: openai.OpenAI) -> None:
    """Of every prompt and choice, whole and streamed: the engine's own, with none for the first token."""
    given: Any = {"model": "recall", "prompt": [PROMPT, "wren: kite; wren:"], "n": 2, "echo": True, "logprobs": 2}
    whole = client.completions.create(**given, temperature=0)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=2)
    for index, prompt in enumerate(given["prompt"]):
        output = own(served, prompt, params)
        rows = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        for choice in whole.choices[2 * index : 2 * index + 2]:
            found: Any = choice.logprobs
            assert_logprobs(found.token_logprobs[1:], [next(iter(row.values())) for row in rows[1:] if row])
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            assert len(found.tokens) == len(found.text_offset) == len(rows)
    joined: list[list[float | None]] = [[], [], [], []]
    for event in client.completions.create(**given, temperature=0, stream=True):
        joined[event.choices[0].index] += event.choices[0].logprobs.token_logprobs  # type: ignore[union-attr,operator]
    for streamed, choice in zip(joined, whole.choices, strict=True):
        assert choice.logprobs is not None
        assert streamed[0] is None
        assert_logprobs(streamed[1:], choice.logprobs.token_logprobs[1:])


def own_length(answer: Any, index: int) -> int:
    """Tokens of a choice: all of them but the other's."""
    return answer.usage.completion_tokens - len(answer.choices[1 - index].logprobs.content)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": "hot"}),
    ("max_tokens", {"max_tokens": 10**8}),
    ("max_tokens", {"max_tokens": True}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("top_p", {"top_p": 2}),
    ("tempature", {"extra_body": {"tempature": 1}}),
    ("seed", {"seed": 10**30}),
    ("model", {"model": "another"}),
    ("best_of", {"best_of": 3}),
    ("stop", {"stop": [""]}),
    ("prompt", {"prompt": None}),
]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"prompt": "otter: " * 2000}, "context_length_exceeded"),
        ({"prompt": [[1, 10**6]]}, None),
        ({"prompt": []}, None),
    ],
)
def test_wrong_prompts_are_refused(given: dict[str, Any], code: str | None, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="recall", **given)
    assert caught.value.code == code


def begin(client: Any, prompt: str, body: Any, **options: Any) -> Any:
    """Ask in the client's own form. Arguments go by `body`, as types of theirs would refuse some that are wrong."""
    if isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
        return client.completions.create(model="recall", prompt=prompt, extra_body=body, **options)
    messages: Any = [{"role": "user", "content": prompt}]
    return client.messages.create(model="recall", messages=messages, max_tokens=16, extra_body=body, **options)


async def ask(*given: Any, **options: Any) -> Any:
    """Call `begin` in a thread, where clients without async wait."""
    found = await asyncio.to_thread(begin, *given, **options)
    return await found if inspect.isawaitable(found) else found


async def texts(stream: Any) -> AsyncIterator[str]:
    """Yield the texts of a stream of either client, with or without async."""
    is_async = hasattr(stream, "__aiter__")
    events: Any = aiter(stream) if is_async else iter(stream)
    while (event := await (anext(events, None) if is_async else asyncio.to_thread(next, events, None))) is not None:
        if hasattr(event, "choices"):
            yield event.choices[0].text
        elif event.type == "content_block_delta":
            yield event.delta.text


async def _crowd(served: Served, count: int) -> None:
    """A third is honest, a third leaves, a third is wrong; a quarter of each uses each of four clients."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(count))
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": HANG_S}
    openais = [kind(base_url=f"{served.url}/v1", **options) for kind in (openai.AsyncOpenAI, openai.OpenAI)]
    others = [kind(base_url=served.url, **options) for kind in (anthropic.AsyncAnthropic, anthropic.Anthropic)]
    clients: list[Any] = [*openais, *others]
    prompts = sample_prompts(3, count, max_tokens=200)
    rng = random.Random(count)

    async def use(number: int) -> None:
        client, prompt = clients[number % 4], prompts[number]
        if number % 3 == 0:
            stream = await ask(client, prompt.text, {"temperature": 0}, stream=True)
            assert "".join([text async for text in texts(stream)]) == prompt.answer
        elif number % 3 == 1:
            body = {"max_tokens": 400} | ({"temperature": 2} if client in others else {"ignore_eos": True})
            if number // 12 % 2:  # within the answer; the others at any moment
                stream = await ask(client, prompt.text, body, stream=True)
                await anext(texts(stream), None)  # a token at random may end it at once
                if (closed := stream.close()) is not None:
                    await closed
            else:
                with suppress(openai.APITimeoutError, anthropic.APITimeoutError):
                    await ask(client, prompt.text, body, timeout=rng.random() * 0.3)
        else:
            param, wrong = WRONG[number % len(WRONG)]
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
                await ask(client, prompt.text, wrong.get("extra_body", wrong))
            assert 400 <= caught.value.status_code < 500, param
            answer: Any = caught.value.body
            if client in openais:
                assert (answer["param"] or "").split(".")[0] == param
            assert "Traceback" not in str(answer)

    await asyncio.gather(*map(use, range(count)))


def check_idle(served: Served) -> None:
    """Nothing runs soon after the last client has left."""
    deadline = time.monotonic() + HANG_S
    while served.engine.num_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.engine.num_unfinished == 0
    assert served.engine.executor.kv_manager is not None
    assert served.engine.executor.kv_manager.stats().num_sequences == 0


def test_crowd_of_64_leaves_nothing(served: Served) -> None:
    asyncio.run(_crowd(served, 64))
    check_idle(served)
    assert served.engine.metrics.finished["abort"] > 0  # of 21 who leave, as many as come before their answers' end
