"""The text that a model was trained to read a conversation as: the Jinja template of its checkpoint, rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.models.hf_config import HfConfig

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """A checkpoint's templates by name, `default` and perhaps `tool_use`, and the special tokens that they may write.

    Templates come from whoever made the checkpoint: they run in Jinja's sandbox, on copies of plain JSON values.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        self.templates = dict(templates)
        self._special_tokens, self._source = dict(special_tokens), source

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """From chat_template.jinja, with others in additional_chat_templates; else from tokenizer_config.json.

        Raises:
            CheckpointError: a file is unreadable, or a template in it is no text.
        """
        file = folder / "tokenizer_config.json"
        hf = HfConfig.read(folder, file.name) if file.is_file() else HfConfig({}, str(file))
        paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            paths["default"] = folder / "chat_template.jinja"
        templates = {name: _text_of(path) for name, path in paths.items()} or _templates_within(hf)
        return cls(templates, _special_tokens(hf), str(folder))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, special tokens included.

        Args:
            messages: what was said, each with a `role` and, as the template reads them, `content`, `tool_calls` and so
                on; an entry that is None counts as absent.
            add_generation_prompt: end with what an answer begins with.
            tools: JSON schemas of functions; with them the template named `tool_use` is taken where there is one.
            variables: further ones that the template reads, such as `enable_thinking`; special tokens can be replaced.

        Raises:
            InvalidInputError: the checkpoint has no template, the template refuses the messages, or they are no JSON.
            CheckpointError: the template does not parse.
            UnsupportedError: jinja2 is not installed.
        """
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise InvalidInputError(f"{self._source}: no chat template (chat_template.jinja, tokenizer_config.json)")
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidInputError(f"messages: {messages!r}, expected at least one, each a mapping")
        template = self._compiled(name)
        values = {**self._special_tokens, "documents": None, **variables, "messages": messages, "tools": tools}
        try:
            # Through JSON, so that a template meets no object with methods of its own.
            values = json.loads(json.dumps(values))
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"messages: {error}, expected JSON values") from error
        values["messages"] = [{k: v for k, v in message.items() if v is not None} for message in values["messages"]]
        try:
            return template.render(values, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template may raise whatever an expression can
            raise InvalidInputError(f"messages: the chat template of {self._source} refuses them: {error}") from error

    def _compiled(self, name: str) -> Template:
        try:
            import jinja2
        except ImportError as error:
            raise UnsupportedError("chat templates need the jinja2 package: pip install 'paged[cli]'") from error
        try:
            return _compile(self.templates[name])
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{self._source}: chat template {name!r}, line {error.lineno}: {error.message}"
            ) from error


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """With what templates count on, in the sandbox that transformers takes too."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what is trained on: here nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Jinja's own escapes what HTML would take for markup."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: unreadable ({error})") from error


def _templates_within(hf: HfConfig) -> dict[str, str]:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if not isinstance(hf.values.get("chat_template"), list):
        template = hf.text("chat_template", "")
        return {"default": template} if template else {}
    named = [HfConfig(entry, hf.source) for entry in hf.items("chat_template", dict)]
    return {entry.text("name"): entry.text("template") for entry in named}


def _special_tokens(hf: HfConfig) -> dict[str, str]:
    """bos_token, eos_token and so on, each a text or an object with the text as its content."""
    tokens = {key: value for key, value in hf.values.items() if key.endswith("_token")}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in tokens.items() if isinstance(value, str)}
