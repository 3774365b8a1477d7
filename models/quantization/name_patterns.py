"""Regular expressions of a configuration, matched against names of modules in bounded time."""

from __future__ import annotations

import re
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
_REPEATS, _ASSERTIONS = (sre.MAX_REPEAT, sre.MIN_REPEAT), (sre.ASSERT, sre.ASSERT_NOT)
_DOT = re.compile(r"\.")
_parsed = lru_cache(4096)(sre.parse)


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
        rounds: int = _ROUNDS ** _depth(_parsed(self.expression))
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

    def match(self, name: str) -> bool:
        """Whether a name, or one that it begins with, is of this form."""
        if self.is_module and (name.endswith(self.expression) or f".{self.expression}." in name):
            return True
        ends = _ends(_parsed(self.expression), name, 1)
        if self.is_module:
            dots = _places(_DOT, name)
            ends &= dots | dots << 1 | 1 << len(name)
        return ends != 0


def check_cost(patterns: list[NamePattern], source: str) -> None:
    """Raise UnsupportedError where expressions would take long, each by itself or all together."""
    if sum(pattern.cost for pattern in patterns) > _MAX_COST:
        worst = max(patterns, key=lambda pattern: pattern.cost)
        raise UnsupportedError(
            f"{source}: {len(patterns)} patterns, {shown(worst.expression)} among them, take too long"
        )


def _depth(tree: Any) -> int:
    """How many repetitions stand within each other at the most, but for those of a character.

    Raises:
        NotImplementedError: a node takes more than positions.
    """
    depth = 0
    for kind, value in tree:
        if kind in _ASSERTIONS and value[0] < 0 and len(set(value[1].getwidth())) > 1:
            raise ValueError("look-behind requires fixed-width pattern")
        if kind == sre.BRANCH:
            parts = value[1]
        elif kind in _REPEATS or kind in _ASSERTIONS or (kind == sre.SUBPATTERN and not any(value[1:3])):
            parts = value[-1:]
        elif kind in _CHARACTERS or kind == sre.AT:
            continue
        else:
            raise NotImplementedError(str(kind).lower())
        is_loop = kind in _REPEATS and value[:2] != (0, 1) and not _is_run(*value)
        depth = max(depth, max(map(_depth, parts)) + (is_loop or kind in _ASSERTIONS))
    return depth


def _ends(tree: Any, name: str, starts: int) -> int:
    """The positions of a name where an expression may end, of those where it begins: bit i is set for position i,
    before character i."""
    for kind, value in tree:
        if not starts:
            break
        if kind in _CHARACTERS or kind == sre.AT:
            one = _one(kind, tuple(value) if kind == sre.IN else value, tree.state.flags)
            starts = (starts & _places(one, name)) << (kind != sre.AT)
        elif kind == sre.SUBPATTERN:
            starts = _ends(value[-1], name, starts)
        elif kind == sre.BRANCH:
            starts = reduce(or_, [_ends(part, name, starts) for part in value[1]])
        elif kind in _REPEATS:
            starts = _repeat(name, starts, *value)
        else:
            places = [place for place in range(len(name) + 1) if starts >> place & 1]
            starts = sum(1 << place for place in places if _holds(name, place, *value) == (kind == sre.ASSERT))
    return starts


@lru_cache(1024)
def _one(kind: Any, value: Any, flags: int) -> re.Pattern[str]:
    """An expression of one node."""
    tree = sre.SubPattern(sre.State(), [(kind, value)])
    tree.state.flags = flags
    compiled: re.Pattern[str] = compile_tree(tree)
    return compiled


@lru_cache(1 << 14)
def _places(one: re.Pattern[str], name: str) -> int:
    """Positions where a character, or an anchor, is that an expression of one node stands for."""
    return sum(1 << at for at in range(len(name) + 1) if one.match(name, at))


def _is_run(least: int, most: int, tree: Any) -> bool:
    """Whether it is any number of one character."""
    return len(tree) == 1 and tree[0][0] in _CHARACTERS and least <= 1 and most == sre.MAXREPEAT


def _repeat(name: str, starts: int, least: int, most: int, tree: Any) -> int:
    if _is_run(least, most, tree):
        taken = _ends(tree, name, (2 << len(name)) - 1) >> 1
        starts = starts if least == 0 else _ends(tree, name, starts)
        return (((starts & taken) + taken) ^ taken) | starts
    rounds = len(name) + 1  # after which all that is new has no characters
    for _ in range(min(least, rounds)):
        starts = _ends(tree, name, starts)
    reached = starts
    for _ in range(min(most - least, rounds)):
        starts = _ends(tree, name, starts) & ~reached
        reached |= starts
    return reached


def _holds(name: str, place: int, direction: int, tree: Any) -> bool:
    """Whether an expression stands before or behind a position."""
    if direction > 0:
        return _ends(tree, name, 1 << place) != 0
    first = place - tree.getwidth()[0]
    return first >= 0 and bool(_ends(tree, name, 1 << first) >> place & 1)
