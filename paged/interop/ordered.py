"""Functions that take their arguments in another library's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, TypeVar

R = TypeVar("R")


def ordered(required: str, optional: Mapping[str, Any]) -> Callable[[Callable[[dict[str, Any]], R]], Callable[..., R]]:
    """Make a function of arguments by name one that takes them in an order, and any others by name.

    required: names that have no default, which come first. optional: those behind them, with their defaults.
    """
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in required.split()]
    rest = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in optional.items()]
    signature = Signature([*first, *rest, Parameter("others", Parameter.VAR_KEYWORD)])
    order, needed = (*required.split(), *optional), set(required.split())

    def decorate(function: Callable[[dict[str, Any]], R]) -> Callable[..., R]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> R:
            placed = dict(zip(order, args, strict=False))
            if len(args) > len(order) or placed.keys() & named.keys() or needed - placed.keys() - named.keys():
                signature.bind(*args, **named)  # raises TypeError, which says why
            return function({**optional, **placed, **named})

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
