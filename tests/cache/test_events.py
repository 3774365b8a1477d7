"""What subscribers are told of published blocks, when, and what they may do then."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from paged import BlockRemoved, BlocksStored, CacheCleared
from paged.cache.events import CacheEvent
from paged.cache.prefix.index import PrefixIndex
from tests.cache.event_mirror import Mirror
from tests.cache.prefix_cache import BLOCK, Cache

pytestmark = pytest.mark.usefixtures("torch_backend")


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
        thread.join(5)
        answers.append(thread.is_alive())

    cache.manager.subscribe(call_from_another_thread)
    cache.manager.on_pressure(call_from_another_thread)
    cache.run("a", range(8))
    cache.manager.allocate("b", 9 * BLOCK)
    assert len(answers) == 4, "one event, one change of pressure"
    assert answers[1] is answers[3] is False


def test_callback_may_call_the_manager(cache: Cache) -> None:
    cache.manager.subscribe(lambda event: cache.manager.clear_prefix_cache() if type(event) is BlocksStored else None)
    cache.run("a", range(8))
    assert cache.manager.stats().published_blocks == 0
    cache.check()


def test_listeners_hear_everything_in_order() -> None:
    """Also of what the first listener does to the cache when it is called."""
    cache, heard = Cache(), list[str]()

    def clear_at_once(event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            cache.manager.clear_prefix_cache()

    cache.manager.subscribe(clear_at_once)
    cache.manager.subscribe(lambda event: heard.append(type(event).__name__))
    cache.run("a", range(8))
    assert heard == ["BlocksStored", "CacheCleared"]


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
