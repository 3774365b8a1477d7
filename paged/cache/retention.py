"""Priorities of cached blocks: which of them the cache evicts first."""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from paged.cache.guard import Rollback
from paged.kernels.core.errors import as_float, as_int

MAX_TTL = 1e9  # seconds, 30 years


class Level(NamedTuple):
    """Priority of a published block until a time of `time.monotonic`; afterwards it has none."""

    priority: int
    expires_at: float


@dataclass(frozen=True)
class Retention:
    """Priority of a sequence's cached blocks over those of others, once the cache has to evict some.

    A block without retention has priority 0. Blocks of low priority are evicted first, and of equal ones the least
    recently used. A block that several sequences ask for has the highest of their priorities for the longest of their
    times, so that the head of a prefix is never worth less than its tail.

    Attributes:
        priority: 1 to 100.
        ttl_s: seconds that a block keeps the priority after it was last asked for; None for no limit.
        num_tokens: only the blocks within the sequence's first tokens have the priority. None for all of the prompt,
            or of the sequence if it begins without `token_ids`.

    Raises:
        InvalidInputError: a value is out of range.
    """

    priority: int = 50
    ttl_s: float | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", as_int("priority", self.priority, low=1, high=100))
        if self.ttl_s is not None:
            object.__setattr__(self, "ttl_s", as_float("ttl_s", self.ttl_s, 0.0, MAX_TTL))
        if self.num_tokens is not None:
            object.__setattr__(self, "num_tokens", as_int("num_tokens", self.num_tokens))

    def of_prompt(self, num_tokens: int) -> Retention:
        """Return a copy whose `num_tokens` is set, for a prompt of this length."""
        if self.num_tokens is not None:
            return self
        return replace(self, num_tokens=num_tokens)

    @property
    def level(self) -> Level:
        """Level of a block that is asked for now."""
        return Level(self.priority, expiry(self.ttl_s))


def expiry(ttl_s: float | None) -> float:
    """Return the time of `time.monotonic` after `ttl_s` seconds; infinity for None."""
    if ttl_s is None:
        return math.inf
    return time.monotonic() + ttl_s


