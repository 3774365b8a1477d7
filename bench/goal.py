"""What a row is meant to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """value, reached and met: None where what the goal compares with did not run.

    reached: value over target or, where less is better, target over value; from 1 on the goal is met.
    """

    text: str
    value: float | None
    reached: float | None
    met: bool | None


def at_least(text: str, value: float | None, target: float) -> Goal:
    if value is None:
        return Goal(f"at least {text}", None, None, None)
    return Goal(f"at least {text}", value, value / target, value >= target)


def at_most(text: str, value: float | None, target: float) -> Goal:
    """value: above 0."""
    if value is None:
        return Goal(f"at most {text}", None, None, None)
    return Goal(f"at most {text}", value, target / value, value <= target)


def verdict(goal: Mapping[str, Any]) -> str:
    """A goal as a row holds it, whether it is met, and what was reached."""
    if goal["met"] is None:
        return f"{goal['text']}: nothing to compare with"
    return f"{goal['text']}: {'met' if goal['met'] else 'MISSED'} ({goal['value']:.4g})"
