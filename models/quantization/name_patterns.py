"""Regular expressions of a configuration, matched against names of modules in bounded time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from re import _parser as sre  # type: ignore[attr-defined] # the syntax tree, which has no public name
from re._compiler import compile as compile_tree  # type: ignore[import-not-found]
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.common.scalars import shown

# Longer than any published one.
_MAX_PATTERN = 1000
# Characters of all expressions of a configuration, times 64 for each repetition that others stand within.
_MAX_COST, _ROUNDS = 1 << 18, 64
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_DOT = re.compile(r"\.")


class _Name:
    """A name, and sets of its positions: bit i is set for position i, before character i."""

    def __init__(self, text: str) -> None:
        self.text, self._places = text, dict[re.Pattern[str], int]()

    def before(self, one: re.Pattern[str]) -> int:
        """Positions where a character, or an anchor, is that an expression of one node stands for."""
        if one not in self._places:
            self._places[one] = sum(1 << at for at in range(len(self.text) + 1) if one.match(self.text, at))
        return self._places[one]


# One name meets all patterns of a configuration.
_name = lru_cache(1024)(_Name)

# From the positions where an expression begins to those where it may end.
_Step = Callable[[_Name, int], int]


@dataclass(frozen=True)
class NamePattern:
    """A regular expression that begins where a name does, as `re.match` has it. Repetitions of a character take one
    addition (Cameron et al., Bitwise data parallelism in regular expression matching, 2014), others a round for each
    character of the name, so no expression takes exponential time.

    is_module: it ends where a part of the name does; or the name ends with the expression, as plain text, or has it as
    parts within.
    """

    expression: str
    is_module: bool = False

    @property
    def cost(self) -> int:
        """Characters, times the rounds that each may take."""
        rounds: int = _ROUNDS ** _compiled(self.expression)[1]
        return len(self.expression) * rounds

    def check(self, source: str) -> None:
        """Raise CheckpointError where it is no regular expression, UnsupportedError where it needs another engine."""
        try:
            if len(self.expression) > _MAX_PATTERN:
                raise ValueError(f"longer than {_MAX_PATTERN} characters")
            if self.cost > _MAX_COST:
                raise NotImplementedError("so many repetitions within repetitions")
        except NotImplementedError as error:
            raise UnsupportedError(f"{source} has {shown(self.expression)}: not supported is {error}") from None
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            message = f"{source} has {shown(self.expression)}, which is no pattern ({error})"
            raise CheckpointError(message) from error

    def match(self, text: str) -> bool:
        """Whether a name, or one that it begins with, is of this form."""
        if self.is_module and (text.endswith(self.expression) or f".{self.expression}." in text):
            return True
        name = _name(text)
        ends = _compiled(self.expression)[0](name, 1)
        if self.is_module:
            dots = name.before(_DOT)
            ends &= dots | dots << 1 | 1 << len(text)
        return ends != 0


def check_cost(patterns: list[NamePattern], source: str) -> None:
    """Raise UnsupportedError where expressions would take long, each by itself or all together."""
    if sum(pattern.cost for pattern in patterns) > _MAX_COST:
        worst = max(patterns, key=lambda pattern: pattern.cost)
        raise UnsupportedError(
            f"{source}: {len(patterns)} patterns, {shown(worst.expression)} among them, take too long"
        )


@lru_cache(4096)
def _compiled(expression: str) -> tuple[_Step, int]:
    """What it does, and how many repetitions stand within each other at the most."""
    return _sequence(sre.parse(expression))


@lru_cache(1024)
def _one(kind: Any, value: Any, flags: int) -> re.Pattern[str]:
    """An expression of one node."""
    tree = sre.SubPattern(sre.State(), [(kind, value)])
    tree.state.flags = flags
    compiled: re.Pattern[str] = compile_tree(tree)
    return compiled


def _sequence(tree: Any) -> tuple[_Step, int]:
    nodes = [_node(kind, value, tree.state.flags) for kind, value in tree]
    steps = [step for step, _ in nodes]

    def run(name: _Name, starts: int) -> int:
        for step in steps:
            if not starts:
                break
            starts = step(name, starts)
        return starts

    return run, max((depth for _, depth in nodes), default=0)


def _node(kind: Any, value: Any, flags: int) -> tuple[_Step, int]:
    """One node of a syntax tree.

    Raises:
        NotImplementedError: it is of a kind that takes more than positions.
    """
    if kind in _CHARACTERS or kind == sre.AT:
        one, width = _one(kind, tuple(value) if kind == sre.IN else value, flags), int(kind != sre.AT)
        return lambda name, starts: (starts & name.before(one)) << width, 0
    if kind == sre.SUBPATTERN and not any(value[1:3]):
        return _sequence(value[3])
    if kind == sre.BRANCH:
        steps, depths = zip(*map(_sequence, value[1]), strict=True)
        return lambda name, starts: reduce(or_, (step(name, starts) for step in steps)), max(depths)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return _repeat(*value)
    if kind in (sre.ASSERT, sre.ASSERT_NOT):
        return _assertion(*value, is_negated=kind == sre.ASSERT_NOT)
    raise NotImplementedError(str(kind).lower())


def _repeat(least: int, most: int, tree: Any) -> tuple[_Step, int]:
    step, depth = _sequence(tree)
    if len(tree) == 1 and tree[0][0] in _CHARACTERS and least <= 1 and most == sre.MAXREPEAT:

        def star(name: _Name, starts: int) -> int:
            taken = step(name, -1) >> 1
            starts = starts if least == 0 else step(name, starts)
            return (((starts & taken) + taken) ^ taken) | starts

        return star, 0
    if (least, most) == (0, 1):
        return lambda name, starts: starts | step(name, starts), depth

    def run(name: _Name, starts: int) -> int:
        rounds = len(name.text) + 1  # after which all that is new has no characters
        for _ in range(min(least, rounds)):
            starts = step(name, starts)
        reached = starts
        for _ in range(min(most - least, rounds)):
            starts = step(name, starts) & ~reached
            if not starts:
                break
            reached |= starts
        return reached

    return run, depth + 1


def _assertion(direction: int, tree: Any, *, is_negated: bool) -> tuple[_Step, int]:
    step, depth = _sequence(tree)
    width, widest = tree.getwidth()
    if direction < 0 and width != widest:
        raise ValueError("look-behind requires fixed-width pattern")

    def holds(name: _Name, place: int) -> bool:
        if direction > 0:
            return step(name, 1 << place) != 0
        return place >= width and bool(step(name, 1 << place - width) >> place & 1)

    def run(name: _Name, starts: int) -> int:
        places = (place for place in range(len(name.text) + 1) if starts >> place & 1)
        return sum(1 << place for place in places if holds(name, place) != is_negated)

    return run, depth + 1