class Priorities:
    """Priorities of the published blocks of a pool; a block without a level has priority 0.

    levels: level by published block. Blocks of a level that has ended are in it until `expire`.
    """

    def __init__(self, cached: OrderedDict[int, int], rollback: Rollback) -> None:
        """cached: the free published blocks with the tick of their release, least recently used first."""
        self.levels: dict[int, Level] = {}
        self._cached = cached
        self._rollback = rollback
        # Blocks of `cached` with a level, by priority, least recently used first.
        self._order: dict[int, OrderedDict[int, None]] = {}
        self._expiries: list[tuple[float, int]] = []  # a heap; entries of levels that were replaced stay in it
        # Blocks of `cached` whose level has ended there, and a heap of their ticks, in which other blocks stay.
        self._expired: set[int] = set()
        self._expired_ticks: list[tuple[int, int]] = []

    @property
    def is_used(self) -> bool:
        """Whether a block has, or had, a level."""
        return bool(self.levels) or bool(self._expired)

    @property
    def num_cached(self) -> int:
        """Number of free published blocks with a level."""
        return sum(map(len, self._order.values()))

    def raise_to(self, blocks: Iterable[int], level: Level) -> None:
        """Give published blocks at least a priority, and at least until a time."""
        self.expire()
        before: dict[int, Level | None] = {}
        raised: dict[int, Level] = {}
        for block in blocks:
            old = self.levels.get(block)
            new = level
            if old is not None:
                new = Level(max(old.priority, level.priority), max(old.expires_at, level.expires_at))
            if new != old:
                before[block], raised[block] = old, new
        self._rollback.append((self._restore, before))
        cached = [block for block in before if block in self._cached]
        self.taken(cached)
        for block, new in raised.items():
            self._set(block, new)
        self.released(cached)

    def forget(self, blocks: Iterable[int]) -> None:
        """Follow the withdrawal of blocks."""
        before = {block: self.levels[block] for block in blocks if block in self.levels}
        if before:
            self._rollback.append((self._restore, before))
            self.taken(before)
            for block in before:
                del self.levels[block]

    def released(self, blocks: Iterable[int]) -> None:
        """Note that published blocks have become free."""
        now = time.monotonic()
        for block in blocks:
            level = self.levels.get(block)
            if level is None:
                continue
            if level.expires_at <= now:  # while it was in use
                del self.levels[block]
            else:
                self._order.setdefault(level.priority, OrderedDict())[block] = None

    def taken(self, blocks: Iterable[int]) -> None:
        """Note that free blocks are in use again."""
        for block in blocks:
            level = self.levels.get(block)
            if level is not None and level.priority in self._order:
                self._order[level.priority].pop(block, None)
            self._expired.discard(block)

    def expire(self) -> None:
        """End the levels whose time is over."""
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, block = heapq.heappop(self._expiries)
            level = self.levels.get(block)
            if level is None or level.expires_at != expires_at:
                continue
            self.taken([block])
            del self.levels[block]
            if block in self._cached:
                self._expired.add(block)
                heapq.heappush(self._expired_ticks, (self._cached[block], block))

    def lowest(self, count: int) -> list[int]:
        """Return the free published blocks to evict first; there are at least `count`."""
        self.expire()
        num_retained = self.num_cached
        if not num_retained and not self._expired:
            return list(islice(self._cached, count))
        num_without = min(count, len(self._cached) - num_retained)
        lowest = self._without_level(num_without)
        for priority in sorted(self._order):
            lowest += islice(self._order[priority], count - len(lowest))
        return lowest

    def _without_level(self, count: int) -> list[int]:
        """Return the `count` least recently used blocks of priority 0."""
        plain: list[tuple[int, int]] = []
        passed: list[int] = []
        for block, tick in self._cached.items():
            if len(plain) == count:
                break
            if block in self.levels or block in self._expired:
                passed.append(block)
            else:
                plain.append((tick, block))
        # The next call does not pass these blocks again. Their own order is in `_order` and `_expired_ticks`.
        for block in passed:
            self._cached.move_to_end(block)
        expired: list[tuple[int, int]] = []
        while self._expired_ticks and len(expired) < count:
            tick, block = heapq.heappop(self._expired_ticks)
            if block in self._expired and self._cached[block] == tick:
                expired.append((tick, block))
        for entry in expired:
            heapq.heappush(self._expired_ticks, entry)
        return [block for _, block in heapq.merge(plain, expired)][:count]

    def recount(self) -> None:
        """Derive the order of free blocks, after a rollback has restored the levels, and `cached` in its order."""
        self._order.clear()
        self._expired.clear()
        self._expired_ticks.clear()
        self.released(self._cached)

    def problem(self, published: Iterable[int]) -> str | None:
        """Return what is wrong with the levels, or None. published: the pool's published blocks."""
        stray = self.levels.keys() - set(published)
        if stray:
            return f"blocks {sorted(stray)} have a priority and are unpublished"
        for priority, blocks in self._order.items():
            for block in blocks:
                if block not in self._cached or self.levels[block].priority != priority:
                    return f"block {block} is listed as free with priority {priority}, but is not"
        if self.num_cached != len(self.levels.keys() & self._cached.keys()):
            return "a free block with a priority is not listed"
        if not self._expired <= self._cached.keys() - self.levels.keys():
            return "a block whose time is over is not free, or has a priority again"
        return None

    def _set(self, block: int, level: Level) -> None:
        self.levels[block] = level
        if level.expires_at < math.inf:
            heapq.heappush(self._expiries, (level.expires_at, block))

    def _restore(self, levels: dict[int, Level | None]) -> None:
        for block, level in levels.items():
            if level is None:
                self.levels.pop(block, None)
            else:
                self._set(block, level)
