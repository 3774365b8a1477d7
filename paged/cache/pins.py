"""Pins: cached prefixes that stay until their owner releases them."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from paged.cache.kinds.slots import SlotKind
from paged.cache.retention import expiry
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError, PinBudgetError
from paged.kernels.core.errors import shown

if TYPE_CHECKING:
    from paged.cache.guard import CacheGuard
    from paged.cache.kv_cache import PagedKvCacheConfig
    from paged.cache.live_sequences import LiveSequences
    from paged.cache.prefix_cache import PrefixCache


class PinnedPrefix:
    """A cached prefix that is never evicted before its `release`, or before it expires.

    Made by `PagedKvCacheManager.pin`. As a context manager it is released at the end of the block.

    Attributes:
        num_tokens: length of the prefix.
        namespace: namespace in which prompts find it.
    """

    def __init__(self, pins: Pins, state: SequenceState) -> None:
        self.num_tokens = state.num_tokens
        self.namespace = state.namespace
        self._pins, self._state = pins, state

    @property
    def is_held(self) -> bool:
        """Whether the prefix is still pinned."""
        return self._state in self._pins.sequences.pinned

    def release(self) -> None:
        """Let the prefix be evicted again; a second call does nothing."""
        self._pins.release(self)

    def __enter__(self) -> PinnedPrefix:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Pins:
    """All pins of a cache. A pin holds blocks and states like a sequence that never runs.

    The caller of `add`, `expire`, `release_all` and `release_namespace` holds the cache's lock.
    """

    def __init__(
        self, config: PagedKvCacheConfig, guard: CacheGuard, prefixes: PrefixCache, sequences: LiveSequences
    ) -> None:
        self.sequences = sequences
        self._fraction, self._num_blocks = config.max_pinned_fraction, config.num_pinned_blocks
        self._guard, self._prefixes = guard, prefixes

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks; a block of several pins counts once."""
        return len(self._blocks())

    def add(self, token_ids: list[int], namespace: Hashable, ttl_s: float | None) -> PinnedPrefix:
        """Implement `PagedKvCacheManager.pin`."""
        prefix = self._prefixes.find(token_ids, namespace)
        if not prefix.length:
            raise InvalidInputError(f"token_ids: none of their blocks is cached in namespace {shown(namespace)}")
        num_blocks = len(self._blocks() | set(prefix.blocks) - {0})
        if num_blocks > self._num_blocks:
            raise PinBudgetError(num_blocks, self._num_blocks)
        for kind in self._prefixes.kinds:
            if isinstance(kind, SlotKind):
                on_device, _ = kind.held(self._states())
                num_slots = len(on_device.keys() - {0} | kind.slots_of_hit(prefix.firsts))
                budget = int(kind.slots.num_blocks * self._fraction)
                if num_slots > budget:
                    raise PinBudgetError(num_slots, budget)
        self.expire()
        state, pinned = SequenceState("a pin", namespace), self.sequences.pinned
        self._guard.rollback.keep_absence(pinned, (state,))
        pinned[state] = expiry(ttl_s)
        self._prefixes.hold(state, prefix)
        return PinnedPrefix(self, state)

    def release(self, pin: PinnedPrefix) -> None:
        """Implement `PagedKvCacheManager.release`."""
        with self._guard:
            if pin.is_held:
                self._release(pin._state)

    def expire(self) -> None:
        """Release the pins whose time is over."""
        now = time.monotonic()
        for state, expires_at in list(self.sequences.pinned.items()):
            if expires_at <= now:
                self._release(state)

    def release_all(self) -> None:
        """Release every pin."""
        for state in list(self.sequences.pinned):
            self._release(state)

    def release_namespace(self, namespace: Hashable) -> None:
        """Release the pins of a namespace."""
        for state in list(self.sequences.pinned):
            if state.namespace == namespace:
                self._release(state)

    def _blocks(self) -> set[int]:
        """Return the pinned blocks."""
        blocks: set[int] = set()
        for state in self._states():
            blocks.update(state.blocks)
        return blocks - {0}

    def _states(self) -> list[SequenceState]:
        """Return the sequences of the pins whose time is not over."""
        now = time.monotonic()
        return [state for state, expires_at in self.sequences.pinned.items() if expires_at > now]

    def _release(self, state: SequenceState) -> None:
        pinned = self.sequences.pinned
        state.keep(self._guard.rollback)
        self._guard.rollback.append((pinned.__setitem__, state, pinned[state]))
        self._prefixes.pool.release(state.blocks)
        for kind in self._prefixes.kinds:
            kind.release(state)
        state.blocks, state.num_tokens = (), 0
        del pinned[state]
