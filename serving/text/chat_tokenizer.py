"""A checkpoint's tokenizer: text to token ids and back, conversations to prompts, end tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.executors.text.detokenizer import Message
from paged.folder_path import as_folder
from paged.models.loading.hf_config import read_eos_token_ids
from paged.models.loading.tokenizer_file import named, read_tokenizer
from paged.serving.text.chat_template import ChatTemplate
from paged.serving.text.special_tokens import SpecialTokens, encoded

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

T = TypeVar("T")
# Texts up to this length in characters are encoded before their length is checked, because a tokenizer may drop spaces.
_SHORT = 1 << 16
_LONG_DECODING = 4096  # number of tokens whose decoding takes a millisecond


class ChatTokenizer:
    """Tokenizer, chat template and end tokens of a checkpoint; pass it to an `Engine` as its tokenizer.

    Attributes:
        tokenizer: the `tokenizers.Tokenizer`.
        template: the chat template.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, eos_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> ChatTokenizer:
        """Read a folder in Hugging Face layout; only tokenizer.json is required.

        Raises:
            CheckpointError: tokenizer.json is missing, or a file is unreadable or malformed.
            InvalidInputError: `path` is not a path.
            UnsupportedError: the tokenizers package is not installed.
        """
        folder = as_folder("path", path)
        template = ChatTemplate.read(folder)
        return cls(read_tokenizer(folder / "tokenizer.json"), template, read_eos_token_ids(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for `render` and `encode_chat` without tools."""
        return "default" in self.template.templates

    def encode(self, text: str, *, parse_special: bool = False, longest: int | None = None) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds around it.

        Other threads can run meanwhile.

        Args:
            parse_special: whether special tokens written in the text, such as the end of a turn, become special tokens.
                Otherwise they are plain text.
            longest: maximum number of tokens, or None.

        Raises:
            InvalidInputError: the text is not a str or has a lone surrogate, or the tokenizer fails.
            SequenceTooLongError: the text has more than `longest` tokens, or more characters than `longest` tokens can
                have.
        """
        encoding = self._encoded(text, add_special_tokens=True, longest=longest)
        if parse_special or not self._special.found(text, encoding):
            return list(encoding.ids)
        ids, mask = encoding.ids, encoding.special_tokens_mask  # the mask is 1 for tokens added around the text
        before, after = mask.index(0), len(mask) - mask[::-1].index(0)
        return [*ids[:before], *named(lambda: self._special.encode_plain(text), "text"), *ids[after:]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises:
            InvalidInputError: `token_ids` are not token ids, or the tokenizer fails.
        """
        return named(lambda: self._decoded(list(token_ids)), "token_ids")

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Render the conversation as text; for options and errors see `ChatTemplate.render`."""
        return self.template.render(messages, **options)

    def encode_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        parse_special: bool = False,
        expand: Callable[[str], str] = str,
        longest: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of the rendered conversation; for options and errors see `ChatTemplate.render`.

        The template writes the special tokens, so none are added around the text.

        Args:
            parse_special: whether special tokens written in messages, tools and documents become special tokens.
                Otherwise only special tokens of the template do.
            expand: changes the rendered text, for example to repeat the placeholder of an image.
            longest: see `encode`.
        """
        text = expand(self.render(messages, **options))
        encoding = self._encoded(text, add_special_tokens=False, longest=longest)
        if parse_special:
            return list(encoding.ids)
        names: list[str] = []
        texts: list[Any] = [list(messages)]
        for name in ("tools", "documents"):
            if options.get(name) is not None:
                names.append(name)
                texts.append(options[name])
        values = json.loads(json.dumps(texts))  # plain copies, like the template's

        def render(change: Callable[[Any], Any]) -> str:
            changed = change(values)
            changed_options = options | dict(zip(names, changed[1:], strict=True))
            return expand(self.render(changed[0], **changed_options))

        literals = self.template.literals()
        return named(lambda: self._special.encode_rendered(text, encoding, values, render, literals), "messages")

    def _encoded(self, text: str, *, add_special_tokens: bool, longest: int | None) -> Encoding:
        if not isinstance(text, str):
            raise InvalidInputError(f"text: {type(text).__name__}, expected str")
        if not text.isascii() and (half := re.search("[\ud800-\udfff]", text)) is not None:
            raise InvalidInputError(f"text: {half[0]!r} at {half.start()} is half of a surrogate pair, expected both")
        if longest is not None and len(text) > max(_SHORT, longest * self._longest_token):
            raise SequenceTooLongError(f"text: {len(text)} characters, expected at most {longest} tokens")
        encoding = named(lambda: encoded(self.tokenizer, text, add_special_tokens=add_special_tokens), "text")
        if longest is not None and len(encoding) > longest:
            raise SequenceTooLongError(f"text: {len(encoding)} tokens, expected at most {longest}")
        return encoding

    def _decoded(self, ids: list[int]) -> str:
        if len(ids) < _LONG_DECODING:
            return str(self.tokenizer.decode(ids))
        return str(self.tokenizer.decode_batch([ids])[0])  # decode_batch lets other threads run

    @cached_property
    def _longest_token(self) -> int:
        """Largest number of text characters of a token; a vocabulary character is a text character or a byte."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _special(self) -> SpecialTokens:
        return named(lambda: SpecialTokens(self.tokenizer), "text")
