"""Every field of OpenAI's and Anthropic's clients: null and defaults pass, no wish is lost."""

import base64
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from paged.serving.http.service import Service
from paged.serving.text.chat_template import ChatTemplate
from paged.serving.text.template_wishes import TemplateWishes
from tests.serving.http.test_chat import TOOLS, said, talking, untrained
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import MESSAGES, PROMPT
from tests.serving.served import Served

__all__ = ["said", "talking", "untrained"]

FUNCTION = {"type": "function", **TOOLS[0]["function"]}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
EPHEMERAL = {"type": "ephemeral"}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# By route: the clients' types; a body; and by field the values that ask for nothing, those that are honoured, and those
# that are refused.
Values = tuple[list[Any], list[Any], list[Any]]
WITHOUT_EFFECT: dict[str, Values] = {
    "metadata": ([{}], [{"a": "b"}], []),
    "prompt_cache_key": ([], ["a"], []),
    "safety_identifier": ([], ["a"], []),
    "service_tier": (["auto", "default"], [], []),
    "store": ([False, True], [], []),
    "user": ([], ["a"], []),
}
SAMPLING: dict[str, Values] = {
    "model": (["recall"], [], ["another"]),
    "stream": ([False], [], ["a"]),
    "temperature": ([1], [0.5], [-1]),
    "top_p": ([1], [0.5], [2]),
}
PENALTIES: dict[str, Values] = {
    "frequency_penalty": ([0], [1], ["a"]),
    "logit_bias": ([{}], [{"3": 1}], [{"a": 1}]),
    "n": ([1], [2], [0]),
    "presence_penalty": ([0], [1], ["a"]),
    "seed": ([], [1], ["a"]),
    "stop": ([[]], ["a", ["a"]], [""]),
    "stream_options": ([{}, {"include_usage": False}, {"include_obfuscation": False}], [], [{"include_usage": True}]),
}
CACHE: dict[str, Values] = {
    "moderation": ([], [], [{"model": "a"}]),
    "prompt_cache_options": (
        [{}, {"mode": "implicit"}, {"prewarm": False}],
        [{"ttl": "30m"}, {"mode": "implicit", "ttl": "12h"}],
        [{"mode": "explicit"}, {"prewarm": True}, {"ttl": "1h"}, {"a": 1}],
    ),
    "prompt_cache_retention": (["in_memory", "in-memory"], ["24h"], ["1h", 24]),
}
CHAT: dict[str, Values] = {
    **WITHOUT_EFFECT,
    **SAMPLING,
    **PENALTIES,
    **CACHE,
    "audio": ([], [], [{"voice": "a", "format": "wav"}]),
    "function_call": (["none", "auto"], [], [{"name": "look"}]),
    "functions": ([[]], [], [[{"name": "look"}]]),
    "logprobs": ([False], [True], ["a"]),
    "max_completion_tokens": ([], [3], [0]),
    "max_tokens": ([], [3], [0]),
    "modalities": ([["text"]], [], [["text", "audio"]]),
    "parallel_tool_calls": ([], [], ["a", True]),  # only with tools, as OpenAI has it
    "prediction": ([], [], [{"type": "content", "content": "a"}]),
    "reasoning_effort": (["medium", "none"], [], ["high", "minimal"]),
    "response_format": ([{"type": "text"}], [], [{"type": "a"}]),
    "tool_choice": ([], [], ["none", "auto", "required", {"type": "function", "function": {"name": "look"}}]),
    "tools": ([[]], [TOOLS], [[{"type": "custom", "custom": {"name": "a"}}]]),
    "top_logprobs": ([0], [], [1]),
    "verbosity": (["medium"], [], ["low"]),
    "web_search_options": ([], [], [{}]),
}
COMPLETIONS: dict[str, Values] = {
    **SAMPLING,
    **PENALTIES,
    "best_of": ([1], [], [2]),
    "echo": ([False], [True], ["a"]),
    "logprobs": ([], [0, 2], [21]),
    "max_tokens": ([], [3], [0]),
    "suffix": ([""], [], ["a"]),
    "user": WITHOUT_EFFECT["user"],
}
RESPONSES: dict[str, Values] = {
    **WITHOUT_EFFECT,
    **SAMPLING,
    **CACHE,
    "access_programs": ([], [], [{}]),
    "background": ([False], [], [True]),
    "background_options": ([], [], [{}]),
    "context_management": ([[]], [], [[{"type": "compaction"}]]),
    "conversation": ([], [], ["a"]),
    "image": ([], [], [{}]),
    "include": ([[]], [["reasoning.encrypted_content"]], [["message.output_text.logprobs"]]),
    "instructions": ([""], ["a"], [3]),
    "max_output_tokens": ([], [3], [0]),
    "max_tool_calls": ([], [], [1]),
    "parallel_tool_calls": ([True, False], [], ["a"]),
    "previous_response_id": ([], [], ["a"]),
    "prompt": ([], [], [{"id": "a"}]),
    "reasoning": (
        [{}, {"effort": None, "summary": None}, {"effort": "medium", "summary": "auto"}, {"context": "auto"}],
        [],
        [{"effort": "high"}, {"summary": "detailed"}, {"mode": "pro"}, {"context": "all_turns"}],
    ),
    "stream_options": ([{}, {"include_obfuscation": False}], [], [{"include_obfuscation": True}]),
    "text": (
        [{}, {"format": {"type": "text"}}, {"verbosity": "medium"}, {"verbosity": None}],
        [],
        [{"verbosity": "high"}, {"format": {"type": "json_schema"}}],
    ),
    "tool_choice": (["none", "auto"], [], ["required", {"type": "function", "name": "look"}, {"type": "web_search"}]),
    "tools": ([[]], [[FUNCTION]], [[{"type": "web_search"}]]),
    "top_logprobs": ([0], [], [1]),
    "truncation": (["disabled"], [], ["auto"]),
}
EMBEDDINGS: dict[str, Values] = {
    "model": SAMPLING["model"],
    "dimensions": ([], [], [3]),
    "encoding_format": (["float"], ["base64"], ["a"]),
    "user": WITHOUT_EFFECT["user"],
}
PROMPT_OF_MESSAGES: dict[str, Values] = {
    "cache_control": (
        [],
        [EPHEMERAL, EPHEMERAL | {"ttl": "1h"}],
        ["a", EPHEMERAL | {"ttl": "2h"}, EPHEMERAL | {"tlt": "1h"}],
    ),
    "model": SAMPLING["model"],
    "output_config": ([{}, {"effort": None, "format": None}, {"effort": "high"}], [], [{"effort": "max"}, {"a": 1}]),
    "speed": (["standard"], [], ["fast"]),
    "system": ([""], ["a", [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]], [3]),
    "thinking": (
        [{"type": "disabled"}, {"type": "adaptive"}, {"type": "adaptive", "display": "summarized"}],
        [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}],
        [{"type": "between_tools"}, {"type": "enabled"}],
    ),
    "tool_choice": (
        [{"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": None}],
        [],
        [{"type": "any"}, {"type": "tool", "name": "look"}],
    ),
    "tools": ([[]], [[TOOL | {"cache_control": EPHEMERAL}]], [[{"type": "web_search_20250305", "name": "web_search"}]]),
    "user_profile_id": ([], [], ["a"]),
    "workspace_id": ([], [], ["a"]),
}
MESSAGES_FIELDS: dict[str, Values] = {
    **PROMPT_OF_MESSAGES,
    **SAMPLING,
    "billing_policy": ([], [], [{}]),
    "compaction": ([], [], [{}]),
    "container": ([], [], ["a"]),
    "context_management": ([{}, {"edits": []}, KEEP_ALL], [], [{"edits": [{"type": "clear_tool_uses_20250919"}]}]),
    "diagnostics": ([], [], [{"previous_message_id": None}]),
    "fallback_credit_token": ([], [], ["a"]),
    "fallbacks": ([[]], [], ["default"]),
    "inference_geo": (["global"], [], ["us"]),
    "mcp_servers": ([[]], [], [[{"type": "url", "url": "http://a", "name": "a"}]]),
    "metadata": WITHOUT_EFFECT["metadata"],
    "service_tier": (["auto", "standard_only"], [], []),
    "stop_sequences": ([[]], [["a"]], [[""]]),
    "thread": ([], [], [{}]),
}
del MESSAGES_FIELDS["temperature"], MESSAGES_FIELDS["top_p"]  # no longer among the client's own
ROUTES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Values]]] = {
    "/v1/chat/completions": (
        [chat_create_params.CompletionCreateParamsNonStreaming],
        {"messages": MESSAGES, "max_tokens": 4},
        CHAT,
    ),
    "/v1/completions": (
        [completion_create_params.CompletionCreateParamsNonStreaming],
        {"prompt": PROMPT, "max_tokens": 4},
        COMPLETIONS,
    ),
    "/v1/embeddings": ([embedding_create_params.EmbeddingCreateParams], {"input": PROMPT}, EMBEDDINGS),
    "/v1/responses": (
        [response_create_params.ResponseCreateParamsNonStreaming],
        {"input": PROMPT, "max_output_tokens": 4},
        RESPONSES,
    ),
    "/v1/messages": (
        [
            message_create_params.MessageCreateParamsNonStreaming,
            beta_message_create_params.MessageCreateParamsNonStreaming,
        ],
        {"messages": MESSAGES, "max_tokens": 4},
        MESSAGES_FIELDS,
    ),
    "/v1/messages/count_tokens": (
        [message_count_tokens_params.MessageCountTokensParams],
        {"messages": MESSAGES},
        PROMPT_OF_MESSAGES,
    ),
}
REQUIRED = {"messages", "prompt", "input", "max_tokens"}
IN_HEADERS = {"betas"}


