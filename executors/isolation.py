"""Errors of one request, kept from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import ParamSpec, TypeVar

from paged.errors import PagedError
from paged.executors.model_executor import ExecutorShutDownError
from paged.kernels.common.scalars import shown

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger("paged")


def describe(error: BaseException) -> str:
    """Type and message, also of one whose message cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as other:
        raise_exit(other)
        return f"{type(error).__name__}: {shown(error)}"


def raise_exit(error: BaseException) -> None:
    """Raise again what is meant for the process: Ctrl-C, or an exit, which signals bring to the main thread alone.

    Anything else is of who was called, also where it is no `Exception`, as `asyncio.CancelledError` or the panics of
    tokenizers that are written in Rust.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
        raise error


def for_future(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call what a coroutine awaits. An error that no future can hold (StopIteration: the await would never end), or
    that would end the event loop or its task, arrives as a PagedError.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise PagedError(describe(error)) from error


def attempt(fail: Callable[[str], object], call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call what one request alone depends on; where it raises, `fail` is told why, and the result is None."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        raise_exit(error)
        fail(describe(error))
        return None


def quietly(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call, and log what it raises; that the executor was shut down is no news to what gives something back to it."""
    try:
        call(*args, **kwargs)
    except ExecutorShutDownError:
        pass
    except BaseException as error:
        raise_exit(error)
        _LOG.warning("%s: %s", getattr(call, "__qualname__", "a call"), describe(error))
