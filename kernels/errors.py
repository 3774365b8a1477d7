"""Errors that operations raise; `paged.errors` builds the rest of the family on them."""


class PagedError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidInputError(PagedError, ValueError):
    """An argument has the wrong shape, dtype, device or value; nothing was changed."""


class UnsupportedError(PagedError, NotImplementedError):
    """The request is well formed, but this build, model or device cannot serve it."""
