"""What tests of `paged generate` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Generate = Callable[..., dict[str, Any]]


def texts(result: dict[str, Any]) -> list[str]:
    """The answers, without spaces around."""
    return [answer["text"].strip() for answer in result["answers"]]
