"""A checkpoint's tokenizer: text to token ids and back, conversations to prompts, and which tokens end an answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import CheckpointError, UnsupportedError
from paged.executors.chat_template import ChatTemplate, Message
from paged.models.end_tokens import read_eos_token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatTokenizer:
    """tokenizer.json, the chat template and the end tokens of one checkpoint.

    An Engine takes it as its tokenizer. eos_token_ids: tokens that end an answer. tokenizer: that of `tokenizers`.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, eos_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> ChatTokenizer:
        """Read a folder in Hugging Face layout; all but tokenizer.json may be missing.

        Raises:
            CheckpointError: there is no tokenizer.json, or a file is malformed.
            UnsupportedError: the tokenizers package is not installed.
        """
        folder = Path(path)
        template = ChatTemplate.read(folder)
        return cls(_read_tokenizer(folder / "tokenizer.json"), template, read_eos_token_ids(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` and `encode_chat` can do without tools."""
        return "default" in self.template.templates

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids)))

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation as text; options and errors as in `ChatTemplate.render`."""
        return self.template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of the rendered conversation, which holds its special tokens already; else as `render`."""
        return list(self.tokenizer.encode(self.render(messages, **options), add_special_tokens=False).ids)


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError("texts need the tokenizers package: pip install 'paged[cli]'") from error
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more special
        raise CheckpointError(f"{file}: no tokenizer ({error})") from error
