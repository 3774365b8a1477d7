"""What priorities and pins promise: what must be found, what may be evicted, and that nobody starves."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paged import (
    CacheGroup,
    InvalidInputError,
    KvSlotRequest,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    PinBudgetError,
    PinnedPrefix,
    RecurrentSpec,
    Retention,
)
from paged.cache import pins, retention

BLOCK = 4
CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "some windows": {"num_layers": 2, "groups": (CacheGroup((0,)), CacheGroup((1,), sliding_window=6))},
    "states": {"num_layers": 2, "groups": (CacheGroup((0,)),), "recurrent": RecurrentSpec((1,), 1, 4, num_slots=24)},
    "tier": {"host_cache_bytes": 1 << 12},
}


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (retention, pins):
        monkeypatch.setattr(module, "time", clock)
    return clock


def make(name: str = "plain", num_blocks: int = 24, **options: Any) -> PagedKvCacheManager:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "block_size": BLOCK, "dtype": torch.float32}
    options = {"device": "cpu", "num_blocks": num_blocks} | sizes | CACHES[name] | options
    return PagedKvCacheManager(PagedKvCacheConfig(**options))


def run(manager: PagedKvCacheManager, ids: Sequence[int], **options: Any) -> int:
    """Run a prompt and two more tokens; return how many tokens were cached."""
    handle = manager.allocate("a", token_ids=ids, **options)
    num_cached = handle.num_cached_tokens
    tokens = [*ids, 7, 8]
    while handle.num_tokens < len(tokens):
        end = min(len(ids) if handle.num_tokens < len(ids) else len(tokens), handle.num_tokens + 2 * BLOCK)
        end = manager.chunk_end(handle, end, end)
        with manager.reserve([KvSlotRequest("a", end)]) as reservation:
            reservation.commit([tokens[handle.num_tokens : end]])
    manager.free(handle)
    return num_cached


def prompt(number: int, num_blocks: int) -> list[int]:
    return [number * 100 + index for index in range(num_blocks * BLOCK + 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CACHES)
def test_pinned_prefixes_always_hit_and_nobody_starves(name: str, clock: Clock) -> None:
    """10,000 requests of up to the longest length, beside pins over half of the pool that come and go."""
    draw = random.Random(name)
    manager = make(name, num_blocks=60, max_pinned_fraction=0.6)
    longest = manager.config.capacity_tokens
    held: dict[int, PinnedPrefix] = {}
    most_pinned = 0
    for count in range(10_000):
        clock.now += draw.random()
        number = draw.randrange(12)
        ids = prompt(number, 2 + number % 3)
        if draw.random() < 0.05:
            for other in [other for other in held if draw.random() < 0.3]:
                held.pop(other).release()
        if draw.random() < 0.2 and number not in held:
            run(manager, ids)
            try:
                held[number] = manager.pin(ids)
            except PinBudgetError:
                assert manager.stats().num_pins == len(held)
        most_pinned = max(most_pinned, manager.stats().pinned_blocks)
        if number in held:
            assert run(manager, ids) >= held[number].num_tokens
        else:
            length = draw.randrange(1, longest - 2)
            run(manager, [10_000 + draw.randrange(1 << 20) for _ in range(length)], retention=any_retention(draw))
        if count % 100 == 0:
            manager.check_integrity()
    assert most_pinned > 30
    for pin in held.values():
        pin.release()
    assert manager.stats().used_blocks == 0


def any_retention(draw: random.Random) -> Retention | None:
    if draw.random() < 0.5:
        return None
    return Retention(
        priority=draw.choice([10, 50, 90]),
        ttl_s=draw.choice([None, 3.0, 20.0]),
        num_tokens=draw.choice([None, BLOCK, 2 * BLOCK]),
    )


@pytest.mark.parametrize("num_requests", [300, pytest.param(6000, marks=pytest.mark.thorough)])
def test_the_lowest_and_oldest_blocks_are_evicted_first(num_requests: int, clock: Clock) -> None:
    """After each call, no evicted block was worth more than a free one that stays, by a model of all calls."""
    draw = random.Random(num_requests)
    manager = make(num_blocks=20)
    levels: dict[tuple[int, ...], tuple[int, float]] = {}  # priority and end by the ids up to the end of a block
    used: dict[tuple[int, ...], int] = {}  # when each was last in use
    num_evicted = dict.fromkeys((0, 10, 50, 90), 0)

    def worth(key: tuple[int, ...]) -> tuple[int, int]:
        priority, end = levels.get(key, (0, 0.0))
        if end <= clock.now:
            priority = 0
        return priority, used[key]

    for count in range(num_requests):
        clock.now += draw.choice([0.0, 1.0])
        number, asked = draw.randrange(14), any_retention(draw)
        ids = prompt(number, 1 + number % 4)
        keys = [tuple(ids[:end]) for end in range(BLOCK, len(ids), BLOCK)]
        before = {key: worth(key) for key in used}
        run(manager, ids, retention=asked)
        evicted = [key for key in before if len(matching(manager, key)) * BLOCK < len(key)]
        stayed = [key for key in before if key not in evicted and key not in keys]
        for lost in evicted:
            for kept in stayed:
                assert before[lost] < before[kept], (lost, kept)
            num_evicted[before[lost][0]] += 1
            levels.pop(lost, None)
            del used[lost]
        for place, key in enumerate(keys):
            used[key] = count * 10 - place  # the tail of a prompt goes before its head
            last = levels.get(key, (0, 0.0))
            if key in levels and last[1] <= clock.now:
                del levels[key]
            if asked is not None and len(key) <= (asked.num_tokens or len(ids)):
                end = float("inf") if asked.ttl_s is None else clock.now + asked.ttl_s
                last = levels.get(key, (0, 0.0))
                levels[key] = max(last[0], asked.priority), max(last[1], end)
    manager.check_integrity()
    assert num_requests < 1000 or min(num_evicted.values()) > 10, num_evicted


def matching(manager: PagedKvCacheManager, ids: tuple[int, ...]) -> list[int]:
    blocks, _ = manager._prefixes.index.match(list(ids), None)
    return blocks


@pytest.mark.parametrize("name", CACHES)
def test_a_retained_prompt_outlives_others_until_its_time_is_over(name: str, clock: Clock) -> None:
    manager = make(name)
    ids = prompt(1, 3)
    run(manager, ids, retention=Retention(ttl_s=10))
    for number in range(2, 30):
        run(manager, prompt(number, 3))
    assert run(manager, ids) == 3 * BLOCK
    clock.now += 10
    for number in range(30, 100):  # more than the tier holds
        run(manager, prompt(number, 3))
    assert run(manager, ids) == 0
    assert manager.stats().retained_blocks == 0
    manager.check_integrity()


def test_the_tier_keeps_what_has_a_priority(clock: Clock) -> None:
    """Blocks that the device has to evict, because all it has is retained, come back with their priority."""
    block_bytes = make().stats().bytes_per_block
    manager = make("tier", num_blocks=8, host_cache_bytes=8 * block_bytes)
    ids = prompt(1, 3)
    run(manager, ids, retention=Retention(10))
    for number in (2, 3):
        run(manager, prompt(number, 3), retention=Retention(90))
    for number in range(4, 12):
        run(manager, prompt(number, 1))
    handle = manager.allocate("b", token_ids=ids)
    assert handle.num_loaded_tokens > 0
    manager.free(handle)
    assert manager._pool.priorities.levels[matching(manager, tuple(ids))[0]].priority == 10
    manager.check_integrity()


def test_pins_end_and_are_refused_as_they_say(clock: Clock) -> None:
    manager = make(max_pinned_fraction=0.25)
    ids = prompt(1, 3)
    with pytest.raises(InvalidInputError, match="none of their blocks is cached"):
        manager.pin(ids)
    run(manager, ids)
    run(manager, ids, namespace="tenant")
    run(manager, prompt(2, 4))
    with manager.pin(ids) as pin:
        assert (pin.num_tokens, manager.stats().pinned_blocks, pin.is_held) == (3 * BLOCK, 3, True)
        again = manager.pin(ids)  # the same blocks count once
        with pytest.raises(PinBudgetError) as refused:
            manager.pin(prompt(2, 4))
        assert (refused.value.needed, refused.value.free) == (7, 6)
        assert (manager.stats().pinned_blocks, manager.stats().num_pins) == (3, 2)
        manager.release(again)
    manager.release(pin)  # a second time
    assert manager.stats().used_blocks == 0

    pin = manager.pin(ids, ttl_s=5)
    clock.now += 5
    run(manager, [1])
    assert not pin.is_held

    pins_of_both = [manager.pin(ids, namespace=namespace) for namespace in (None, "tenant")]
    manager.forget_namespace("tenant")
    assert [pin.is_held for pin in pins_of_both] == [True, False]
    manager.clear_prefix_cache()
    assert not pins_of_both[0].is_held
    assert manager.stats().used_blocks == 0
    manager.check_integrity()
    without_pins = make()
    run(without_pins, ids)
    with pytest.raises(PinBudgetError):
        without_pins.pin(ids)
    with pytest.raises(InvalidInputError, match="of this manager"):
        make().release(pin)


def test_a_prefix_with_a_priority_is_copied_before_its_last_token_runs_again(clock: Clock) -> None:
    """A prompt that is cached whole computes its last token again, which must not cost the block its priority."""
    manager = make()
    ids = prompt(1, 2)[:-1]
    run(manager, ids, retention=Retention())
    assert run(manager, ids) == 2 * BLOCK - 1
    assert manager.stats().retained_blocks == 2
    manager.check_integrity()