@pytest.mark.parametrize("path", ROUTES)
def test_the_table_has_every_field_of_the_clients(path: str) -> None:
    kinds, body, fields = ROUTES[path]
    typed: set[str] = set()
    for kind in kinds:
        typed |= get_type_hints(kind).keys()
    assert fields.keys() | body.keys() == typed - IN_HEADERS


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_ask_for_nothing_pass(path: str, served: Served) -> None:
    """Each alone, and all at once."""
    _, body, fields = ROUTES[path]
    nulls = {name: None for name in fields if name not in body}
    assert ask(served, path, body | nulls)[0] == 200
    defaults: dict[str, Any] = {}
    for name, (values, _, _) in fields.items():
        if name not in body:
            assert ask(served, path, body | {name: None})[0] == 200, name
        for value in values:
            status, _, answer = ask(served, path, body | {name: value})
            assert status == 200, (name, value, answer)
            defaults[name] = value
    assert ask(served, path, body | defaults)[0] == 200


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_ask_for_something_are_honoured_or_named(path: str, served: Served) -> None:
    _, body, fields = ROUTES[path]
    for name, (_, honoured, refused) in fields.items():
        own = {
            key: value for key, value in body.items() if not (name == "max_completion_tokens" and key == "max_tokens")
        }
        for value in honoured:
            status, _, answer = ask(served, path, own | {name: value})
            assert status == 200, (name, value, answer)
        for value in refused:
            status, _, answer = ask(served, path, own | {name: value})
            assert status == (404 if name == "model" else 400), (name, value, answer)
            param = answer["error"]["param"]
            assert param.partition(".")[0] == name, (name, value, answer)
            assert answer["error"]["message"].startswith(f"{param}: ")
    status, _, answer = ask(served, path, body | {"tempature": None})
    assert (status, answer["error"]["param"]) == (400, "tempature")


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("is_parallel", [None, True, False])
def test_chats_with_an_empty_list_of_tools(choice: str | None, is_parallel: bool | None, served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "tools": [], "tool_choice": choice}
    assert ask(served, "/v1/chat/completions", body | {"parallel_tool_calls": is_parallel})[0] == 200


