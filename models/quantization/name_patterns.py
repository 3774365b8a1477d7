"""Match a configuration's regular expressions against module names in bounded time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from re import _parser as sre  # type: ignore[attr-defined] # the syntax tree, which has no public name
from re._compiler import compile as compile_tree  # type: ignore[import-not-found]
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown

# Limit of a pattern's characters, above any published pattern.
_MAX_PATTERN = 1000
# Limit of a configuration's cost: characters of all patterns, times 64 for each level of nested repetition.
_MAX_COST, _ROUNDS = 1 << 18, 64
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_REPEATS, _ASSERTIONS = (sre.MAX_REPEAT, sre.MIN_REPEAT), (sre.ASSERT, sre.ASSERT_NOT)
_DOT = re.compile(r"\.")
_parsed = lru_cache(4096)(sre.parse)


@dataclass(frozen=True)
class NamePattern:
    """A regular expression that matches the beginning of a name, like `re.match`, but never in exponential time.

    Repetitions of one character take one addition (Cameron et al., Bitwise data parallelism in regular expression
    matching, 2014); other repetitions take a round per character of the name.

    is_module: the match must end where a part of the name ends. The pattern also matches as plain text: names that
    contain it as parts, or end with it.
    """

    expression: str
    is_module: bool = False

    @property
    def cost(self) -> int:
        """Cost of a match: characters times rounds."""
        rounds: int = _ROUNDS ** _depth(_parsed(self.expression))
        return len(self.expression) * rounds

    def check(self, source: str) -> None:
        """Check the pattern.

        Raises:
            CheckpointError: the text is not a regular expression.
            UnsupportedError: the expression needs another engine.
        """
        try:
            if len(self.expression) > _MAX_PATTERN:
                raise ValueError(f"longer than {_MAX_PATTERN} characters")
            if self.cost > _MAX_COST:
                raise NotImplementedError("too many nested repetitions")
        except NotImplementedError as error:
            raise UnsupportedError(f"{source} has {shown(self.expression)}, which is not supported ({error})") from None
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            message = f"{source} has {shown(self.expression)}, which is not a pattern ({error})"
            raise CheckpointError(message) from error

    def match(self, name: str) -> bool:
        """Return whether the beginning of a name matches."""
        if self.is_module and (name.endswith(self.expression) or f".{self.expression}." in name):
            return True
        ends = _ends(_parsed(self.expression), name, 1)
        if self.is_module:
            dots = _places(_DOT, name)
            ends &= dots | dots << 1 | 1 << len(name)
        return ends != 0


def check_cost(patterns: list[NamePattern], source: str) -> None:
    """Raise UnsupportedError if matching all patterns would take long."""
    if sum(pattern.cost for pattern in patterns) > _MAX_COST:
        worst = max(patterns, key=lambda pattern: pattern.cost)
        raise UnsupportedError(
            f"{source}: {len(patterns)} patterns, such as {shown(worst.expression)}, take too long to match"
        )


def _depth(tree: Any) -> int:
    """Return the depth of nested repetitions; repetitions of a single character do not count.

    Raises:
        NotImplementedError: sets of positions cannot express a node.
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
    """Return the positions of a name where a match may end, given the positions where it may start.

    Bit i stands for the position before character i.
    """
    for kind, value in tree:
        if not starts:
            break
        if kind in _CHARACTERS or kind == sre.AT:
            if kind == sre.IN:
                value = tuple(value)  # hashable, for the cache
            node = _compiled(kind, value, tree.state.flags)
            starts = (starts & _places(node, name)) << (kind != sre.AT)
        elif kind == sre.SUBPATTERN:
            starts = _ends(value[-1], name, starts)
        elif kind == sre.BRANCH:
            starts = reduce(or_, [_ends(part, name, starts) for part in value[1]])
        elif kind in _REPEATS:
            starts = _repeat(name, starts, *value)
        else:
            holding = 0
            for place in range(len(name) + 1):
                if starts >> place & 1 and _holds(name, place, *value) == (kind == sre.ASSERT):
                    holding |= 1 << place
            starts = holding
    return starts


@lru_cache(1024)
def _compiled(kind: Any, value: Any, flags: int) -> re.Pattern[str]:
    """Compile an expression of one node."""
    tree = sre.SubPattern(sre.State(), [(kind, value)])
    tree.state.flags = flags
    compiled: re.Pattern[str] = compile_tree(tree)
    return compiled


@lru_cache(1 << 14)
def _places(node: re.Pattern[str], name: str) -> int:
    """Return the positions where a one-node expression matches: a character or an anchor."""
    return sum(1 << at for at in range(len(name) + 1) if node.match(name, at))


def _is_run(at_least: int, at_most: int, tree: Any) -> bool:
    """Return whether the repetition takes one character any number of times."""
    return len(tree) == 1 and tree[0][0] in _CHARACTERS and at_least <= 1 and at_most == sre.MAXREPEAT


def _repeat(name: str, starts: int, at_least: int, at_most: int, tree: Any) -> int:
    if _is_run(at_least, at_most, tree):
        taken = _ends(tree, name, (2 << len(name)) - 1) >> 1
        if at_least > 0:
            starts = _ends(tree, name, starts)
        return (((starts & taken) + taken) ^ taken) | starts
    rounds = len(name) + 1  # later rounds match no characters
    for _ in range(min(at_least, rounds)):
        starts = _ends(tree, name, starts)
    reached = starts
    for _ in range(min(at_most - at_least, rounds)):
        starts = _ends(tree, name, starts) & ~reached
        reached |= starts
    return reached


def _holds(name: str, place: int, direction: int, tree: Any) -> bool:
    """Return whether an expression matches before or after a position."""
    if direction > 0:
        return _ends(tree, name, 1 << place) != 0
    first = place - tree.getwidth()[0]
    return first >= 0 and bool(_ends(tree, name, 1 << first) >> place & 1)
