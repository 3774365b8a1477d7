"""Escaping of text from files and users for safe display: terminal controls, characters not in XML."""

from __future__ import annotations

from unicodedata import category

# Joiners shape scripts and emoji and are harmless. All other format characters can hide or reorder text.
_HARMLESS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
# Categories to escape: controls (ESC, C1), format characters (bidirectional overrides), lone surrogates, line and
# paragraph separators.
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """Escape terminal controls except newlines and tabs, for example as `\\x1b` or `\\u202e`."""
    return _escaped(text, but_for=_HARMLESS + "\n\t")


def one_line(value: object, limit: int = 2000) -> str:
    """Return `str(value)` on one line, with all controls escaped and the middle cut if it exceeds `limit`."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:  # a caller's class may raise anything
        text = f"<{type(value).__name__} that raises {type(error).__name__}>"
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[len(text) - limit // 2 :]}"
    return _escaped(text)


def xml_text(value: object, limit: int = 500) -> str:
    """Like `one_line`, but also escape characters that XML forbids; the writer must escape markup."""
    return _escaped(one_line(value, limit), also="\ufffe\uffff")


def _escaped(text: str, *, but_for: str = _HARMLESS, also: str = "") -> str:
    """Return characters as Python escapes: \\n, \\x1b, \\u202e, \\U000e0001."""
    if text.isascii() and text.isprintable():
        return text
    escapes: dict[int, str] = {}
    for char in set(text):
        if char in also or (char not in but_for and category(char) in _STEERING):
            escapes[ord(char)] = ascii(char)[1:-1]
    return text.translate(escapes)
