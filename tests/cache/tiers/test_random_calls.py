"""Random calls of a cache with both tiers, and faults in all of them: no prompt ever gets other data than its own.

SOAK=1 makes 100,000 calls in place of 600."""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paged.cache.manager
import paged.cache.tiers.host
from paged import InvalidInputError, KvCacheHandle
from paged.cache.events import CacheEvent
from paged.cache.groups import CacheGroup
from paged.cache.kinds import kind
from paged.cache.tiers import files
from paged.cache.tiers.folder import CacheFolder
from paged.cache.tiers.host_events import HostBlockRemoved, HostBlockStored
from paged.errors import OutOfBlocksError
from tests.cache.prefix_cache import BLOCK
from tests.cache.tiers.ranked_cache import RankedCache, WeightedCache
from tests.deadline import HANG_S
from tests.failure import CACHE_GUARD, Failure

NUM_CALLS = 50_000 if "SOAK" in os.environ else 300
MOST_SEQUENCES = 5
MOST_TOKENS = 40
SOURCES = {Path(module.__file__).parent for module in (paged.cache.manager, kind, paged.cache.tiers.host)}


class FaultyFolder(CacheFolder):
    """Every tenth call fails, or loses, cuts, changes or mixes up what it has. Threads of the tier call it."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, limit_bytes=60_000)
        self.random = random.Random(seed)
        self.other = b""

    def _fails(self) -> bool:
        return self.random.random() < 0.1

    def lookup(self, names: Sequence[str]) -> int:
        if self._fails():
            raise OSError("lookup")
        return super().lookup(names)

    def load(self, name: str) -> bytes | None:
        content = super().load(name)
        if content is None or not self._fails():
            return content
        self.other, other = content, self.other
        changed = bytearray(content)
        changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        answer = self.random.choice([None, other, content[: self.random.randrange(len(content))], bytes(changed)])
        if answer is None and self._fails():
            raise OSError("load")
        return answer

    def store(self, name: str, content: bytes) -> bool:
        if self._fails():
            raise OSError("store")
        return super().store(name, content)


class RandomCalls:
    """A cache, whose process ends and starts anew on one folder, and what has been seen."""

    def __init__(
        self,
        cache_type: type[WeightedCache],
        folder: Path,
        seed: int,
        options: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.cache_type = cache_type
        self.random = random.Random(seed)
        self.folder, self.options, self.monkeypatch = folder, options, monkeypatch
        self.seen: Counter[str] = Counter()
        self.prompts: list[list[int]] = [[]]
        self.next_id = 0
        self.on_host = set[int | bytes]()  # by what listeners are told
        self.cache = self.start()

    def start(self) -> WeightedCache:
        cache = self.cache_type(device="cpu", **self.options)
        weights = self.random.randrange(2)
        cache.attach(lambda: FaultyFolder(self.folder, self.random.randrange(1 << 30)))
        cache.set_weights(weights)
        self.on_host.clear()
        cache.manager.subscribe(self.hear, with_host=True)
        return cache

    def hear(self, event: CacheEvent) -> None:
        if isinstance(event, HostBlockStored):
            self.on_host.add(event.hash)
        elif isinstance(event, HostBlockRemoved):
            self.on_host.discard(event.hash)

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def tokens(self, most: int) -> list[int]:
        return self.random.choices(range(3), k=self.random.randint(0, most))

    def sequence(self, *, is_swapped: bool = False) -> KvCacheHandle:
        """One that is there; IndexError if there is none."""
        handles = [handle for handle in self.cache.tokens if handle.is_swapped == is_swapped]
        return self.random.choice(handles)

    def begin(self) -> None:
        """A prompt that begins as an earlier one; what is not cached is computed."""
        if len(self.cache.tokens) == MOST_SEQUENCES:
            return
        earlier = self.random.choice(self.prompts)
        if self.random.random() < 0.3:
            earlier = earlier[: self.random.randint(0, len(earlier))]
        tokens = (earlier + self.tokens(2 * BLOCK))[:MOST_TOKENS]
        self.prompts = [*self.prompts[-12:], tokens]
        seq_id, namespace = self.new_id(), self.random.choice([None, None, "adapter"])
        if not self.fails(partial(self.cache.manager.allocate, seq_id, token_ids=tokens, namespace=namespace)):
            handle = self.cache.manager.get_handle(seq_id)
            if handle is not None:  # else there was no memory
                self.cache.tokens[handle] = tokens[: handle.num_tokens]
                self.cache.check_data(handle)
                self.cache.feed(handle, tokens[handle.num_tokens :] or [0])

    def fails(self, call: Callable[[], object]) -> bool:
        """Call, or now and then fail at some line of it; whether it failed."""
        if self.random.random() < 0.9:
            call()
            return False
        is_hit = Failure(self.random.randrange(400), SOURCES, MemoryError(), skip=CACHE_GUARD).hits(call)
        self.seen["failed calls"] += is_hit
        return is_hit

    def feed(self) -> None:
        handle = self.sequence()
        tokens = self.tokens(BLOCK)
        if tokens and handle.num_tokens < MOST_TOKENS:
            self.cache.feed(handle, tokens)

    def fork(self) -> None:
        if len(self.cache.tokens) < MOST_SEQUENCES:
            self.cache.fork(self.sequence(), self.new_id())

    def truncate(self) -> None:
        """As behind drafts that were refused, unless what a window would see has been freed."""
        handle = self.sequence()
        with suppress(InvalidInputError):
            self.cache.truncate(handle, max(0, handle.num_tokens - self.random.randint(1, BLOCK)))

    def free(self) -> None:
        handle = self.random.choice(list(self.cache.tokens))
        if not self.fails(partial(self.cache.manager.free, handle)):
            del self.cache.tokens[handle]

    def swap_out(self) -> None:
        self.fails(partial(self.cache.manager.swap_out, self.sequence()))

    def swap_in(self) -> None:
        self.fails(partial(self.cache.manager.swap_in, self.sequence(is_swapped=True)))

    def evict(self) -> None:
        self.fails(partial(self.cache.manager.evict, self.random.choice([1, 4, 100])))

    def forget_namespace(self) -> None:
        if all(handle.namespace is None for handle in self.cache.tokens):
            self.cache.manager.forget_namespace("adapter")

    def sleep(self) -> None:
        self.cache.manager.clear_prefix_cache()

    def update_weights(self) -> None:
        for handle in list(self.cache.tokens):
            self.cache.free(handle)
        self.cache.set_weights(self.random.randrange(2))

    def restart(self) -> None:
        self.stop()
        self.cache = self.start()

    def stop(self) -> None:
        """End the process, perhaps before all is written."""
        self.cache.close(self.random.choice([0.0, HANG_S]))
        self.seen.update(self.cache.manager.stats().of_tiers())

    def run(self, count: int) -> None:
        calls = {self.begin: 40, self.feed: 10, self.fork: 3, self.truncate: 6, self.free: 40, self.swap_out: 6}
        calls |= {self.swap_in: 6, self.evict: 12, self.forget_namespace: 1, self.sleep: 1, self.update_weights: 1}
        calls[self.restart] = 4
        for call in self.random.choices(list(calls), list(calls.values()), k=count):
            # Now and then nobody waits for a file, so that it comes after its prompt has gone on.
            self.monkeypatch.setattr(files, "PATIENCE_S", 0.0 if self.random.random() < 0.1 else HANG_S)
            with suppress(IndexError, OutOfBlocksError):
                call()
                self.seen[call.__name__] += 1
            for handle in self.cache.tokens:
                if not handle.is_swapped:
                    self.cache.check_data(handle)
            self.cache.manager.check_integrity()
            tier = self.cache.manager._prefixes.tier
            assert tier is not None
            assert self.on_host == {entry.hash for entry in tier.blocks.entries.values() if entry.column == 0}
        self.stop()


@pytest.mark.parametrize("cache_type", [WeightedCache, RankedCache], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 24, "num_swap_blocks": 6, "host_cache_bytes": 10 * 512},
        {
            "num_blocks": 44,
            "num_swap_blocks": 10,
            "host_cache_bytes": 24 * 256,
            "groups": [CacheGroup((0,)), CacheGroup((1,), sliding_window=6)],
        },
    ],
    ids=["plain", "windows"],
)
def test_no_prompt_gets_the_data_of_another(
    options: dict[str, Any], cache_type: type[WeightedCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = RandomCalls(cache_type, tmp_path, 0, options, monkeypatch)
    calls.run(NUM_CALLS)
    for event in ("host_loaded_blocks", "folder_read_blocks", "folder_written_blocks", "folder_faults", "failed calls"):
        assert calls.seen[event] > NUM_CALLS // 1000, calls.seen
