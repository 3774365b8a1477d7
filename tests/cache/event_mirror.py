"""A subscriber that follows the index."""

from __future__ import annotations

from paged import BlockRemoved, BlocksStored, PagedKvCacheManager
from paged.cache.events import CacheEvent


class Mirror:
    """What a subscriber knows of the index, and the removals it could not make sense of."""

    def __init__(self, manager: PagedKvCacheManager) -> None:
        self.hashes: set[int | bytes] = set()
        self.events: list[CacheEvent] = []
        self.unknown: list[CacheEvent] = []
        manager.subscribe(self.hear)

    def hear(self, event: CacheEvent) -> None:
        self.events.append(event)
        if isinstance(event, BlocksStored):
            self.hashes |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            if event.hash not in self.hashes:
                self.unknown.append(event)
            self.hashes.discard(event.hash)
        else:
            self.hashes.clear()
