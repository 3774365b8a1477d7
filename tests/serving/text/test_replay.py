# ruff: noqa: RUF001 (markers of DeepSeek hold wide characters)
"""Conversations with calls as chat templates read them: ids, arguments, results, and reasoning under each name."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models

from paged import ChatTokenizer
from paged.serving.formats.tool_formats import TOOL_FORMATS, Tongue
from paged.serving.http.chat import as_template
from paged.serving.text.chat_template import ChatTemplate

# Templates that read messages as the published ones do.
KIMI = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<|tool_calls_section_begin|>{{ c.id }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% elif m.role == 'tool' %}## {{ m.tool_call_id }}{{ m.content }}"
    "{% endif %}{{ m.reasoning_content }}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}[TOOL_CALLS][ARGS]{{ c.id }}{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}"
    "{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<｜tool▁sep｜>' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.tool_calls %}<|tool_call>{% for r in m.tool_responses %}{{ r.name }}"
    "={{ r.response }};{% endfor %}{% endif %}{{ m.role }} {% endfor %}"
)
GPT_OSS = (
    "<|channel|><|message|>{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}{{ m.thinking }}!{{ m.tool_calls[0].function.name }}{% else %}"
    "{{ m.content }}{% endif %};{% endfor %}"
)
LLAMA = (
    '{# {"name": function name} This model only supports single tool-calls #}{% for m in messages %}{{ m.role }}'
    "{% for c in m.tool_calls or [] %} {{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
CASES = {
    "llama3": (LLAMA, 'user;assistant {"a": 1};tool;assistant {"INVALID_JSON": "{\\"b"};tool;'),
    "kimi_k2": (
        KIMI,
        '<|tool_calls_section_begin|>functions.look:0{"a": 1}'
        '<|tool_calls_section_begin|>functions.stop:1{"INVALID_JSON": "{\\"b"}Hm.'
        "## functions.look:0L## functions.stop:1S",
    ),
    "mistral": (MISTRAL, "[TOOL_CALLS][ARGS]000000000[TOOL_CALLS][ARGS]000000001000000000000000001"),
    "deepseek_v31": (DEEPSEEK, '<｜tool▁sep｜>{"a": 1}<｜tool▁sep｜>{"INVALID_JSON": "{\\"b"}'),
    "gemma4": (GEMMA, "user <|tool_call>look=L;stop=S;assistant "),
    "harmony": (GPT_OSS, "<|channel|><|message|>Q;Hm.\n\nI look.!look;L;!stop;S;"),
}


def tokenizer_of(template: str) -> ChatTokenizer:
    return ChatTokenizer(Tokenizer(models.BPE()), ChatTemplate({"default": template}, {}, "here"))


@pytest.mark.parametrize("name", CASES)
def test_calls_results_and_reasoning_are_rendered_as_the_template_reads_them(name: str) -> None:
    template, expected = CASES[name]
    tokenizer = tokenizer_of(template)
    tongue = Tongue.of(tokenizer)
    assert tongue.tools is TOOL_FORMATS[name]
    calls = [("c1", "look", '{"a": 1}'), ("c2", "stop", '{"b')]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": identity, "function": {"name": tool, "arguments": arguments}}
                for identity, tool, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "L"},
        {"role": "tool", "tool_call_id": "c2", "content": "S"},
    ]
    assert tokenizer.render(tongue.replayed(as_template(messages)), add_generation_prompt=False) == expected


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_format_is_chosen_by_what_the_template_or_the_tokenizer_holds(name: str) -> None:
    hints = TOOL_FORMATS[name].hints
    by_template = Tongue.of(tokenizer_of(" ".join(hints)))
    assert by_template.tools is TOOL_FORMATS[name]
    assert by_template.reasons[0].startswith(f"{name}: the chat template holds {hints[0]}")
    tokenizer = tokenizer_of("{{ messages[0].content }}")
    assert Tongue.of(tokenizer).tools is None
    tokenizer.tokenizer.add_special_tokens([*hints])
    assert Tongue.of(tokenizer).tools is TOOL_FORMATS[name]
