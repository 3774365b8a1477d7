"""Goals of rows, and whether a row reaches them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Goal = dict[str, Any]
"""As a row holds it: text; value, reached and met, which are None where what the goal compares with did not run.

reached: value over target or, where less is better, target over value; from 1 on the goal is met.
"""


def at_least(text: str, value: float | None, target: float) -> Goal:
    return _goal(f"at least {text}", value, None if value is None else value / target)


def at_most(text: str, value: float | None, target: float) -> Goal:
    """value: above 0."""
    return _goal(f"at most {text}", value, None if value is None else target / value)


def _goal(text: str, value: float | None, reached: float | None) -> Goal:
    return {"text": text, "value": value, "reached": reached, "met": None if reached is None else reached >= 1}


def verdict(goal: Mapping[str, Any]) -> str:
    """A goal that has a value, and whether it is met."""
    return f"{goal['text']}: {'met' if goal['met'] else 'MISSED'} ({goal['value']:.4g})"
