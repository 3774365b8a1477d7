"""Text from files and users made fit to be shown: what would steer a terminal, or is no XML, appears as its escape."""

from __future__ import annotations

from unicodedata import category

# Joiners shape scripts and emoji and steer nothing; all other format characters hide or reorder what is around them.
_HARMLESS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
# Control characters (ESC and C1 among them), format characters (bidirectional overrides), lone surrogates, line and
# paragraph separators.
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """The text with `\\x1b`, `\\u202e` and so on for all that steers a terminal, but for newlines and tabs."""
    return _escaped(text, but_for=_HARMLESS + "\n\t")


def one_line(value: object, limit: int = 2000) -> str:
    """As `printable`, on one line: newlines and tabs are escaped too, and what is longer than `limit` is cut in its
    middle. Of a value that is no text, what `str` says of it.
    """
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:  # of a class of the caller's
        text = f"<{type(value).__name__} that raises {type(error).__name__}>"
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[len(text) - limit // 2 :]}"
    return _escaped(text)


def xml_text(value: object, limit: int = 500) -> str:
    """As `one_line`, of characters that XML allows; markup is left for the writer to escape."""
    return _escaped(one_line(value, limit), also="\ufffe\uffff")


def _escaped(text: str, *, but_for: str = _HARMLESS, also: str = "") -> str:
    """Characters as Python writes them: \\n, \\x1b, \\u202e, \\U000e0001."""
    if text.isascii() and text.isprintable():
        return text
    is_escaped = {char: char in also or (char not in but_for and category(char) in _STEERING) for char in set(text)}
    return "".join(ascii(char)[1:-1] if is_escaped[char] else char for char in text)
