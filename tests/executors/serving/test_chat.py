"""Chats with calls of tools and reasoning, as OpenAI's and Anthropic's clients read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tokenizers

from paged import ChatTokenizer
from paged.executors.serving.marked_tokenizer import MarkedTokenizer
from paged.executors.text.chat_template import ChatTemplate
from tests.executors.serving.conftest import Served, serving
from tests.executors.serving.test_openai import MESSAGES

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SAID = '<think>Hm.</think>Yes. <tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>'


@pytest.fixture
def talking(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose model says SAID in place of "brass lantern"."""
    decode = ChatTokenizer.decode
    said = {"brass": SAID[:40], "lantern": SAID[40:]}

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
        client.chat.completions.create(**given | {"tool_choice": "required"})

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


def test_special_tokens_around_calls_are_kept() -> None:
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<end>"])
    marked = MarkedTokenizer(ChatTokenizer(tokenizer, ChatTemplate({}, {}, "here")))
    ids = [tokenizer.token_to_id(one) for one in ("a", "[TOOL_CALLS]", "b", "<end>", "[TOOL_CALLS]")]
    assert marked.decode(ids) == "a[TOOL_CALLS]b[TOOL_CALLS]"
