"""Answers of a given form, through the server: choices, patterns and schemas against what the model would say."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged.models.recall.task import sample_prompts
from paged.serving.grammar.fair_semaphore import FairSemaphore, QueueFullError
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import Served

BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0}


def texts(served: Served, path: str = "/v1/completions", **given: Any) -> list[str]:
    status, _, body = ask(served, path, BODY | given)
    assert status == 200, body
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    return [choice["text"] for choice in body["choices"]]


def test_answers_follow_their_grammar(served: Served) -> None:
    assert texts(served) == ["brass lantern"]
    assert texts(served, structured_outputs={"choice": ["kite"]}) == ["kite"]
    # Every prompt and completion has a matcher of its own.
    both = {"prompt": [PROMPT, f"{PROMPT} brass"], "n": 2, "structured_outputs": {"regex": "(acorn|kite)(acorn|kite)"}}
    found = texts(served, **both)
    assert len(found) == 4
    assert all(set(text.split()) <= {"acorn", "kite"} and len(text.split()) == 2 for text in found)
    check_idle(served)


def test_right_answers_stay_right_under_a_pattern_of_their_form(served: Served) -> None:
    """Up to three words, then the end: the model's own answers follow it, so it changes none."""
    prompts = sample_prompts(7, 12, 16, 120)
    given = {"prompt": [prompt.text for prompt in prompts], "structured_outputs": {"regex": "([a-z]+ ?){1,3}"}}
    assert texts(served, **given) == [prompt.answer for prompt in prompts]


def test_a_grammar_of_other_letters_is_named(served: Served) -> None:
    """By the client's field: this vocabulary has no digits."""
    status, _, body = ask(served, "/v1/completions", BODY | {"structured_outputs": {"regex": "[0-9]+"}})
    message = "structured_outputs: the vocabulary has no token that continues this grammar"
    assert (status, body["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"xml": "a"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}},  # whose braces are no words of this vocabulary
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none"}}}},
    ],
)
def test_malformed_grammars_are_the_clients_fault(given: dict[str, Any], served: Served) -> None:
    status, _, body = ask(served, "/v1/completions", BODY | given)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_a_hundred_grammars_at_once_are_all_answered(served: Served) -> None:
    """More than compile at once: they wait, like requests."""
    with ThreadPoolExecutor(100) as threads:
        bodies = [BODY | {"structured_outputs": {"regex": f"(acorn|kite){{{n + 1}}}"}} for n in range(100)]
        answers = list(threads.map(lambda body: ask(served, "/v1/completions", body | {"max_tokens": 2}), bodies))
    assert [status for status, _, _ in answers] == [200] * 100
    check_idle(served)


def test_the_queue_of_grammars_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODY | {"structured_outputs": {"choice": ["acorn"]}}
    with monkeypatch.context() as patch:
        patch.setattr(FairSemaphore, "hold", full)
        status, headers, answer = ask(served, "/v1/completions", body)
        assert (status, headers["retry-after"], answer["error"]["param"]) == (429, "1", "structured_outputs")
    assert texts(served, structured_outputs={"choice": ["acorn"]}) == ["acorn"]


def full(semaphore: FairSemaphore, client: object) -> Any:
    raise QueueFullError


def events(served: Served, **given: Any) -> list[dict[str, Any]]:
    _, _, text = ask(served, "/v1/completions", BODY | given | {"stream": True})
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "rules",
    [{"min_tokens": 9}, {"allowed_token_ids": [0, "kite"]}, {"logit_bias": {"end": -100}}],
)
def test_a_whole_answer_ends_whatever_else_is_asked(rules: dict[str, Any], served: Served) -> None:
    """Neither a minimum, nor tokens that leave out the end, nor a bias against it prolongs it, streamed or not."""
    tokenizer = served.service.tokenizer
    names = {"kite": tokenizer.tokenizer.token_to_id("kite"), "end": tokenizer.eos_token_ids[0]}
    given: dict[str, Any] = {}
    for name, value in rules.items():
        given[name] = value
        if isinstance(value, list):
            given[name] = [names.get(item, item) for item in value]
        if isinstance(value, dict):
            given[name] = {str(names[item]): bias for item, bias in value.items()}
    given["structured_outputs"] = {"choice": ["kite"]}
    assert texts(served, **given) == ["kite"]
    parts = events(served, **given)
    assert "".join(part["choices"][0]["text"] for part in parts) == "kite"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_tokens_that_no_grammar_goes_on_with_are_named(served: Served) -> None:
    """Before the first token whole and streamed answers are refused alike, with both names."""
    other = served.service.tokenizer.tokenizer.token_to_id("acorn")
    for stream in (False, True):
        given = {"structured_outputs": {"choice": ["kite"]}, "allowed_token_ids": [other], "stream": stream}
        status, _, body = ask(served, "/v1/completions", BODY | given)
        message = "structured_outputs: no token that continues this grammar is left by allowed_token_ids"
        assert (status, body["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "a\\b"}, "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_schemas_that_are_not_kept_are_refused_by_name(schema: dict[str, Any], name: str, served: Served) -> None:
    """In a response_format and in structured_outputs."""
    schema = {"type": "object", "properties": {"a": schema}}
    for given in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
    ):
        status, _, body = ask(served, "/v1/completions", BODY | given)
        assert (status, body["error"]["param"]) == (400, next(iter(given)))
        assert name in body["error"]["message"]
