"""Chat templates: a checkpoint's Jinja templates, which render a conversation as the model's training text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.executors.text.detokenizer import Message
from paged.kernels.core.errors import shown
from paged.models.loading.checkpoint_files import is_there, read_text
from paged.models.loading.hf_config import HfConfig
from paged.serving.text.template_process import render_bounded
from paged.tools.printable import one_line

# Limits: characters of a template, and number of templates. The longest known template has 30,000 characters.
_LONGEST, _MOST_TEMPLATES = 1 << 20, 32
# Limit of the rendered characters: a number for the template's own text, plus a multiple of the conversation, whose
# JSON a template may indent.
_OWN_CHARACTERS, _GROWTH = 1 << 19, 16
_QUOTED = re.compile(r"""(['"])((?:(?!\1)[^\\\n])+)\1""")
# Begin and end of Jinja statements and expressions.
_OPENING, _CLOSING = re.compile(r"\{[%{]"), re.compile(r"[%}]\}")
# A string within Jinja code.
_STRING = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
# A name within Jinja code that is neither an attribute nor assigned.
_READ = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*=[^=])")


class ChatTemplate:
    """A checkpoint's templates by name (`default`, often `tool_use`), and the special tokens that they may write.

    Templates are untrusted code of checkpoints. They run in Jinja's sandbox, on copies of plain JSON values, in a
    process with limited time and memory (see `template_sandbox`).
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        self.templates = dict(templates)
        for name, text in self.templates.items():
            if len(text) > _LONGEST:
                raise CheckpointError(f"{source}: chat template {name!r} has more than {_LONGEST} characters")
        self._special_tokens, self._source = dict(special_tokens), source

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """Read chat_template.jinja and additional_chat_templates, else tokenizer_config.json.

        Raises:
            CheckpointError: a file is unreadable, or a template in it is not a str.
        """
        file = folder / "tokenizer_config.json"
        hf = HfConfig({}, str(file))
        if is_there(file):
            hf = HfConfig.read(folder, file.name)
        more = folder / "additional_chat_templates"
        try:
            paths = {path.stem: path for path in sorted(more.glob("*.jinja"))}
        except OSError as error:
            raise CheckpointError(f"{more}: unreadable ({error})") from error
        if is_there(folder / "chat_template.jinja"):
            paths["default"] = folder / "chat_template.jinja"
        if len(paths) > _MOST_TEMPLATES:
            raise CheckpointError(f"{folder}: {len(paths)} chat templates, expected {_MOST_TEMPLATES} at most")
        templates = {}
        for name, path in paths.items():
            templates[name] = read_text(path, 4 * _LONGEST)  # in bytes; a character has up to 4
        if not templates:
            templates = _templates_within(hf)
        return cls(templates, _special_tokens(hf), str(folder))

    def literals(self) -> set[str]:
        """Return every quoted string of the templates."""
        literals = set()
        for text in self.templates.values():
            for match in _QUOTED.finditer(text):
                literals.add(match[2])
        return literals

    def variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the variables that the request's template reads, perhaps with some of its local names."""
        names = set()
        text = self.templates.get(self._name(has_tools=has_tools), "")
        for part in _OPENING.split(text)[1:]:
            code = _CLOSING.split(part, maxsplit=1)[0]
            names.update(_READ.findall(_STRING.sub("''", code)))
        return frozenset(names)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render the conversation as text, special tokens included.

        Args:
            messages: mappings with a `role` and further entries for the template, such as `content` and `tool_calls`.
                An entry that is None counts as absent.
            add_generation_prompt: whether to end with the beginning of an answer.
            continue_final_message: whether to end after the text of the last message instead, so that the model
                continues it.
            tools: JSON schemas of functions. They select the template `tool_use`, if there is one.
            variables: further variables of the template, such as `enable_thinking`; they may replace special tokens.

            Raises:
                InvalidInputError: the checkpoint has no template, the template refuses the messages or exceeds its
                    limits, the values are not JSON, or the last message cannot be continued, because it is no text of
                    the assistant or the template does not write the text exactly once at the end.
                CheckpointError: the template does not parse.
                UnsupportedError: jinja2 is not installed, or this system has no fork.
                ProcessLostError: the system cannot start a process to render in, or has ended it.
        """
        name = self._name(has_tools=tools is not None)
        if name not in self.templates:
            raise InvalidInputError(f"{self._source}: no chat template (chat_template.jinja, tokenizer_config.json)")
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes) and len(messages)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidInputError(f"messages: {shown(messages)}, expected at least one, each a mapping")
        if find_spec("jinja2") is None:
            raise UnsupportedError("chat templates need the jinja2 package: pip install 'paged[cli]'")
        values = {**self._special_tokens, "documents": None, **variables, "messages": messages, "tools": tools}
        values["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            # Pass only JSON values, because a template must not see objects with methods.
            written = json.dumps(values)
            values = json.loads(written)
        except Exception as error:  # methods of values may raise anything
            raise InvalidInputError(f"messages: {one_line(error, 200)}, expected JSON values") from error
        mark = ""
        if continue_final_message:
            mark = f"Continue{secrets.token_hex(8)}Here"
            _append(f"{mark} ", values["messages"][-1])
        rendered = render_bounded(self.templates[name], values, _OWN_CHARACTERS + _GROWTH * len(written))
        if rendered.error is None and mark:
            before, *after_marks = rendered.text.split(mark)
            if len(after_marks) != 1:
                raise InvalidInputError("messages: the chat template does not write the last one so that it can go on")
            if not after_marks[0].startswith(" "):  # the template trims texts
                before = before.rstrip()
            return before
        if rendered.error is None:
            return rendered.text
        reason = one_line(rendered.error)
        if rendered.is_syntax:
            raise CheckpointError(f"{self._source}: chat template {name!r}, {reason}")
        raise InvalidInputError(f"messages: the chat template of {self._source} refuses them: {reason}")

    def _name(self, *, has_tools: bool) -> str:
        """Return the name of the template for a request."""
        if has_tools and "tool_use" in self.templates:
            return "tool_use"
        return "default"


def _append(more: str, message: dict[str, Any]) -> None:
    """Append text to an assistant's message.

    Raises:
        InvalidInputError: the message has another role, or does not end with text.
    """
    if message.get("role") != "assistant":
        role = shown(message.get("role"))
        raise InvalidInputError(f"messages: the last one has the role {role}, expected assistant to go on with it")
    content = message.get("content")
    if message.get("tool_calls"):
        raise InvalidInputError("messages: the last one has calls of tools, which no answer can go on with")
    if content is None or isinstance(content, str):
        message["content"] = (content or "") + more
        return
    part = content[-1] if isinstance(content, list) and content else None
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise InvalidInputError("messages: the last one ends with something other than text, expected text to go on")
    part["text"] += more


def _templates_within(hf: HfConfig) -> dict[str, str]:
    """Return the templates of tokenizer_config.json, which has one template or a list of named ones."""
    if not isinstance(hf.values.get("chat_template"), list):
        template = hf.text("chat_template", "")
        if not template:
            return {}
        return {"default": template}
    templates = {}
    for entry in hf.items("chat_template", dict):
        named = HfConfig(entry, hf.source)
        templates[named.text("name")] = named.text("template")
    return templates


def _special_tokens(hf: HfConfig) -> dict[str, str]:
    """Return bos_token, eos_token and so on; each is stored as a text or as an object with a `content`."""
    tokens = {}
    for key, value in hf.values.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return tokens