def codex_request(**more: Any) -> dict[str, Any]:
    """What Codex sends, in every request."""
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}
    body: dict[str, Any] = {"model": "recall", "instructions": "", "input": [message], "tools": [], "stream": True}
    body |= {"tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "store": False, "include": []}
    return body | {"prompt_cache_key": "a", "client_metadata": {"a": "b"}} | more


def test_requests_of_codex(served: Served) -> None:
    tool = FUNCTION | {"strict": False, "description": "Looks."}
    output = {"type": "function_call_output", "call_id": "a"}
    call = {"type": "function_call", "id": None, "name": "look", "arguments": "{}", "call_id": "a"}
    parts = [{"type": kind, "text": "wren: kite;"} for kind in ("input_text", "output_text", "text")]
    reasoning = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    first = codex_request()["input"]
    for more in (
        {},
        {"tools": [tool]},
        {"reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"text": {"verbosity": "medium"}},
        {"input": [*first, reasoning, call, output | {"output": parts}], "tools": [tool]},
        {"input": [*first, reasoning, call, output | {"output": "wren: kite;"}], "tools": [tool]},
    ):
        status, _, events = ask(served, "/v1/responses", codex_request(**more))
        assert status == 200, events
        assert "response.completed" in events or "response.incomplete" in events


def test_requests_of_claude_code(served: Served) -> None:
    cached = {"cache_control": EPHEMERAL}
    body: dict[str, Any] = {"model": "recall", "max_tokens": 8, "temperature": 1, "stream": True}
    body["system"] = [{"type": "text", "text": "otter: brass lantern;", **cached}]
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "otter:", **cached}]}]
    body["tools"] = [TOOL | {"description": "Looks."} | cached]
    body |= {"metadata": {"user_id": "a"}, "context_management": KEEP_ALL, "output_config": {"effort": "medium"}}
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31999}, {"type": "disabled"}):
        status, _, events = ask(served, "/v1/messages?beta=true", body | {"thinking": thinking})
        assert status == 200, events
        assert "message_stop" in events
    counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
    assert ask(served, "/v1/messages/count_tokens?beta=true", counted | {"thinking": thinking})[0] == 200


