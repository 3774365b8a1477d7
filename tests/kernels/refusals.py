"""Calls that must be refused, beside the one that must not."""

from collections.abc import Callable
from typing import Any

import pytest

from paged import InvalidInputError


def assert_refuses(operation: Callable[..., Any], arguments: dict[str, Any], *faults: tuple[str, Any, str]) -> None:
    """Assert that an operation takes these arguments, and refuses each fault: a name, a wrong value, the message."""
    operation(**arguments)
    for name, wrong, message in faults:
        with pytest.raises(InvalidInputError, match=message):
            operation(**{**arguments, name: wrong})
