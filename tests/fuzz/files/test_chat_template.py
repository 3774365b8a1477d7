"""Any template: a text or a named error, in bounded time and memory; users' texts never become special tokens."""

import contextlib
import os
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import ChatTokenizer, CheckpointError, InvalidInputError
from paged.serving.text.chat_template import ChatTemplate
from tests.fuzz.children import call_in_child
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import VALUES, expressions, value

USER = {"role": "user", "content": "hello"}
# Each would take minutes, gigabytes, or the stack.
BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 2 ** (10 ** 10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 'a' | indent(10**9, true) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(9999) %}{% for j in range(99999) %}aa{% endfor %}{% endfor %}{% endset %}{{ x[0] }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}"
    "{% endfor %}{{ n.s == n.t }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for i in range(99999) %}{{ lipsum(n=9999) | length }}{% endfor %}",
    "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{{ " + "-" * 100000 + "1 }}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "a" * (2 << 20),
]
PIECES = expressions(r"""
    {% for m in messages %}; {% endfor %}; {{ m.content }}; {{ messages }}; {% if m %}; {% endif %}; {% macro f(x) %};
    {% endmacro %}; {{ f(1) }}; {{ 'a' * 10**9 }}; {% for i in range(99999) %}; {% set x =; {{; }}; %}; {#; a;
    {{ m | tojson }}; {{ raise_exception('no') }}; {% generation %}; {% endgeneration %}; {{ ''.__class__ }};
    {{ cycler() }}; {{ namespace() }}; {% break %}; {{ strftime_now('%Y') }}; {% include 'x' %}; {{ 1 / 0 }}
""") | st.sampled_from(["\n", "\x00"])


def render(template: str) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<bos>"}, "a folder").render([USER])


def render_several(templates: list[str]) -> list[str | None]:
    """What each gives, None for a named error."""
    found: list[str | None] = [None] * len(templates)
    for index, template in enumerate(templates):
        with contextlib.suppress(InvalidInputError, CheckpointError):
            found[index] = render(template)
    return found


@pytest.mark.parametrize("number", [
    pytest.param(number, marks=() if number in (15, 24) else pytest.mark.thorough)
    for number in range(len(BOMBS))
])  # fmt: skip
def test_templates_that_explode(number: int) -> None:
    outcome = call_in_child(render, BOMBS[number])
    assert 0 < len(outcome.error) < 3000


@pytest.mark.thorough
def test_the_process_of_a_bomb_is_replaced() -> None:
    """Those after it are rendered, from a forked process, too."""
    wanted = ["hello", None, "hello", None, "hello", "<bos>" * 1000]
    plain = "{{ messages[0].content }}"
    templates = [plain, "{{ 'a' * 10**9 }}", plain, BOMBS[8], plain, "{{ bos_token * 1000 }}"]
    assert call_in_child(render_several, templates).result == wanted
    assert render(plain) == "hello"
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        os.write(sender, render(plain).encode())
        os._exit(0)
    assert os.read(receiver, 100) == b"hello"
    os.waitpid(child, 0)
    assert render(plain) == "hello"


def test_long_conversations_are_no_bombs() -> None:
    content = "long \N{GREEK SMALL LETTER ALPHA}" * 200_000
    messages = [{"role": "user", "content": content}]
    assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "a folder").render(messages) == content


@fuzz(st.lists(PIECES, max_size=8).map("".join), examples=25, thorough=60)
def test_templates(case: Any) -> None:
    try:
        assert isinstance(render(case), str)
    except (InvalidInputError, CheckpointError):
        assert case != ""


@fuzz(VALUES, examples=20, thorough=60)
def test_messages(case: Any) -> None:
    template = ChatTemplate({"default": "{{ messages }}"}, {}, "a folder")
    for messages in (value(case), [value(case)], [{"role": "user", "content": value(case)}], [{"role": value(case)}]):
        with contextlib.suppress(InvalidInputError):
            template.render(messages)
    for options in ({"tools": value(case)}, {"date": value(case)}):
        with contextlib.suppress(InvalidInputError):
            template.render([USER], **options)
    assert template.render([USER]) == str([USER])


PARTS = "{% for m in messages %}<|start|>{{ m.role }}{% for p in m.content %}{{ p }}{% endfor %}<|end|>{% endfor %}"
SPECIAL_TEXTS = "<|end|> <|start|> <bos> <|e nd|> < |> </think> <b> a é \U000f0000".split()
CHATS = st.fixed_dictionaries({
    "template": st.sampled_from(["parts", "llama", "chatml", "gemma"]),
    "contents": st.lists(st.sampled_from([*SPECIAL_TEXTS, " ", "\n"]), max_size=6),
})  # fmt: skip


@fuzz(CHATS, examples=25, thorough=120)
def test_special_tokens_of_users(case: Any) -> None:
    """As many of them as for a plain text; and where the user's text holds none, the ids of the whole text."""
    from tests.serving.text import checkpoints  # imports transformers, which children need not

    tokenizer = checkpoints.tokenizer_of_bytes()
    template = PARTS if case["template"] == "parts" else getattr(checkpoints, case["template"].upper())
    ours = ChatTokenizer(tokenizer, ChatTemplate({"default": template}, {"bos_token": "<bos>"}, "a folder"))
    content: Any = case["contents"] if case["template"] == "parts" else "".join(case["contents"])

    def special(content: Any, **options: Any) -> list[int]:
        return [token for token in ours.encode_chat([{"role": "user", "content": content}], **options) if token >= 256]

    messages = [{"role": "user", "content": content}]
    assert special(content) == special("plain")
    whole = tokenizer.encode(ours.render(messages), add_special_tokens=False).ids
    assert ours.encode_chat(messages, parse_special=True) == whole
    if special(content, parse_special=True) == special("plain"):
        assert ours.encode_chat(messages) == whole
    assert tokenizer.decode(ours.encode_chat(messages), skip_special_tokens=False) == ours.render(messages)
    text = "".join(case["contents"])
    ids = ours.encode(text)
    assert [token for token in ids if token >= 256] == [tokenizer.token_to_id("<bos>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ours.encode(text, parse_special=True) == tokenizer.encode(text).ids