def test_prompts_that_are_to_stay_cached_have_a_priority(served: Served) -> None:
    """Those of OpenAI's clients by an argument, those of Anthropic's by a mark anywhere in the prompt."""
    manager = served.engine.executor.kv_manager
    long = "otter: brass lantern; " * 8
    cached = {"cache_control": EPHEMERAL | {"ttl": "1h"}}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"prompt_cache_retention": "24h", "messages": [{"role": "user", "content": long}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": long, **cached}]}]},
        ],
        "/v1/responses": [
            {"prompt_cache_options": {"ttl": "30m"}, "input": long},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": long, **cached}]}]},
        ],
        "/v1/messages": [
            {"system": [{"type": "text", "text": long, **cached}], "messages": MESSAGES},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": long, **cached}]}]},
        ],
    }
    for path, each in bodies.items():
        for body in each:
            manager.clear_prefix_cache()
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            assert ask(served, path, {limit: 4} | body)[0] == 200
            assert manager.stats().retained_blocks > 0, (path, body)


QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ message.thinking }}"
GPT_OSS = "{% if not reasoning_effort %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
DEEPSEEK = "{% if not thinking is defined %}{%- set thinking = false %}{% endif %}{{ 'enable_thinking' }}"
SEED = "{% if thinking_budget == 0 %}{{ 'verbosity' ~ messages[0]['thinking'] }}{% endif %}{% set verbosity = 1 %}"
NAMES = {"reasoning_effort", "enable_thinking", "thinking", "thinking_budget", "verbosity"}


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (QWEN, {"enable_thinking"}),
        (GPT_OSS, {"reasoning_effort"}),
        (DEEPSEEK, {"thinking"}),
        (SEED, {"thinking_budget"}),
        ("thinking {{ verbosity | trim }}", {"verbosity"}),
        ("{% if thinking == true and verbosity=='low' %}", {"thinking", "verbosity"}),
        ("{{ 'a", set()),
        (r"{{ 'it\'s' ~ verbosity ~ 'thinking' }}", {"verbosity"}),
    ],
)
def test_variables_of_templates(template: str, known: set[str]) -> None:
    templates = ChatTemplate({"default": template, "tool_use": "{{ documents }}"}, {}, "here")
    assert templates.variables(has_tools=False) & NAMES == known
    assert templates.variables(has_tools=True) == {"documents"}
    assert ChatTemplate({"default": template}, {}, "here").variables(has_tools=True) & NAMES == known


