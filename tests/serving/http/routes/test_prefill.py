"""Answers that go on with the assistant's last message, in Anthropic's and in vLLM's form."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import torch

from paged import ChatTokenizer
from paged.serving.formats.tool_formats import TOOL_FORMATS
from paged.serving.text.chat_template import ChatTemplate
from tests.executors.oracle import make_executor
from tests.serving.grammar.test_structured import END, VOCABULARY, byte_tokenizer
from tests.serving.http.test_limits import ask
from tests.serving.served import Served, serving

TURNS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.reasoning %}<think>{{ message.reasoning }}</think>"
    "{% endif %}{{ message.content | trim }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "a"}
LOOK = {"name": "look", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def turns() -> Iterator[Served]:
    """A server whose template closes every message."""
    executor = make_executor(torch.device("cpu"), vocab_size=VOCABULARY, num_blocks=512)
    tokenizer = ChatTokenizer(byte_tokenizer(), ChatTemplate({"default": TURNS}, {}, "here"), [END])
    with serving(executor, tokenizer=tokenizer, tool_parser="hermes", reasoning_parser="think") as served:
        yield served


def num_tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("last", "prompt"),
    [
        ("abc", "abc"),
        ([{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}], "abc"),
        (
            [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "b"}],
            "<think>hm</think>b",
        ),
        ("<end>", "<end>"),
        ("Continue0Here", "Continue0Here"),
        ("", ""),
    ],
)
def test_messages_go_on_with_the_last_message(last: Any, prompt: str, turns: Served) -> None:
    """The prompt ends with its text; whole and streamed, with and without tools, as counted before."""
    body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "content": last}], "max_tokens": 4}
    expected = len(f"<user>a</user><assistant>{prompt}")
    _, _, counted = ask(turns, "/v1/messages/count_tokens", {"messages": body["messages"]})
    assert counted == {"input_tokens": expected}
    for more in ({}, {"tools": [LOOK]}):
        status, _, answer = ask(turns, "/v1/messages", body | more)
        assert status == 200, answer
        assert num_tokens(answer["usage"]) == expected
    claude = anthropic.Anthropic(base_url=turns.url, api_key="none", max_retries=0)
    with claude.messages.stream(model="recall", **body) as stream:
        usage = stream.get_final_message().usage
    assert num_tokens(usage.to_dict()) == expected  # type: ignore[arg-type]


def test_the_models_answer_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model says the rest of what was begun; a closed message would make it begin anew."""
    template = "{% for message in messages %}{{ message.content }} {% if loop.last %}; {% endif %}{% endfor %}"
    monkeypatch.setattr(served.service.tokenizer, "template", ChatTemplate({"default": template}, {}, "here"))
    messages = [
        {"role": "user", "content": "otter: brass lantern; wren: kite; otter:"},
        {"role": "assistant", "content": "brass"},
    ]
    claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked: Any = {"model": "recall", "messages": messages, "max_tokens": 8, "extra_body": {"temperature": 0}}
    with claude.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
    whole = claude.messages.create(**asked).content
    assert [block.text for block in whole if block.type == "text"] == [streamed] == ["lantern"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "recall", "messages": messages, "temperature": 0}
    for more in ({}, {"add_generation_prompt": False}):
        answer = client.chat.completions.create(**asked, extra_body={"continue_final_message": True, **more})
        assert answer.choices[0].message.content == "lantern"


