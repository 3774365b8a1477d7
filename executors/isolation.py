"""Errors of one request, kept from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

from paged.executors.model_executor import ExecutorShutDownError
from paged.kernels.common.scalars import shown

P = ParamSpec("P")

_LOG = logging.getLogger("paged")


def describe(error: BaseException) -> str:
    """Type and message, also of one whose message cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: {shown(error)}"


def quietly(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call what others must not suffer from: what it raises is logged. Where it gives something back after the executor
    was shut down, there is nothing to say.
    """
    try:
        call(*args, **kwargs)
    except ExecutorShutDownError:
        pass
    except Exception as error:
        _LOG.warning("%s: %s", getattr(call, "__qualname__", "a call"), describe(error))
