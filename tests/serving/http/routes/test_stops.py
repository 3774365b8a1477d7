"""Stop strings that are special tokens, which an answer's text does not show, on every route that takes them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import ChatTokenizer
from paged.serving.text.chat_template import ChatTemplate
from tests.executors.oracle import make_executor
from tests.serving.grammar.test_structured import END, VOCABULARY, byte_tokenizer
from tests.serving.http.test_limits import ask
from tests.serving.served import TEMPLATE, Served, serving

SPECIAL, TURN, TOOL = "<|endoftext|>", "<|im_end|>", "<tool_call>"


@pytest.fixture(scope="module")
def special() -> Iterator[Served]:
    """A server whose tokenizer has special tokens that are no end tokens; one of them is a marker of calls."""
    words = byte_tokenizer()
    words.add_special_tokens([SPECIAL, TURN, TOOL])
    executor = make_executor(torch.device("cpu"), vocab_size=VOCABULARY, num_blocks=512)
    tokenizer = ChatTokenizer(words, ChatTemplate({"default": TEMPLATE}, {}, "here"), [END])
    with serving(executor, tokenizer=tokenizer, tool_parser="hermes") as served:
        yield served


@pytest.fixture
def only(special: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the model write nothing but one token, on the routes without such an argument too."""

    def allow(text: str) -> int:
        token = special.service.tokenizer.tokenizer.token_to_id(text)
        assert token is not None
        defaults = replace(special.service.defaults, allowed_token_ids=[token], ignore_eos=True)
        monkeypatch.setattr(special.service, "defaults", defaults)
        return int(token)

    return allow


MESSAGES = [{"role": "user", "content": "a"}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("stop", {"prompt": "a", "max_tokens": 5}),
    "/v1/chat/completions": ("stop", {"messages": MESSAGES, "max_tokens": 5}),
    "/v1/messages": ("stop_sequences", {"messages": MESSAGES, "max_tokens": 5}),
}


def end_of(path: str, answer: Any) -> tuple[str, int]:
    """Why an answer ended, and after how many tokens."""
    if path == "/v1/messages":
        return answer["stop_reason"], answer["usage"]["output_tokens"]
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("text", [SPECIAL, TURN])
def test_a_special_token_stops(path: str, text: str, special: Served, only: Any) -> None:
    only(text)
    name, body = ROUTES[path]
    stopped = "stop_sequence" if path == "/v1/messages" else "stop"
    for stops in ([text], ["b", text]):
        status, _, answer = ask(special, path, body | {name: stops})
        assert status == 200, answer
        assert end_of(path, answer) == (stopped, 1)
        if path == "/v1/messages":
            assert answer["stop_sequence"] == text
        status, _, events = ask(special, path, body | {name: stops, "stream": True})
        assert status == 200
        assert f'"{stopped}"' in events
    other = TURN if text == SPECIAL else SPECIAL
    reason, count = end_of(path, ask(special, path, body | {name: [other, "b"]})[2])
    assert (reason, count) == ("max_tokens" if path == "/v1/messages" else "length", 5)


@pytest.mark.parametrize("path", ROUTES)
def test_one_beside_other_text_is_refused(path: str, special: Served) -> None:
    name, body = ROUTES[path]
    for stop in (f"a{SPECIAL}", f"{TURN}\n", SPECIAL + TURN):
        status, _, answer = ask(special, path, body | {name: ["b", stop]})
        assert (status, answer["error"]["param"]) == (400, name), stop
        assert answer["error"]["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("path", ROUTES)
def test_markers_that_the_text_shows_may_stand_beside_other_text(path: str, special: Served, only: Any) -> None:
    only(TOOL)
    name, body = ROUTES[path]
    status, _, answer = ask(special, path, body | {name: [TOOL + TOOL]})
    assert status == 200, answer
    assert end_of(path, answer)[1] == 2


def test_text_that_is_written_like_a_special_token_stops_too(special: Served) -> None:
    """A model can write its characters one by one."""
    form = {"structured_outputs": {"regex": f"ab{SPECIAL}c".replace("|", r"\|")}}
    body = {"prompt": "a", "stop": SPECIAL, "max_tokens": 40, **form}
    choice = ask(special, "/v1/completions", body)[2]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
