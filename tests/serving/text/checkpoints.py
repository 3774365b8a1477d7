"""Folders with a tokenizer and a chat template, and conversations."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from paged import ChatTokenizer

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
_ARGUMENTS = {"town": "Zürich", "days": [1, 2.5, True]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": _ARGUMENTS}}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
# Templates with what they are for: messages, and further variables.
CONVERSATIONS: list[tuple[str, list[Any], dict[str, Any]]] = [
    (LLAMA, [SYSTEM, USER, ANSWER, USER], {}),
    (LLAMA, [USER], {"date": "2 May", "bos_token": "<|turn|>"}),
    (CHATML, [SYSTEM, USER, ANSWER, {"role": "comment", "content": "none"}, USER], {"enable_thinking": False}),
    (CHATML, [USER, CALL], {"enable_thinking": True}),
    (GEMMA, [SYSTEM, USER, ANSWER, USER], {}),
]


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


def save(folder: Path, chat_template: str | dict[str, str] | None) -> Any:
    """A checkpoint's tokenizer, as transformers writes and reads it."""
    from transformers import PreTrainedTokenizerFast

    options = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": chat_template}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_bytes(), **options)
    theirs.save_pretrained(folder)
    return theirs


def chat_tokenizer(folder: Path, chat_template: str | dict[str, str] | None) -> ChatTokenizer:
    """Ours, of a folder that transformers has written."""
    save(folder, chat_template)
    return ChatTokenizer.from_folder(folder)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | values))
