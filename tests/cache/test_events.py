"""What subscribers are told of published blocks and of how full the pool is, when, and what they may do then."""

import logging
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from paged import BlockRemoved, BlocksStored, CacheCleared, PagedKvCacheManager
from paged.cache.events import CacheEvent, MemoryPressure
from paged.cache.prefix_index import PrefixIndex
from tests.cache.prefix_cache import BLOCK, Cache, Mirror
from tests.deadline import HANG_S

LOW, HIGH, CRITICAL = MemoryPressure.LOW, MemoryPressure.HIGH, MemoryPressure.CRITICAL


@pytest.mark.parametrize("algorithm", ["fast", "sha256"])
def test_events_tell_what_was_stored(algorithm: str, device: torch.device) -> None:
    cache = Cache(device=device, prefix_hash=algorithm)
    mirror = Mirror(cache.manager)
    handle = cache.run("a", range(5), "x")
    cache.feed(handle, range(5, 12))
    chain = PrefixIndex(1, BLOCK, algorithm)._chain
    root = chain.root("x")
    hashes = chain.extend(root, np.arange(12, dtype=np.int32).reshape(3, BLOCK))
    assert mirror.events == [
        BlocksStored((hashes[0],), root, (0, 1, 2, 3), "x"),
        BlocksStored((hashes[1], hashes[2]), hashes[0], tuple(range(4, 12)), "x"),
    ]
    cache.free(handle)
    assert len(mirror.events) == 2
    cache.manager.evict(1)
    cache.manager.clear_prefix_cache()
    assert mirror.events[2:] == [BlockRemoved(hashes[2]), CacheCleared()]


def test_failing_callback_is_logged_and_harms_nothing(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: CacheEvent) -> None:
        raise RuntimeError("not today")

    cache.manager.subscribe(fail)
    mirror = Mirror(cache.manager)
    with caplog.at_level(logging.ERROR, logger="paged"):
        cache.run("a", range(8))
    assert "not today" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert len(mirror.events) == 1
    assert cache.found(range(8)) == 8
    cache.check()


def test_callbacks_run_outside_of_the_lock(cache: Cache) -> None:
    answers: list[object] = []

    def call_from_another_thread(_: object) -> None:
        thread = threading.Thread(target=lambda: answers.append(cache.manager.stats()), daemon=True)
        thread.start()
        thread.join(HANG_S)
        answers.append(thread.is_alive())

    cache.manager.subscribe(call_from_another_thread)
    cache.manager.on_pressure(call_from_another_thread)
    cache.run("a", range(8))
    cache.manager.allocate("b", 9 * BLOCK)
    assert len(answers) == 4, "one event, one change of pressure"
    assert answers[1] is answers[3] is False


def test_listeners_hear_everything_in_order(cache: Cache) -> None:
    """Also of what the first listener does to the cache when it is called."""

    def clear_at_once(event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            cache.manager.clear_prefix_cache()

    cache.manager.subscribe(clear_at_once)
    mirror = Mirror(cache.manager)
    cache.run("a", range(8))
    assert [type(event) for event in mirror.events] == [BlocksStored, CacheCleared]
    assert cache.manager.stats().published_blocks == 0
    cache.check()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_callback_that_ends_the_program_keeps_nothing_from_others(cache: Cache, ending: type[BaseException]) -> None:
    heard: list[object] = []

    def end(event: object) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise ending

    cache.manager.subscribe(end)
    mirror = Mirror(cache.manager)
    with pytest.raises(ending):
        cache.run("a", range(9))
    assert len(heard) == 1
    assert mirror.hashes == cache.hashes()
    cache.manager.clear_prefix_cache()
    assert len(heard) == 2
    assert not mirror.hashes
    cache.manager.check_integrity()


def watched(num_blocks: int = 10, **changes: Any) -> tuple[PagedKvCacheManager, list[MemoryPressure]]:
    """A manager, and the list of what it tells."""
    manager = Cache(device="cpu", num_blocks=num_blocks, **changes).manager
    levels: list[MemoryPressure] = []
    manager.on_pressure(levels.append)
    return manager, levels


@pytest.mark.parametrize(
    ("low", "high", "num_blocks", "expected"),
    [
        (0.3, 0.1, 10, [LOW] * 8 + [HIGH] * 2 + [CRITICAL]),
        (0.5, 0.5, 4, [LOW] * 3 + [CRITICAL] * 2),
        (1.0, 0.25, 4, [LOW] + [HIGH] * 3 + [CRITICAL]),
        (0.0, 0.0, 4, [LOW] * 5),
        (1.0, 1.0, 1, [LOW, CRITICAL]),
    ],
)
def test_a_level_begins_below_its_watermark(
    low: float, high: float, num_blocks: int, expected: list[MemoryPressure]
) -> None:
    manager, levels = watched(num_blocks, low_watermark=low, high_watermark=high)
    measured = [manager.pressure]
    for i in range(num_blocks):
        manager.allocate(i, 1)
        measured.append(manager.pressure)
    assert measured == expected
    assert levels == [now for before, now in pairwise(expected) if now is not before]
    assert manager.metrics_snapshot()["pressure"] == expected[-1].value


def test_cached_blocks_count_as_available() -> None:
    manager, levels = watched()
    handle = manager.allocate("a", token_ids=range(36))
    manager.advance(handle, 36)
    manager.commit(handle, range(36))
    assert manager.pressure is HIGH
    manager.free(handle)
    assert manager.stats().cached_blocks == 9
    assert manager.pressure is LOW
    revived = manager.allocate("b", token_ids=range(37))
    assert revived.num_cached_tokens == 36
    assert levels == [HIGH, LOW, CRITICAL]
