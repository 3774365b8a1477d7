"""Special tokens in texts, which only a chat template may write, not a user's text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.errors import InvalidInputError, PagedError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_SLICE = 1 << 16


class Span(NamedTuple):
    """Position of a special token in a text."""

    begin: int
    end: int
    token_id: int


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encode a text like `Tokenizer.encode`, but without holding Python's lock."""
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


class CharacterEscapes:
    """Reversible map from characters of special tokens in users' texts to private characters.

    In a conversation rendered with escaped texts, only the template's special tokens remain. Every escaped character
    can be restored, even if the template trims, splits or joins texts.
    """

    def __init__(self, pattern: re.Pattern[str], taken: Iterable[str], spared: Iterable[str] = ()) -> None:
        """pattern: matches what to escape, except its group `kept`. taken: used characters. spared: unescaped texts."""
        self._pattern = pattern
        self._spared = frozenset(spared)
        self._stand_ins: dict[str, str] = {}
        self._taken = set(taken)
        self._next_free = 0xF0000  # code of the next private character

    def escape(self, value: Any) -> Any:
        """Return a copy of a JSON value with all its texts escaped."""
        if isinstance(value, str):
            if value in self._spared:
                return value
            return self._pattern.sub(self._stand_in, value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Restore the original characters one for one, so that offsets stay valid."""
        return text.translate({ord(stand_in): char for char, stand_in in self._stand_ins.items()})

    def undo_json(self, text: str) -> str:
        """Restore private characters that a template wrote as ASCII JSON, each as two escapes."""
        for stand_in in self._stand_ins.values():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def _stand_in(self, match: re.Match[str]) -> str:
        if match["kept"] is not None:
            return str(match[0])
        char: str = match[0][0]
        if char not in self._stand_ins:
            while chr(self._next_free) in self._taken:
                self._next_free += 1
            self._stand_ins[char] = chr(self._next_free)
            self._next_free += 1
        return self._stand_ins[char] + str(match[0][1:])


class SpecialTokens:
    """Finds a tokenizer's special tokens in texts, and encodes texts without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._contents: dict[int, str] = {}
        self._others: list[str] = []
        self._normalizes = False
        for token_id, token in added.items():
            if token.special:
                self._contents[token_id] = token.content
                self._normalizes = self._normalizes or token.normalized
            elif token.content:
                self._others.append(token.content)
        # Tokens for unknown text: `unk_token`, and the encoding of the last private character, which no vocabulary has.
        # Both are needed, because Unigram does not name its unknown token, and a normalizer may drop the character.
        self._unknown: set[int | None] = set(encoded(tokenizer, "\U0010fffd").ids)
        if (unknown := getattr(tokenizer.model, "unk_token", None)) is not None:
            self._unknown.add(tokenizer.token_to_id(unknown))

    def found(self, text: str, encoding: Encoding) -> list[Span]:
        """Return the special tokens in the text itself, except the token for unknown text."""
        ids = encoding.ids
        if self._contents.keys().isdisjoint(ids):
            return []
        is_around, spans = encoding.special_tokens_mask, []
        offsets: list[tuple[int, int]] = []
        for index, token_id in enumerate(ids):
            if token_id not in self._contents or is_around[index]:
                continue
            span = encoding.token_to_chars(index)
            if span is None:  # some processors give None; `offsets` is slow, so it is the fallback
                offsets = offsets or encoding.offsets
                span = offsets[index]
            begin, end = span
            if token_id not in self._unknown or text[begin:end].strip() == self._contents[token_id].strip():
                spans.append(Span(begin, end, token_id))
        return spans

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text as plain text, without special tokens in it or around it.

        Raises:
            InvalidInputError: the text has a special token of one character that is also in the model's vocabulary.
        """
        encoding = encoded(self._strict, text)
        spans = self.found(text, encoding)
        if not spans:
            return list(encoding.ids)
        # The model's own vocabulary also has the special tokens (often in Unigram), so encode their parts.
        ids, start = [], 0
        for begin, end, token_id in spans:
            if end - begin < 2:
                raise InvalidInputError(
                    f"text: {text[begin:end]!r} at {begin} is special token {token_id} and cannot be encoded as text"
                )
            ids += self.encode_plain(text[start : begin + 1])
            start = begin + 1
        return ids + self.encode_plain(text[start:])

    def encode_rendered(
        self,
        text: str,
        encoding: Encoding,
        values: Any,
        render: Callable[[Callable[[Any], Any]], str],
        literals: Iterable[str],
    ) -> list[int]:
        """Return token ids of a rendered conversation, with special tokens only where the template wrote them.

        In the common case, users' texts have no special tokens and the result is the ids of `encoding`, the encoding of
        the complete text.

        Args:
            values: the users' texts, a JSON value.
            render: renders the conversation with a function applied to the users' texts.
            literals: texts that the template may search for in users' texts.
        """
        spans = self.found(text, encoding)
        if not spans:
            return list(encoding.ids)
        characters = _characters(json.dumps(values, ensure_ascii=False))
        characters.update(map(chr, range(32)))  # characters that JSON escapes
        literals = list(literals)
        # A special token may consist of word characters. Then try first to escape its letters, and give up if this
        # changes what the template writes.
        word_letters: set[str] = set()
        for span in spans:
            content = self._contents[span.token_id]
            if not any(map(_is_sign, content)):
                word_letters.update(*content.split())
        choices: list[set[str]] = [set()]
        if word_letters:
            choices.insert(0, word_letters)
        for letters in choices:
            pattern = self._pattern(characters, literals, letters)
            escapes = CharacterEscapes(pattern, characters | _characters(text), literals if letters else ())
            if escapes.escape(values) == values:
                return list(encoding.ids)
            try:
                other = escapes.undo_json(render(escapes.escape))
            except PagedError:
                if not letters:
                    raise
                continue
            revealed = escapes.restore(other)
            if revealed == text:
                break
        if revealed == text and all(other[span.begin : span.end] == text[span.begin : span.end] for span in spans):
            return list(encoding.ids)
        # Check the special tokens again, because a template that tests the escaped characters may write another text.
        templates_own = self.found(other, encoded(self._tokenizer, other))
        if [span.token_id for span in templates_own] == [span.token_id for span in spans]:
            return list(encoding.ids)
        ids, start = [], 0
        for begin, end, token_id in templates_own:
            ids += [*self.encode_plain(revealed[start:begin]), token_id]
            start = end
        return ids + self.encode_plain(revealed[start:])

    @cached_property
    def _strict(self) -> Tokenizer:
        """The same tokenizer, with special tokens as plain text; made when first needed."""
        from tokenizers import Tokenizer

        strict = Tokenizer.from_str(self._tokenizer.to_str())
        strict.encode_special_tokens = True
        return strict

    def _pattern(self, characters: Iterable[str], literals: Iterable[str], letters: set[str]) -> re.Pattern[str]:
        """Return the pattern of characters to escape.

        It matches every character of a special token except letters, digits, underscores and spaces, because joined
        texts may form a special token. It also matches special tokens of word characters as a whole, and `letters`.
        Texts that templates search for, such as `</think>`, are kept unless they could be part of a special token.
        """
        contents = self._contents.values()
        signs, words = set(letters), set[str]()
        for content in contents:
            signs_of_content = set(filter(_is_sign, content))
            signs |= signs_of_content
            if content.strip() and not signs_of_content:
                words.add(content.strip())
        if self._normalizes and (normalizer := self._tokenizer.normalizer) is not None:
            # Characters that the tokenizer normalises to a character of a special token.
            same = {char for char in characters if not signs.isdisjoint(normalizer.normalize_str(char))}
            signs |= same
        spared = set()
        for text in (*self._others, *literals):
            if text and not any(_touch(text, content) for content in contents):
                spared.add(text)
        kept = "|".join(map(re.escape, _longest_first(spared))) or "(?!)"
        parts = [f"(?i:{re.escape(word)})" for word in _longest_first(words)]
        if signs:
            class_of_signs = "".join(map(re.escape, sorted(signs)))
            parts.append(f"[{class_of_signs}]")
        return re.compile(f"(?P<kept>{kept})|{'|'.join(parts) or '(?!)'}")


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _characters(text: str) -> set[str]:
    """Return the distinct characters of a text in parts, because `set(text)` holds Python's lock for long."""
    characters: set[str] = set()
    for begin in range(0, len(text), _SLICE):
        characters.update(text[begin : begin + _SLICE])
    return characters


def _touch(text: str, special: str) -> bool:
    """Return whether one text contains the other, or the end of one is a beginning of the other."""
    if text in special or special in text:
        return True
    ends = range(1, min(len(text), len(special)))
    return any(text[-size:] == special[:size] or text[:size] == special[-size:] for size in ends)


def _is_sign(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char == "_")