@pytest.mark.parametrize("text", ["abc", "a \n", "  a", "", "<end>", "<end>a"])
def test_chats_go_on_by_vllms_arguments(text: str, turns: Served) -> None:
    """`/tokenize` shows the prompt, trimmed as the template does; special tokens in it are text."""
    messages = [QUESTION, {"role": "assistant", "content": text}]
    closed = f"<user>a</user><assistant>{text.strip()}</assistant>"
    begun = closed.removesuffix("</assistant>")
    for options, expected in (
        ({"continue_final_message": True}, begun),
        ({"continue_final_message": True, "add_generation_prompt": False}, begun),
        ({"add_generation_prompt": False}, closed),
        ({"continue_final_message": False}, closed + "<assistant>"),
    ):
        _, _, shown = ask(turns, "/tokenize", {"messages": messages} | options)
        assert END not in shown["tokens"]
        assert ask(turns, "/detokenize", {"tokens": shown["tokens"]})[2]["prompt"] == expected
        status, _, answer = ask(turns, "/v1/chat/completions", {"messages": messages, "max_tokens": 3} | options)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == len(expected)


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("path", "last", "more", "param"),
    [
        ("/v1/messages", {"content": "abc "}, {}, "messages"),
        ("/v1/messages", {"content": [{"type": "text", "text": "abc\n"}]}, {}, "messages"),
        ("/v1/messages", {"content": [{"type": "text", "text": "a"}, USE]}, {}, "messages"),
        ("/v1/messages", {"content": [USE]}, {"tools": [LOOK]}, "messages"),
        ("/v1/messages", {"content": [{"type": "thinking", "thinking": "a", "signature": ""}]}, {}, "messages"),
        ("/v1/messages", {"content": 'a<tool_call>{"na'}, {"tools": [LOOK]}, "messages"),
        ("/v1/messages", {"content": "a"}, {"tools": [LOOK], "tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/messages", {"content": "a"}, {"output_config": {"format": FORMAT}}, "output_config.format"),
        ("/v1/messages/count_tokens", {"content": "abc "}, {}, "messages"),
        ("/v1/chat/completions", {"content": "a", "tool_calls": [CALL]}, {}, "messages"),
        ("/v1/chat/completions", {"content": "a", "role": "user"}, {}, "messages"),
        ("/v1/chat/completions", {"content": "a"}, {"add_generation_prompt": True}, "continue_final_message"),
        ("/tokenize", {"content": "a", "role": "user"}, {}, "messages"),
        ("/tokenize", {"content": "a"}, {"add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_cannot_go_on_is_refused(
    path: str, last: dict[str, Any], more: dict[str, Any], param: str, turns: Served
) -> None:
    body = {"messages": [QUESTION, {"role": "assistant", **last}], **more}
    if path == "/v1/messages":
        body["max_tokens"] = 4
    elif path in ("/v1/chat/completions", "/tokenize"):
        body["continue_final_message"] = True
    status, _, answer = ask(turns, path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content * 2 }}", "{{ 1 / 0 }}"])
def test_templates_that_do_not_write_the_text_once_are_refused(
    template: str, turns: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns.service.tokenizer, "template", ChatTemplate({"default": template}, {}, "here"))
    body = {"messages": [QUESTION, {"role": "assistant", "content": "b"}], "max_tokens": 4}
    status, _, answer = ask(turns, "/v1/messages", body)
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_reasoning_that_was_begun_goes_on(turns: Served) -> None:
    """What the answer adds up to the end of reasoning is reasoning; behind an empty text it may begin."""
    for text, expected in (
        ("<think>a", {"reasoning": "b", "content": "c"}),
        ("<think>a</think>", {"content": "bc"}),
        ("", {"reasoning": "b", "content": "c"}),
    ):
        body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "content": text}]}
        body |= {"continue_final_message": True, "max_tokens": 20}
        begin = "" if text else "<think>"
        body["structured_outputs"] = {"choice": [f"{begin}b</think>c" if "reasoning" in expected else "bc"]}
        message = ask(turns, "/v1/chat/completions", body)[2]["choices"][0]["message"]
        assert {name: message[name] for name in message.keys() - {"role"}} == expected


def test_calls_without_markers_are_none_within_a_text(turns: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.service, "tongue", turns.service.tongue._replace(tools=TOOL_FORMATS["llama3"]))
    text = '{"name": "look", "parameters": {}}'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {"tools": tools, "structured_outputs": {"choice": [text]}, "max_tokens": 60}
    messages = [QUESTION, {"role": "assistant", "content": "As JSON:"}]
    body |= {"messages": messages}
    choice = ask(turns, "/v1/chat/completions", body | {"continue_final_message": True})[2]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    choice = ask(turns, "/v1/chat/completions", body)[2]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