@pytest.mark.parametrize("choice", [None, "none"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_wishes_are_for_the_template_that_is_rendered(
    path: str, choice: str | None, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one for tools, unless the request has none or may not call."""
    tongue = served.service.tongue._replace(variables=frozenset(), tool_variables=frozenset({"reasoning_effort"}))
    monkeypatch.setattr(served.service, "tongue", tongue)
    wish: dict[str, Any] = {"reasoning_effort": "high"}
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]
    if path == "/v1/responses":
        wish, tools = {"reasoning": {"effort": "high"}}, [FUNCTION]
    body = ROUTES[path][1] | wish
    assert ask(served, path, body)[0] == 400
    status, _, answer = ask(served, path, body | {"tools": tools, "tool_choice": choice})
    assert status == (400 if choice == "none" else 200), answer


@pytest.mark.parametrize(
    ("path", "wish", "known", "expected"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, {"reasoning_effort"}, {"reasoning_effort": "high"}),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, {"enable_thinking"}, {"enable_thinking": True}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, {"thinking"}, {"thinking": False}),
        ("/v1/chat/completions", {"verbosity": "low"}, {"verbosity"}, {"verbosity": "low"}),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking"},
            {"enable_thinking": False},
        ),
        ("/v1/responses", {"reasoning": {"effort": "max"}}, {"reasoning_effort"}, {"reasoning_effort": "max"}),
        ("/v1/responses", {"text": {"verbosity": "high"}}, {"verbosity"}, {"verbosity": "high"}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, {"enable_thinking"}, {"enable_thinking": False}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, {"thinking_budget"}, {"thinking_budget": 0}),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, {"thinking"}, {"thinking": True}),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 512}},
            {"thinking_budget", "enable_thinking"},
            {"thinking_budget": 512, "enable_thinking": True},
        ),
        ("/v1/messages", {"output_config": {"effort": "max"}}, {"reasoning_effort"}, {"reasoning_effort": "max"}),
        (
            "/v1/messages/count_tokens",
            {"thinking": {"type": "disabled"}},
            {"enable_thinking"},
            {"enable_thinking": False},
        ),
    ],
)
def test_wishes_reach_templates_that_know_them(
    path: str,
    wish: dict[str, Any],
    known: set[str],
    expected: dict[str, Any],
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached: list[dict[str, Any]] = []
    encode_chat = Service.encode_chat

    async def watched(self: Service, messages: Any, variables: Any, size: int, **options: Any) -> Any:
        reached.append(dict(variables))
        return await encode_chat(self, messages, variables, size, **options)

    monkeypatch.setattr(Service, "encode_chat", watched)
    monkeypatch.setattr(served.service, "tongue", served.service.tongue._replace(variables=frozenset(known)))
    status, _, answer = ask(served, path, ROUTES[path][1] | wish)
    assert status == 200, answer
    assert {name: value for name, value in reached[0].items() if name in NAMES} == expected


def test_reasoning_that_cannot_be_turned_off() -> None:
    always = TemplateWishes(frozenset(), can_reason=True)
    for call in (lambda: always.effort("none", "a.b"), lambda: always.thinking(False, 0, "a.b")):
        with pytest.raises(Exception, match=r"^a\.b: "):
            call()
    assert always.thinking(True, 512, "a") == always.effort("medium", "a") == always.verbosity(None, "a") == {}


def test_reasoning_comes_back_to_clients_that_drop_its_content(talking: Served) -> None:
    """As Codex does, which returns `encrypted_content`; another server's is left out."""
    body = codex_request(stream=False, temperature=0, include=["reasoning.encrypted_content"], tools=[FUNCTION])
    reasoning = ask(talking, "/v1/responses", body)[2]["output"][0]
    assert base64.b64decode(reasoning["encrypted_content"]).decode() == reasoning["content"][0]["text"] == "Hm."
    assert ask(talking, "/v1/responses", body | {"include": []})[2]["output"][0]["encrypted_content"] is None
    reached: list[Any] = []
    tokenizer = talking.service.tokenizer
    encode_chat = tokenizer.encode_chat
    tokenizer.encode_chat = lambda messages, **options: (  # type: ignore[method-assign]
        reached.append(messages) or encode_chat(messages, **options)
    )
    for encrypted, text in ((reasoning["encrypted_content"], "Hm."), ("gAAA_-", ""), ("/////w==", "")):
        returned = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": encrypted}
        answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
        assert (
            ask(talking, "/v1/responses", body | {"input": [*body["input"], returned, answer, *body["input"]]})[0]
            == 200
        )
        assert reached[-1][1].get("reasoning", "") == text


def test_thinking_that_is_not_shown(talking: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    for display, text in (("omitted", ""), ("summarized", "Hm.")):
        content = ask(talking, "/v1/messages", body | {"thinking": {"type": "adaptive", "display": display}})[2][
            "content"
        ]
        assert (content[0]["type"], content[0]["thinking"]) == ("thinking", text)
        assert content[1]["text"].startswith("Yes.")


@pytest.mark.thorough
def test_the_format_of_messages(untrained: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60}
    body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(untrained, "/v1/messages", body)[2]
    assert answer["content"][0]["text"].replace(" ", "") == '{"a":1}'
