"""Helpers that keep errors of one request from other requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import ParamSpec, TypeVar

from paged.errors import PagedError, RankFailedError
from paged.executors.model_executor import ExecutorShutDownError
from paged.kernels.core.errors import shown

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger("paged")


def describe(error: BaseException) -> str:
    """Return the type and message of an error, even if the message cannot be read."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as message_error:
        raise_exit(message_error)
        return f"{type(error).__name__}: {shown(error)}"


def raise_exit(error: BaseException) -> None:
    """Re-raise errors meant for the process: Ctrl-C and SystemExit, which arrive in the main thread only.

    All other errors belong to the callee, even if they are no `Exception`, such as `asyncio.CancelledError` or a Rust
    panic.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
        raise error


def raise_fatal(error: BaseException) -> None:
    """Re-raise errors after which the executor cannot run any more, and errors that `raise_exit` re-raises."""
    if isinstance(error, ExecutorShutDownError | RankFailedError):
        raise error
    raise_exit(error)


def for_future(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function for a coroutine; convert errors that a future cannot hold to PagedError.

    Such errors are StopIteration, which would hang the await, and errors that would end the event loop or its task.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise PagedError(describe(error)) from error


def attempt(fail: Callable[[str], object], call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call a function for one request; if it raises, call `fail` with the reason and return None."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        raise_exit(error)
        fail(describe(error))
        return None


def once_more(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call an atomic function; if it raises, call it once more, because memory may be free by then.

    The second error has the first one's text as a note; the first error itself would keep its frames' memory alive.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        raise_exit(error)
        first = describe(error)
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        error.add_note(f"The first call raised {first}")
        raise


def quietly(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function and log its error, unless the executor has been shut down."""
    try:
        call(*args, **kwargs)
    except ExecutorShutDownError:
        pass
    except BaseException as error:
        raise_exit(error)
        _LOG.warning("%s: %s", getattr(call, "__qualname__", "a call"), describe(error))
