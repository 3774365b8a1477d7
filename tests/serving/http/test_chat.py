"""Chats with calls of tools and reasoning, as OpenAI's and Anthropic's clients read them."""

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tokenizers
import torch

from paged import ChatTokenizer
from paged.serving.formats.tool_formats import TOOL_FORMATS, MarkedTokenizer
from paged.serving.text.chat_template import ChatTemplate
from tests.executors.oracle import make_executor
from tests.serving.grammar.test_structured import END, VOCABULARY, ambiguous, byte_tokenizer
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import MESSAGES
from tests.serving.served import TEMPLATE, Served, serving
from tests.serving.text.spoken import reasoning_of, written

CLIENTS = Path(__file__).with_name("clients")
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SAID = '<think>Hm.</think>Yes. <tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>'


@pytest.fixture
def said() -> dict[str, str]:
    """What the model says in place of its words."""
    return {"brass": SAID[:40], "lantern": SAID[40:]}


@pytest.fixture
def talking(chat_folder: Path, said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose model says SAID in place of "brass lantern"."""
    decode = ChatTokenizer.decode

    def say(self: Any, ids: list[int]) -> str:
        return "".join(said.get(one, one) for one in decode(self, ids).split())

    monkeypatch.setattr(ChatTokenizer, "decode", say)
    with serving(chat_folder, tool_parser="hermes", reasoning_parser="think") as served:
        yield served


def test_calls_and_reasoning(talking: Served) -> None:
    client = openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "recall", "messages": MESSAGES, "temperature": 0, "tools": TOOLS}
    message = client.chat.completions.create(**given).choices[0]
    assert message.finish_reason == "tool_calls"
    assert (message.message.content, message.message.model_extra) == ("Yes. ", {"reasoning": "Hm."})
    calls: Any = message.message.tool_calls
    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [("look", {"a": [1]})]
    with client.chat.completions.stream(**given) as stream:  # joins the pieces as the client does
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Yes. ")
    assert final.message.tool_calls is not None
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": [1]}
    plain = client.chat.completions.create(**given | {"tool_choice": "none"}).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("stop", SAID.partition("</think>")[2])
    said = [*MESSAGES, message.message.model_dump(exclude_none=True), {"role": "tool", "content": "a"}]
    assert client.chat.completions.create(**given | {"messages": said}).usage is not None
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**given | {"tool_choice": {"type": "function", "function": {"name": "run"}}})

    asked: Any = {"model": "recall", "temperature": 0, "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    items: Any = list(MESSAGES)
    for turn in range(3):
        if turn % 2:
            with client.responses.stream(input=items, **asked) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **asked)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        reasoning, text, call = response.output
        assert (reasoning.content[0].text, text.content[0].text) == ("Hm.", "Yes. ")
        assert (call.name, json.loads(call.arguments)) == ("look", {"a": [1]})
        items += [item.to_dict() for item in response.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": MESSAGES[-1]["content"]})

    claude = anthropic.Anthropic(base_url=talking.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    asked: Any = {"model": "recall", "messages": MESSAGES, "max_tokens": 9, "extra_body": {"temperature": 0}}
    with claude.messages.stream(tools=tools, **asked) as events:
        streamed = events.get_final_message()
    whole = claude.messages.create(tools=tools, **asked)
    for answer in (streamed, whole):
        blocks: Any = answer.content
        assert [block.type for block in blocks] == ["thinking", "text", "tool_use"]
        assert (blocks[0].thinking, blocks[1].text, blocks[2].input) == ("Hm.", "Yes. ", {"a": [1]})
        assert answer.stop_reason == "tool_use"


def test_the_second_of_two_calls_is_neither_passed_on_nor_counted(talking: Served, said: dict[str, str]) -> None:
    """In every form, whole and streamed, on the three routes that have calls."""
    functions = [tool["function"] for tool in TOOLS]
    base: Any = {"model": "recall"}
    chat: Any = base | {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "temperature": 0}
    response: Any = base | {"input": MESSAGES, "parallel_tool_calls": False, "temperature": 0}
    response["tools"] = [{"type": "function", **function} for function in functions]
    message: Any = base | {"messages": MESSAGES, "max_tokens": 9, "extra_body": {"temperature": 0}}
    message["tools"] = [{"name": "look", "input_schema": {"type": "object"}}]
    message["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    client = openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0)
    claude = anthropic.Anthropic(base_url=talking.url, api_key="none", max_retries=0)
    for name in TOOL_FORMATS:
        form, reasoning = TOOL_FORMATS[name], reasoning_of(name)
        text = written([("call", "look", {"a": [1]}), ("call", "look", {"a": [2]})], form, reasoning)
        # The first word holds the first call up to the name of the second, so two more words would follow.
        size = text.index("look", text.index("look") + 1)
        said |= {"brass": text[:size], "lantern": text[size:]}
        talking.service.tongue = talking.service.tongue._replace(tools=form, reasoning=reasoning)
        answers: list[Any] = [client.chat.completions.create(**chat)]
        with client.chat.completions.stream(stream_options={"include_usage": True}, **chat) as stream:
            answers.append(stream.get_final_completion())
        for answer in answers:
            calls = answer.choices[0].message.tool_calls
            assert [json.loads(call.function.arguments) for call in calls] == [{"a": [1]}], name
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("tool_calls", 1), name
        answers = [client.responses.create(**response)]
        with client.responses.stream(**response) as events:
            answers.append(events.get_final_response())
        for answer in answers:
            assert [json.loads(item.arguments) for item in answer.output] == [{"a": [1]}], name
            assert (answer.status, answer.parallel_tool_calls) == ("completed", False)
            assert answer.usage.output_tokens == 1, name
        answers = [claude.messages.create(**message)]
        with claude.messages.stream(**message) as blocks:
            answers.append(blocks.get_final_message())
        for answer in answers:
            assert [block.input for block in answer.content] == [{"a": [1]}], name
            assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", 1), name
        both = client.chat.completions.create(**chat | {"parallel_tool_calls": True}).choices[0].message.tool_calls
        assert len(both or ()) == 2, name


def openai_loop(served: Served) -> list[Any]:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "recall", "temperature": 0, "tools": TOOLS}
    messages: list[Any] = [*MESSAGES]
    calls = []
    for turn in range(3):
        if turn == 1:
            with client.chat.completions.stream(messages=messages, **asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            calls.append([call.function.name, json.loads(call.function.arguments)])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": MESSAGES[0]["content"]})
    return calls


def anthropic_loop(served: Served) -> list[Any]:
    claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    asked: Any = {"model": "recall", "tools": tools, "max_tokens": 9, "extra_body": {"temperature": 0}}
    messages: list[Any] = [*MESSAGES]
    calls = []
    for turn in range(3):
        if turn == 1:
            with claude.messages.stream(messages=messages, **asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = claude.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                calls.append([block.name, block.input])
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": MESSAGES[0]["content"]})
        messages.append({"role": "user", "content": results})
    return calls


@contextlib.contextmanager
def other_loops(served: Served) -> Iterator[list[subprocess.Popen[str]]]:
    """LangChain in the Python LANGCHAIN_PYTHON, and the AI SDK in the folder AI_SDK_FOLDER, if they are named."""
    python, folder = os.environ.get("LANGCHAIN_PYTHON"), os.environ.get("AI_SDK_FOLDER")
    commands = []
    if python is not None:
        commands.append((None, [python, CLIENTS / "langchain_loop.py"]))
    if folder is not None:
        commands.append((folder, ["node", CLIENTS / "ai_sdk_loop.mjs"]))
    with contextlib.ExitStack() as stack:
        clients = []
        for cwd, command in commands:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            client = subprocess.Popen([*command, served.url, MESSAGES[0]["content"]], cwd=cwd, **pipes)
            clients.append(stack.enter_context(client))
        yield clients
        for client in clients:
            assert client.stdin is not None
            client.stdin.close()


@pytest.mark.thorough
def test_real_clients_do_three_turns_in_each_format(talking: Served, said: dict[str, str]) -> None:
    look = ["look", {"a": [1]}]
    with other_loops(talking) as clients:
        for name, form in TOOL_FORMATS.items():
            reasoning = reasoning_of(name)
            text = written([("reasoning", "Hm."), ("call", *look)], form, reasoning)
            said |= {"brass": text[:40], "lantern": text[40:]}
            talking.service.tongue = talking.service.tongue._replace(tools=form, reasoning=reasoning)
            assert openai_loop(talking) == anthropic_loop(talking) == [look] * 3, name
            for client in clients:
                assert client.stdin is not None
                assert client.stdout is not None
                print(name, file=client.stdin, flush=True)
                calls = json.loads(client.stdout.readline())
                assert calls in ([look] * 3, [look] * 6), (name, client.args)


@pytest.fixture(scope="module")
def untrained() -> Iterator[Served]:
    """A server of a model that writes any bytes unless a grammar stops it."""
    template = ChatTemplate({"default": TEMPLATE}, {}, "here")
    executor = make_executor(torch.device("cpu"), vocab_size=VOCABULARY, num_blocks=512)
    tokenizer, forms = ChatTokenizer(byte_tokenizer(), template, [END]), {"tool_parser": "hermes"}
    with serving(executor, tokenizer=tokenizer, reasoning_parser="think", **forms) as served:
        yield served


def test_tokens_of_reasoning_are_counted(untrained: Served) -> None:
    """Without their markers, which are several tokens here; a prompt that ends with a marker leaves nothing else."""
    thinking: Any = {"messages": [{"role": "user", "content": "<think>"}], "max_tokens": 9}
    _, _, chat = ask(untrained, "/v1/chat/completions", thinking | {"n": 2, "ignore_eos": True})
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 18}
    _, _, response = ask(untrained, "/v1/responses", {"input": thinking["messages"], "max_output_tokens": 9})
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == response["usage"]["output_tokens"] > 0
    _, _, message = ask(untrained, "/v1/messages", thinking)
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == message["usage"]["output_tokens"] > 0
    assert response["tool_choice"] == "none"
    grammar = {"structured_outputs": {"regex": "<think>[ab]{50}</think>[ab]{3}"}}
    _, _, chat = ask(untrained, "/v1/chat/completions", grammar | {"messages": [{"role": "user", "content": "a"}]})
    assert len(chat["choices"][0]["message"]["content"]) == 3
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 50 + len("</think>") - 1}


@pytest.mark.thorough  # six seconds
def test_required_and_named_calls(untrained: Served) -> None:
    """Every choice calls, with arguments that validate; a stream joined by OpenAI's client is the same."""
    client = openai.OpenAI(base_url=f"{untrained.url}/v1", api_key="none", max_retries=0)
    number = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = {"type": "object", "properties": {"day": number}, "required": ["day"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "stop")]
    given: Any = {"model": "recall", "messages": [{"role": "user", "content": "a"}], "tools": tools, "n": 2, "seed": 3}
    given |= {"temperature": 2, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "stop"}}
    for choice, expected in (("required", {"look", "stop"}), (named, {"stop"})):
        whole = client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **given)
        assert {one.finish_reason for one in whole.choices} == {"tool_calls"}
        calls = [one.message.tool_calls[0].function for one in whole.choices]
        assert {call.name for call in calls} == expected
        assert all(1 <= json.loads(call.arguments)["day"] <= 99 for call in calls)
        assert {one.message.content for one in whole.choices} == {None}
    pieces = 0
    with client.chat.completions.stream(tool_choice=named, **given) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces += 1
        streamed = stream.get_final_completion().choices
    assert [one.message.tool_calls[0].function.arguments for one in streamed] == [call.arguments for call in calls]
    assert pieces > 2, "more than one for each choice; a late reader gets several bytes at once"
    claude = anthropic.Anthropic(base_url=untrained.url, api_key="none", max_retries=0)
    asked: Any = {"model": "recall", "messages": given["messages"], "max_tokens": 300}
    look: Any = [{"name": "look", "input_schema": schema}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        block = claude.messages.create(tools=look, tool_choice=choice, **asked).content[0]
        assert (block.type, block.name) == ("tool_use", "look")
        assert 1 <= block.input["day"] <= 99
    with claude.messages.stream(tools=look, tool_choice=choice, **asked) as events:
        assert events.get_final_message().content[0].input["day"] >= 1
    # Cut off, the arguments are what came of them, in Anthropic's form under a name of their own.
    cut = client.chat.completions.create(tool_choice="required", **given | {"max_tokens": 45}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls[0].function.arguments[0]) == ("length", "{")
    block = claude.messages.create(tools=look, tool_choice=choice, **asked | {"max_tokens": 45}).content[0]
    assert block.input["INVALID_JSON"].startswith("{")


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", {"type": "function", "name": "look"}])
def test_a_response_has_the_tool_choice_of_its_request(choice: Any, untrained: Served) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"input": "a", "tools": tools, "tool_choice": choice, "max_output_tokens": 2}
    status, _, response = ask(untrained, "/v1/responses", asked)
    assert (status, response["tool_choice"]) == (200, choice or "auto")


def test_a_grammar_that_takes_too_long_is_the_clients_fault(untrained: Served) -> None:
    """Named in a whole answer and in a stream; one beside it is answered."""
    asked: Any = {"prompt": "ab", "max_tokens": 200, "temperature": 0}
    hostile = asked | {
        "structured_outputs": {"grammar": ambiguous(random.Random(1))},
        "allowed_token_ids": byte_tokenizer().encode("ab").ids,
    }
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(ask, untrained, "/v1/completions", hostile | {"stream": stream}) for stream in (False, True)
        ]
        honest = ask(untrained, "/v1/completions", asked | {"structured_outputs": {"regex": "[ab]{9}"}})
        (status, _, body), (_, _, events) = [one.result() for one in both]
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "ms a token" in body["error"]["message"]
    assert "ms a token" in str(events)
    assert honest[2]["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_around_calls_are_kept() -> None:
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<end>"])
    marked = MarkedTokenizer(ChatTokenizer(tokenizer, ChatTemplate({}, {}, "here")))
    ids = [tokenizer.token_to_id(one) for one in ("a", "[TOOL_CALLS]", "b", "<end>", "[TOOL_CALLS]")]
    assert marked.decode(ids) == "a[TOOL_CALLS]b[TOOL_CALLS]"
