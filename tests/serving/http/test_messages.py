"""/v1/messages by Anthropic's client and /v1/responses by OpenAI's, whole and as events."""

from typing import Any

import anthropic
import openai
import pytest

from tests.serving.http.test_openai import MESSAGES, PROMPT, client
from tests.serving.served import Served

__all__ = ["client"]

SYSTEM = "finch: drum; " * 5  # more than a block


@pytest.fixture(scope="module")
def claude(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def num_tokens(usage: Any) -> int:
    """Tokens of the prompt: Anthropic counts those from the cache apart."""
    return usage.input_tokens + usage.cache_read_input_tokens


def test_messages_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    given: Any = {"model": "recall", "max_tokens": 8, "extra_body": {"temperature": 0}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "otter: brass lantern; wren: kite;"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "heron: plum;"}]},
        {"role": "user", "content": "otter:"},
    ]
    answer = claude.messages.create(messages=history, system=SYSTEM, **given)
    assert [block.text for block in answer.content if block.type == "text"] == ["brass lantern"]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 3)
    with claude.messages.stream(messages=history, system=SYSTEM, **given) as stream:
        assert "".join(stream.text_stream) == "brass lantern"
        usage = stream.get_final_message().usage
    assert (num_tokens(usage), usage.output_tokens) == (num_tokens(answer.usage), answer.usage.output_tokens)
    assert usage.cache_read_input_tokens
    thoughts: Any = [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "redacted_thinking", "data": "a"}]
    for messages in (history, [history[0], {"role": "assistant", "content": thoughts}, *history[1:]]):
        counted = claude.messages.count_tokens(model="recall", messages=messages, system=SYSTEM)
        assert counted.input_tokens == num_tokens(usage)
    stopped = claude.messages.create(messages=MESSAGES, stop_sequences=["lantern"], **given)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "lantern")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(messages=MESSAGES, **given | {"max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(messages=MESSAGES, **given | {"model": "another"})


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    given: Any = {"model": "recall", "temperature": 0}
    answer = client.responses.create(input="otter:", instructions="otter: brass lantern; wren: kite;", **given)
    assert (answer.output_text, answer.status) == ("brass lantern", "completed")
    for _ in range(20):  # a reader that is late gets the tokens of two steps at once
        events = list(client.responses.create(input=MESSAGES, stream=True, **given))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == "brass lantern"
        if len(pieces) > 1:
            break
    assert len(pieces) > 1, "as it comes"
    assert events[-1].type == "response.completed"
    usage = events[-1].response.usage
    assert (usage.input_tokens, usage.output_tokens_details) == (8, answer.usage.output_tokens_details)
    with client.responses.stream(input=PROMPT, **given) as stream:  # checks the order of events
        assert stream.get_final_response().output_text == "brass lantern"
    cut = client.responses.create(input=PROMPT, max_output_tokens=1, **given)
    assert cut.incomplete_details is not None
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("brass", "incomplete", "max_output_tokens")
