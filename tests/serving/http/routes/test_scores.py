"""Log probabilities of prompts, as evaluation harnesses read them; alternatives are as many as asked."""

from operator import itemgetter
from typing import Any

import pytest

from paged.serving.text.token_texts import TokenTexts
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import PROMPT
from tests.serving.served import Served

CONTEXT, CONTINUATION = "otter: brass lantern; wren: kite; otter:", " brass lantern"


def scores(answer: Any, num_context: list[int], *, num_new: int) -> list[tuple[float, bool]]:
    """Read an answer as lm-evaluation-harness does: the sum behind each context, and whether each token is the best."""
    found = []
    for choice, start in zip(sorted(answer["choices"], key=itemgetter("index")), num_context, strict=True):
        columns = choice["logprobs"]
        end = len(columns["tokens"]) - num_new
        values = columns["token_logprobs"][start:end]
        best = [max(row.values()) for row in columns["top_logprobs"][start:end]]
        found.append((sum(values), values == best))
    return found


@pytest.mark.parametrize("logprobs", [1, 5])
def test_prompts_are_scored_without_new_tokens(logprobs: int, served: Served) -> None:
    """The scores are those of a request that makes a token; prompts are token ids, several in a request."""
    encode = served.service.tokenizer.encode
    contexts = [encode(CONTEXT), encode("wren: kite; wren:")]
    prompts = [encode(CONTEXT + CONTINUATION), encode("wren: kite; wren: lantern")]
    lengths = list(map(len, contexts))
    body = {"model": "recall", "prompt": prompts, "temperature": 0, "logprobs": logprobs, "echo": True, "seed": 1234}
    status, _, scored = ask(served, "/v1/completions", body | {"max_tokens": 0})
    assert status == 200, scored
    made = ask(served, "/v1/completions", body | {"max_tokens": 1})[2]
    assert scores(scored, lengths, num_new=0) == scores(made, lengths, num_new=1)
    assert [is_best for _, is_best in scores(scored, lengths, num_new=0)] == [True, False]
    num_tokens = sum(map(len, prompts))
    assert scored["usage"]["prompt_tokens"] == scored["usage"]["total_tokens"] == num_tokens
    assert scored["usage"]["completion_tokens"] == 0
    for choice, prompt in zip(scored["choices"], prompts, strict=True):
        assert choice["text"] == served.service.tokenizer.decode(prompt)
        assert choice["finish_reason"] == "length"
        assert {len(column) for column in choice["logprobs"].values()} == {len(prompt)}
        assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None


def test_scores_stream_and_repeat(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "n": 2}
    plain = ask(served, "/v1/completions", body)[2]
    assert [choice["text"] for choice in plain["choices"]] == [PROMPT] * 2
    assert [choice["logprobs"] for choice in plain["choices"]] == [None] * 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, _, events = ask(served, "/v1/completions", body | options)
    assert status == 200
    assert events.count(PROMPT) == 2
    assert '"completion_tokens":0' in events
    status, _, answer = ask(served, "/v1/completions", body | {"echo": False})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("asked", [1, 5, 20])
def test_alternatives_with_equal_texts_are_all_listed(
    asked: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as asked, and the token itself; whole, echoed, and streamed."""
    monkeypatch.setattr(TokenTexts, "text", lambda self, token, *, is_first=False: "ab"[token % 2])
    body = {"prompt": PROMPT, "echo": True, "logprobs": asked, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    columns = ask(served, "/v1/completions", body)[2]["choices"][0]["logprobs"]
    for value, row in zip(columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=True):
        assert len(row) == asked if value == max(row.values()) else len(row) in (asked, asked + 1)
        assert value in row.values()
        assert all(text in "ab" or text.startswith("token_id:") for text in row)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": asked, "max_tokens": 4}
    content = ask(served, "/v1/chat/completions", chat)[2]["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in content} == {asked}
