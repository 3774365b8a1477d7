"""Errors that operations raise; `paged.errors` adds the rest of the family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class PagedError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidInputError(PagedError, ValueError):
    """An argument has the wrong shape, dtype, device or value; nothing was changed."""


class UnsupportedError(PagedError, NotImplementedError):
    """The request is valid, but this build, model or device cannot serve it."""


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Rename arguments in errors raised inside to the caller's, as `seq_lens="cache_seqlens"`.

    For functions that pass their arguments on under other names. Behind the colon, words without an underscore, such as
    "key", stay as they are.
    """
    try:
        yield
    except (InvalidInputError, UnsupportedError) as error:
        head, colon, message = str(error).partition(":")

        def renamed(word: re.Match[str]) -> str:
            return names.get(word[0], word[0])

        if colon:
            head = re.sub(r"\w+", renamed, head)
        message = re.sub(r"\w+_\w+", renamed, message)
        raise type(error)(head + colon + message) from error
