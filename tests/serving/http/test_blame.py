"""Errors name the argument that was sent; arguments without effect are refused; names of tools are free."""

import errno
import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import ChatTokenizer
from paged.serving.text.chat_template import ChatTemplate
from tests.executors.oracle import make_executor
from tests.processes import branches_of, is_alive, wait_until
from tests.serving.grammar.test_structured import END, VOCABULARY, byte_tokenizer
from tests.serving.http.test_chat import untrained
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import MESSAGES, PROMPT, check_idle
from tests.serving.served import TEMPLATE, Served, serving

__all__ = ["untrained"]

COMPLETION, CHAT = ("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})
RESPONSES, CLAUDE = ("/v1/responses", {"input": PROMPT}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4})
LONG = "otter: " * 2000
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BROKEN: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "none"}}}
FORCED = {"type": "function", "function": {"name": "look"}}
CLAUDES: Any = {"name": "look", "input_schema": {"type": "object"}}
JSON_OBJECT = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "schema": {"type": "none"}}


@pytest.mark.parametrize(
    ("route", "given", "param"),
    [
        # Token ids beyond the vocabulary.
        *[(COMPLETION, {name: value}, name) for name, value in [
            ("logit_bias", {"5": 1, "469": 1}), ("logit_bias", {"-1": 1}), ("allowed_token_ids", [1, 469]),
            ("stop_token_ids", [469]), ("prompt", [1, 469]),
        ]],
        (CHAT, {"logit_bias": {"469": 1}}, "logit_bias"),
        (("/v1/embeddings", {}), {"input": [[1], [469]]}, "input"),
        (("/detokenize", {}), {"tokens": [1] * 300_000}, "tokens"),
        # Prompts that are too long.
        (COMPLETION, {"prompt": LONG}, "prompt"),
        (COMPLETION, {"prompt": [5] * 2000}, "prompt"),
        (COMPLETION, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETION, {"prompt": [[]]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (RESPONSES, {"input": LONG}, "input"),
        (CLAUDE, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (("/v1/embeddings", {}), {"input": LONG}, "input"),
        (("/v1/embeddings", {}), {"input": [""]}, "input"),
        (("/tokenize", {}), {"prompt": "a " * 300_000}, "prompt"),
        (("/tokenize", {}), {"messages": [{"role": "user", "content": "a " * 300_000}]}, "messages"),
        # Limits under the route's own names.
        (CHAT, {"max_completion_tokens": 10**8}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 10**8}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 10**8}, "max_output_tokens"),
        (CLAUDE, {"stop_sequences": [""]}, "stop_sequences"),
        (COMPLETION, {"cache_salt": ""}, "cache_salt"),
        # Grammars.
        (COMPLETION, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (COMPLETION, {"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs"),
        (COMPLETION, {"structured_outputs": {"regex": "\\u00e9"}}, "structured_outputs"),  # beyond the vocabulary
        (COMPLETION, {"response_format": JSON_OBJECT}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", **SCHEMA}}}, "response_format"),
        (RESPONSES, {"text": {"format": SCHEMA}}, "text.format"),
        (CHAT, {"tools": [BROKEN], "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": [BROKEN], "tool_choice": FORCED}, "tools"),
        (CLAUDE, {"tools": [CLAUDES | {"input_schema": {"type": "none"}}], "tool_choice": {"type": "any"}}, "tools"),
        # What would have no effect.
        *[(CHAT, {"tool_choice": choice}, "tool_choice") for choice in ("required", "auto", "none", FORCED)],
        (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice"),
        (CLAUDE, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (CLAUDE, {"tools": [CLAUDES], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (CLAUDE, {"tools": [CLAUDES], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name"),
        (CLAUDE, {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice"),
        (COMPLETION, {"response_format": JSON_OBJECT, "structured_outputs": {"regex": "a"}}, "response_format"),
        (CHAT, {"response_format": JSON_OBJECT, "structured_outputs": {"choice": ["a"]}}, "response_format"),
        (CHAT, {"response_format": JSON_OBJECT, "tools": [TOOL], "tool_choice": "required"}, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": FORCED}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (("/tokenize", {"prompt": "a"}), {"add_generation_prompt": True}, "add_generation_prompt"),
        *[(CHAT, {"chat_template_kwargs": {name: 1}}, "chat_template_kwargs") for name in ("messages", "tools")],
        # Places within.
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]}, "messages.1.content.0.text"),
        (CHAT, {"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]}, "tools.1.function.name"),
        (COMPLETION, {"metadata": []}, "metadata"),
        (COMPLETION, {"promt": "a"}, "promt"),
    ],
)  # fmt: skip
def test_errors_name_what_was_sent(route: Any, given: dict[str, Any], param: str, served: Served) -> None:
    path, right = route
    status, _, answer = ask(served, path, right | given)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith((f"{param}: ", f"{param}[")), answer
    assert ask(served, path, right)[0] == 200 or not right


def test_no_token_left(served: Served) -> None:
    """It is the fault of what allows none, else the server's."""
    body = {"prompt": PROMPT, "allowed_token_ids": [0], "min_tokens": 3, "stop_token_ids": [0]}
    status, _, answer = ask(served, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids"), answer
    check_idle(served)


@pytest.mark.parametrize("name", ["none", "auto", "required", "look"])
def test_tools_of_any_name_can_be_forced(name: str, untrained: Served) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": one, "parameters": schema}} for one in ("other", name)]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
    status, _, answer = ask(untrained, "/v1/chat/completions", body | {"max_tokens": 200})
    assert status == 200, answer
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == [name]
    claudes = [{"name": one, "input_schema": schema} for one in ("other", name)]
    body = {"messages": MESSAGES, "tools": claudes, "tool_choice": {"type": "tool", "name": name}, "max_tokens": 200}
    status, _, answer = ask(untrained, "/v1/messages", body)
    assert (status, answer["content"][0]["name"]) == (200, name)


def test_templates_have_variables_of_any_name(served: Served) -> None:
    """Those of Python's functions on the way, and of Jinja."""
    names = "self call args kwargs images template values limit options variables name text add_generation_prompt"
    names += " bos_token documents class loop range raise_exception"
    for name in [*names.split(), "", "a b", "\u65e5", "__class__", "parse_special", "longest"]:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, _, answer = ask(served, path, {"messages": MESSAGES, "chat_template_kwargs": {name: 1}})
            is_taken = name in ("parse_special", "longest")
            assert status == (400 if is_taken else 200), (name, answer)
            assert not is_taken or answer["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "number",
    [errno.EAGAIN, *(pytest.param(other, marks=pytest.mark.thorough) for other in (errno.ENOMEM, errno.EMFILE))],
)
def test_no_more_processes_are_not_the_clients_fault(
    number: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system had none for a template or a grammar, and has some again."""
    patterned = {"prompt": PROMPT, "structured_outputs": {"regex": f"(acorn|kite){{1,{number}}}"}, "max_tokens": 2}
    requests = [CHAT, CLAUDE, ("/tokenize", {"messages": MESSAGES}), ("/v1/completions", patterned)]

    def no_process(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    for pid in branches_of("paged.serving.text.template_sandbox") | branches_of("paged.serving.grammar"):
        with suppress(ProcessLookupError):  # it ends with another
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_alive(pid))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        for path, body in requests:
            status, _, answer = ask(served, path, body)
            assert (status, "process" in answer["error"]["message"]) == (503, True), answer
    for path, body in requests:
        status, _, answer = ask(served, path, body)
        assert status == 200, answer
    check_idle(served)


class _NoEncode:
    """A tokenizer whose `encode`, which holds Python's lock, must not be used."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        assert name != "encode"
        return getattr(self._tokenizer, name)


def test_texts_are_encoded_without_pythons_lock() -> None:
    tokenizer: Any = _NoEncode(byte_tokenizer())
    executor = make_executor(torch.device("cpu"), vocab_size=VOCABULARY, num_blocks=512)
    chats = ChatTokenizer(tokenizer, ChatTemplate({"default": TEMPLATE}, {}, "here"), [END])
    with serving(executor, tokenizer=chats) as served:
        text = "a<end>b"
        for path, right in (COMPLETION, CHAT, RESPONSES, CLAUDE, ("/v1/embeddings", {"input": ""}), ("/tokenize", {})):
            body = json.loads(json.dumps(right).replace(PROMPT, text)) if right else {"prompt": text}
            status, _, answer = ask(served, path, body | ({"input": [text]} if "embeddings" in path else {}))
            assert status == 200 or "hidden states" in answer["error"]["message"], answer


@pytest.mark.thorough  # waits for a limit of time
def test_time_counts_from_arrival(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What encoding takes is part of it, and a text that is encoded for too long keeps no client."""
    encode, can_go_on = ChatTokenizer.encode, threading.Event()

    def wait_and_encode(*args: Any, **options: Any) -> list[int]:
        assert can_go_on.wait(60)
        return encode(*args, **options)

    completion = {"prompt": PROMPT, "max_tokens": 2}
    with serving(chat_folder, request_seconds=3.0) as served:
        with monkeypatch.context() as patched:
            patched.setattr(ChatTokenizer, "encode", wait_and_encode)
            for path, body in [
                ("/v1/completions", completion),
                ("/v1/completions", completion | {"stream": True}),
                ("/v1/embeddings", {"input": PROMPT}),
            ]:
                status, _, answer = ask(served, path, body)
                assert (status, answer["error"]["code"]) == (504, "timeout"), "it still waits"
            can_go_on.set()
        assert ask(served, "/v1/completions", completion)[0] == 200
        served.service.seconds_left = lambda request: 0.0  # type: ignore[method-assign]
        for is_streamed in (False, True):
            status, _, answer = ask(served, "/v1/completions", completion | {"stream": is_streamed})
            assert (status, answer["error"]["code"]) == (504, "timeout"), "too late for the engine"
        check_idle(served)
