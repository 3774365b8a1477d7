"""Conversations give the text and the token ids that transformers makes of them, for templates in several styles."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from paged import ChatTokenizer, CheckpointError, InvalidInputError, UnsupportedError
from paged.executors.command_line.cli import RECALL
from paged.executors.text.detokenizer import Detokenizer

SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>", "<|turn|>"]

# Headers around each role, the begin token before the first message, content stripped.
LLAMA = """{%- if not date is defined %}{%- set date = "1 May 2026" %}{%- endif %}
{%- for message in messages %}
    {%- set text = '<|start|>' + message['role'] + '<|turn|>\\n\\n' + message['content'] | trim + '<|end|>' %}
    {%- if loop.first %}{% set text = bos_token + date + text %}{% endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|turn|>\\n\\n' }}{%- endif %}
"""
# One block a message, tools as JSON in the system block, thoughts of earlier turns dropped.
CHATML = """{%- if tools %}
<|start|>system
{% for tool in tools %}
{{ tool | tojson }}
    {{- tool | tojson(indent=2) }}
{% endfor %}
<|end|>
{% endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == "comment" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}
<|start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson(sort_keys=true, separators=(',', ':')) }})
    {%- endfor %}<|end|>
    {%- endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}
<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}{{ ns.count }}{{ strftime_now('%Y') }}"""
# The system text joins the first user's, and roles must alternate.
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first, rest = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set first, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- first if loop.first else '' }}{{ message.content | trim }}{{ '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif %}"""

SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": " <b>Größe</b> & 'é'?\n"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n42 {{ bos_token }}", "tool_calls": None}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "Zürich", "days": [1, 2.5, True]}}}],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def tokenizer_of_bytes() -> Tokenizer:
    """Every byte is a token, special tokens are whole, and a text begins with <bos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bos = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return tokenizer


def save(folder: Path, chat_template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_bytes(), bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    )
    theirs.save_pretrained(folder)
    return theirs


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | values))


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (LLAMA, [SYSTEM, USER, ANSWER, USER], {}),
        (LLAMA, [USER], {"date": "2 May", "bos_token": "<|turn|>"}),
        (CHATML, [SYSTEM, USER, ANSWER, {"role": "comment", "content": "none"}, USER], {"enable_thinking": False}),
        (CHATML, [USER, CALL], {"enable_thinking": True}),
        (GEMMA, [SYSTEM, USER, ANSWER, USER], {}),
    ],
)
def test_same_text_and_ids_as_transformers(
    template: str, messages: list[Any], options: dict[str, Any], prompted: bool, tools: Any, tmp_path: Path
) -> None:
    theirs = save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.has_chat_template
    options = options | {"add_generation_prompt": prompted, "tools": tools}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render(messages, **options) == text
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.encode_chat(messages, **options) == ids
    assert ours.encode(text, parse_special=True) == theirs.encode(text) == [theirs.bos_token_id, *ids]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_generation_prompt_is_the_default(tmp_path: Path) -> None:
    save(tmp_path, GEMMA)
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.render([USER]) == ours.render([USER], add_generation_prompt=False) + "<|start|>model\n"


@pytest.mark.parametrize("form", ["jinja files", "one text", "named texts"])
def test_where_templates_are_found(form: str, tmp_path: Path) -> None:
    named = {"default": "plain {{ messages[0].content }}{{ eos_token }}", "tool_use": "tools {{ tools | length }}"}
    save(tmp_path, named)
    assert (tmp_path / "chat_template.jinja").is_file()
    if form != "jinja files":
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
        assert not ChatTokenizer.from_folder(tmp_path).has_chat_template
        chat_template: Any = [{"name": name, "template": text} for name, text in named.items()]
        edit(
            tmp_path / "tokenizer_config.json", chat_template=named["default"] if form == "one text" else chat_template
        )
    # As written before transformers 5.
    edit(tmp_path / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "<eos>"}, pad_token=None)
    ours, theirs = ChatTokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template([USER], tokenize=False, tools=tools)
        assert ours.render([USER], tools=tools) == expected
    assert ours.render([USER]) == f"plain {USER['content']}<eos>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "no chat template"),
        (GEMMA, [], r"messages: \[\], expected at least one"),
        (GEMMA, ["hello"], r"messages: \['hello'\], expected at least one, each a mapping"),
        (GEMMA, [{"role": "user", "content": Path()}], "not JSON serializable, expected JSON values"),
        (GEMMA, [USER, USER], "refuses them: roles must alternate user/assistant"),
        ("{{ messages[0].name + 1 }}", [USER], "refuses them: .*has no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", [USER], "refuses them: can only concatenate str"),
        # What the sandbox is for.
        ("{{ ''.__class__.__mro__ }}", [USER], "refuses them: .*unsafe"),
        ("{{ messages.append(1) }}", [USER], "refuses them: .*unsafe"),
        ("{% for i in range(999999) %}{% endfor %}", [USER], "refuses them: .*too big"),
    ],
)
def test_refusals(template: str | None, messages: list[Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    for run in (ours.render, ours.encode_chat):
        with pytest.raises(InvalidInputError, match=message):
            run(messages)
    assert ours.has_chat_template == (template is not None)


def test_malformed_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        ChatTokenizer.from_folder(tmp_path)
    save(tmp_path, "{% for %}")
    ours = ChatTokenizer.from_folder(tmp_path)
    ours.encode("a")
    with pytest.raises(CheckpointError, match="chat template 'default', line 1: "):
        ours.render([USER])
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (3, [{"name": "default"}]):
        edit(tmp_path / "tokenizer_config.json", chat_template=wrong)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: (chat_template = 3|template is missing)"):
            ChatTokenizer.from_folder(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=None)
    ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no tokenizer \("):
        ChatTokenizer.from_folder(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    save(tmp_path, None)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == ()
    edit(tmp_path / "config.json", eos_token_id=0)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (0,)
    edit(tmp_path / "generation_config.json", temperature=1)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (0,)
    edit(tmp_path / "generation_config.json", eos_token_id=[257, 259])
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (257, 259)
    for wrong in ("<eos>", [257, -1], True):
        edit(tmp_path / "generation_config.json", eos_token_id=wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = "):
            ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_missing_packages_are_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, GEMMA)
    assert ChatTokenizer.from_folder(tmp_path).render([USER])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=f"the {package} package: pip install"):
        ChatTokenizer.from_folder(tmp_path).render([USER])


def test_the_clock(tmp_path: Path) -> None:
    save(tmp_path, "{{ strftime_now('%d %B %Y') }}")
    before = datetime.now()
    text = ChatTokenizer.from_folder(tmp_path).render([USER])
    assert text in {moment.strftime("%d %B %Y") for moment in (before, datetime.now())}


def test_bundled_checkpoint_and_streaming() -> None:
    """As an Engine's tokenizer: a decoder of growing lists gets the text of the whole."""
    ours = ChatTokenizer.from_folder(RECALL)
    assert not ours.has_chat_template
    assert len(ours.eos_token_ids) == 1
    ids = ours.encode("a=1 b=2 ?a")
    reader = Detokenizer(ours)
    pieces = [reader.read(ids, end, is_last=end == len(ids)) for end in range(1, len(ids) + 1)]
    assert "".join(pieces) == ours.decode(ids)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content | trim }}<|end|>", "a<|end|>b"),
        ("{% for part in messages[0].content %}{{ part }}{% endfor %}<|end|>", ["<|e", "nd|>"]),
        ("{{ messages[0].content.replace('</think>', '') }}<|end|>", "<|e</think>nd|>"),
        ("{{ messages | tojson(ensure_ascii=true) }}<|end|>", "é<|end|>"),
    ],
)
def test_special_tokens_of_users_are_text(template: str, content: Any, tmp_path: Path) -> None:
    """The template's own count, wherever the user's come from and whatever the template does with them."""
    theirs = save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": content}]
    ids, end = ours.encode_chat(messages), theirs.convert_tokens_to_ids("<|end|>")
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert theirs.decode(ids) == ours.render(messages)
    assert ours.encode_chat(messages, parse_special=True) == theirs.apply_chat_template(messages, return_dict=False)
    assert ours.encode_chat(messages, parse_special=True).count(end) == 2


def test_special_tokens_of_the_models_own_vocabulary(tmp_path: Path) -> None:
    """Unigram finds them in plain text, too; what is unknown stays unknown."""
    pieces = [("<unk>", 0.0), ("a", -2.0), ("<", -3.0), ("s", -3.0), (">", -3.0), ("<s>", 0.0)]
    tokenizer = Tokenizer(Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.encode("a<s>a") == [1, 2, 3, 4, 1]
    assert ours.encode("a<s>a", parse_special=True) == [1, 5, 1]
    assert ours.encode("aéa") == ours.encode("aéa", parse_special=True) == [1, 0, 1]
