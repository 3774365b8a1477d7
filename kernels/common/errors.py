"""Errors that operations raise; `paged.errors` builds the rest of the family on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class PagedError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidInputError(PagedError, ValueError):
    """An argument has the wrong shape, dtype, device or value; nothing was changed."""


class UnsupportedError(PagedError, NotImplementedError):
    """The request is well formed, but this build, model or device cannot serve it."""


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Errors raised inside name the caller's own arguments, as `seq_lens="cache_seqlens"`.

    For functions that hand their arguments on to an operation under other names. Behind the colon a word without an
    underscore, such as "key", may be just that, and stays.
    """
    try:
        yield
    except (InvalidInputError, UnsupportedError) as error:
        head, colon, rest = str(error).partition(":")
        head = re.sub(r"\w+", lambda word: names.get(word[0], word[0]) if colon else word[0], head)
        rest = re.sub(r"\w+_\w+", lambda word: names.get(word[0], word[0]), rest)
        raise type(error)(head + colon + rest) from error
