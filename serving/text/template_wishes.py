"""Conversion of a request's wishes for reasoning and length to variables of a chat template.

Templates use different names: `reasoning_effort` (gpt-oss, Mistral), `enable_thinking` (Qwen3, GLM), `thinking`
(DeepSeek V3.1, Granite), `thinking_budget` (Seed-OSS), `verbosity`. A wish is an error if the template has no variable
for it, unless it requests the default.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paged.errors import InvalidInputError

_SWITCHES = ("enable_thinking", "thinking")
_USUAL = "medium"  # OpenAI's default effort and verbosity


class TemplateWishes:
    """Converts wishes to variables. All methods raise InvalidInputError, which begins with the wrong argument.

    Args:
        known: variables that the template reads.
        can_reason: whether the model's answers may contain reasoning.
    """

    def __init__(self, known: Collection[str], *, can_reason: bool) -> None:
        self._known, self._can_reason = known, can_reason

    def effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Return the variables for a reasoning effort; "none" turns reasoning off, all others turn it on."""
        if effort is None:
            return {}
        variables = self._switches(is_on=effort != "none")
        if "reasoning_effort" in self._known and not (effort == "none" and variables):
            return variables | {"reasoning_effort": effort}
        never_reasons = effort == "none" and not self._can_reason
        if not variables and not never_reasons and effort != _USUAL:
            raise _unknown(param, effort, _USUAL)
        return variables

    def output_effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Return the variables for Anthropic's effort (default "high"), which turns reasoning neither on nor off."""
        return self._same_name("reasoning_effort", effort, param, (_USUAL, "high"))

    def verbosity(self, verbosity: str | None, param: str) -> dict[str, Any]:
        """Return the variables for the length of answers."""
        return self._same_name("verbosity", verbosity, param, (_USUAL,))

    def thinking(self, is_on: bool, budget: int | None, param: str) -> dict[str, Any]:
        """Return the variables that allow reasoning, or forbid it with a budget of 0.

        A budget is passed only to templates with a variable for it. Allowing reasoning is no error for other models.
        """
        variables = self._switches(is_on=is_on)
        if budget is not None and "thinking_budget" in self._known:
            variables["thinking_budget"] = budget
        if not is_on and not variables and self._can_reason:
            raise InvalidInputError(f"{param}: the chat template has no variable that turns reasoning off")
        return variables

    def _switches(self, *, is_on: bool) -> dict[str, Any]:
        return {name: is_on for name in _SWITCHES if name in self._known}

    def _same_name(self, name: str, value: str | None, param: str, usual: tuple[str, ...]) -> dict[str, Any]:
        if value is None:
            return {}
        if name in self._known:
            return {name: value}
        if value not in usual:
            raise _unknown(param, value, *usual)
        return {}


def _unknown(param: str, value: str, *usual: str) -> InvalidInputError:
    expected = " or ".join(usual)
    return InvalidInputError(f"{param}: {value}, and the chat template has no variable for it; expected {expected}")
