"""Answers of a given form, through the server: choices, patterns and schemas against what the model would say."""

from typing import Any

import pytest

from paged.interop import structured
from paged.models.recall.task import sample_prompts
from tests.executors.serving.conftest import Served
from tests.executors.serving.test_limits import ask
from tests.executors.serving.test_openai import PROMPT, check_idle

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


def test_a_grammar_that_gives_way_to_others_may_come_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODY | {"structured_outputs": {"choice": ["acorn"]}}
    with monkeypatch.context() as patch:
        patch.setattr(structured, "_MAX_COMPILING", 0)
        status, headers, answer = ask(served, "/v1/completions", body)
        assert (status, headers["retry-after"], answer["error"]["param"]) == (429, "1", "structured_outputs")
    assert texts(served, structured_outputs={"choice": ["acorn"]}) == ["acorn"]
