"""Special tokens in texts: a chat template may write them, a user's text may not."""

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
    """The place of a special token in a text."""

    begin: int
    end: int
    token_id: int


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encode a text as `Tokenizer.encode` does, which holds Python's lock for seconds if the text is long."""
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


class CharacterEscapes:
    """A reversible map from special tokens' characters in users' texts to private characters.

    In a conversation rendered with escaped texts, only the template's special tokens remain. Every escaped character
    can be restored, even if the template trims, splits or joins texts.
    """

    def __init__(self, pattern: re.Pattern[str], taken: Iterable[str], spared: Iterable[str] = ()) -> None:
        """pattern: matches characters to escape; matches of its group `kept` stay. taken: characters already in use.
        spared: texts that are not escaped."""
        self._pattern = pattern
        self._spared = frozenset(spared)
        self._stand_ins: dict[str, str] = {}
        self._taken = set(taken)
        self._next_free = 0xF0000  # code of the next private character

    def escape(self, value: Any) -> Any:
        """Return a JSON value with the characters of all its texts escaped."""
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
        """Return the text with the original characters, one for one, so that offsets stay."""
        return text.translate({ord(stand_in): char for char, stand_in in self._stand_ins.items()})

    def undo_json(self, text: str) -> str:
        """Return the text with private characters for those that a template wrote as ASCII JSON, two escapes each."""
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
    """Finds a tokenizer's special tokens in texts, and encodes texts without them."""

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
        # Token for unknown text: the model's own, or the result of encoding the last private character, which is in no
        # vocabulary. Unigram does not name its own, and a normalizer may drop the character.
        self._unknown: set[int | None] = set(encoded(tokenizer, "\U0010fffd").ids)
        if (unknown := getattr(tokenizer.model, "unk_token", None)) is not None:
            self._unknown.add(tokenizer.token_to_id(unknown))

    def found(self, text: str, encoding: Encoding) -> list[Span]:
        """Return the special tokens that the text itself became, except the one for unknown text."""
        ids = encoding.ids
        if self._contents.keys().isdisjoint(ids):
            return []
        is_around, spans = encoding.special_tokens_mask, []
        offsets: list[tuple[int, int]] = []
        for index, token_id in enumerate(ids):
            if token_id not in self._contents or is_around[index]:
                continue
            span = encoding.token_to_chars(index)
            if span is None:  # of some processors; `offsets` takes a tuple for each token, 0.1 s of a million
                offsets = offsets or encoding.offsets
                span = offsets[index]
            begin, end = span
            if token_id not in self._unknown or text[begin:end].strip() == self._contents[token_id].strip():
                spans.append(Span(begin, end, token_id))
        return spans

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text as plain text, without special tokens in it or around it.

        Raises:
            InvalidInputError: it holds a special token of one character that is also in the model's vocabulary.
        """
        encoding = encoded(self._strict, text)
        spans = self.found(text, encoding)
        if not spans:
            return list(encoding.ids)
        # The model's own vocabulary holds them too, as Unigram's often does: encode their parts.
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
        """Return token ids of a rendered conversation; special tokens count if the template wrote them, not users.

        If users' texts hold none, the common case, these are the ids of `encoding`, which is of the complete text.

        Args:
            values: the users' texts, a JSON value.
            render: renders the conversation with a function applied to the users' texts.
            literals: texts that the template may search for in them.
        """
        spans = self.found(text, encoding)
        if not spans:
            return list(encoding.ids)
        characters = _characters(json.dumps(values, ensure_ascii=False))
        characters.update(map(chr, range(32)))  # which JSON escapes
        literals = list(literals)
        # Special tokens made of word characters: escape single letters if the template does not mind.
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
        # A template that tests such characters may have written another text.
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
        """The same tokenizer, but special tokens in a text are plain text. Made when a text first holds one."""
        from tokenizers import Tokenizer

        strict = Tokenizer.from_str(self._tokenizer.to_str())
        strict.encode_special_tokens = True
        return strict

    def _pattern(self, characters: Iterable[str], literals: Iterable[str], letters: set[str]) -> re.Pattern[str]:
        """Return the pattern of characters to escape: each character of a special token except letters, digits,
        underscores and spaces, because texts may be joined to one; special tokens of word characters only, as a whole;
        and `letters`. Texts that templates search for, such as `</think>`, are kept unless they could be part of a
        special token.
        """
        contents = self._contents.values()
        signs, words = set(letters), set[str]()
        for content in contents:
            signs_of_content = set(filter(_is_sign, content))
            signs |= signs_of_content
            if content.strip() and not signs_of_content:
                words.add(content.strip())
        if self._normalizes and (normalizer := self._tokenizer.normalizer) is not None:
            # Characters that the tokenizer normalizes to one of these.
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
    """Return the characters of a text. `set(text)` holds Python's lock for 0.1 s if there are 4 million."""
    characters: set[str] = set()
    for begin in range(0, len(text), _SLICE):
        characters.update(text[begin : begin + _SLICE])
    return characters


def _touch(text: str, special: str) -> bool:
    """Return whether one text contains the other, or an end of one is a beginning of the other."""
    if text in special or special in text:
        return True
    ends = range(1, min(len(text), len(special)))
    return any(text[-size:] == special[:size] or text[:size] == special[-size:] for size in ends)


def _is_sign(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char == "_")
