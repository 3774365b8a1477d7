"""How full the pool is: the edges of the watermarks, and who is told when they are crossed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paged import InvalidInputError, MemoryPressure, OutOfBlocksError, PagedKvCacheConfig, PagedKvCacheManager
from paged.batch import KvSlotRequest

LOW, HIGH, CRITICAL = MemoryPressure.LOW, MemoryPressure.HIGH, MemoryPressure.CRITICAL
BLOCK = 4
CONFIG = PagedKvCacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, num_blocks=10, device="cpu")


def make(**changes: Any) -> tuple[PagedKvCacheManager, list[MemoryPressure]]:
    """A manager, and the list of what it tells."""
    manager = PagedKvCacheManager(replace(CONFIG, **changes))
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
    manager, levels = make(num_blocks=num_blocks, low_watermark=low, high_watermark=high)
    measured = [manager.pressure]
    for i in range(num_blocks):
        manager.allocate(i, 1)
        measured.append(manager.pressure)
    assert measured == expected
    changes = [now for before, now in pairwise(expected) if now is not before]
    assert levels == changes
    assert manager.metrics_snapshot()["pressure"] == expected[-1].value


def test_watermarks_in_the_wrong_order() -> None:
    for low, high in ((0.1, 0.3), (1.1, 0.1), (0.3, -0.1)):
        with pytest.raises(InvalidInputError, match="watermark"):
            replace(CONFIG, low_watermark=low, high_watermark=high)


def test_cached_blocks_count_as_available() -> None:
    manager, levels = make()
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


def test_told_once_a_change_and_by_every_kind_of_call() -> None:
    manager, levels = make(num_swap_blocks=8)

    def told() -> list[MemoryPressure]:
        news = levels.copy()
        levels.clear()
        return news

    first = manager.allocate("a", 7 * BLOCK)
    assert told() == []
    second = manager.allocate("b", BLOCK)
    assert told() == [HIGH]
    manager.allocate("c", BLOCK)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("d", 2 * BLOCK)
    assert told() == []
    reservation = manager.reserve([KvSlotRequest("b", 2 * BLOCK)])
    assert told() == [CRITICAL]
    reservation.rollback()
    assert told() == [HIGH]
    with pytest.raises(KeyError), manager.reserve([KvSlotRequest("b", 2 * BLOCK)]):
        raise KeyError
    assert told() == [CRITICAL, HIGH]
    with manager.reserve([KvSlotRequest("b", 2 * BLOCK)]) as reservation:
        reservation.commit()
    assert told() == [CRITICAL]
    manager.truncate(second, BLOCK)
    assert told() == [HIGH]
    manager.extend(second, BLOCK)
    assert told() == [CRITICAL]
    manager.swap_out(second)
    assert told() == [HIGH]
    manager.swap_in(second)
    assert told() == [CRITICAL]
    manager.free(first)
    assert told() == [LOW]
    manager.free(first)
    assert told() == []


def test_every_listener_is_told() -> None:
    manager, levels = make()
    more: list[MemoryPressure] = []
    manager.on_pressure(more.append)
    manager.allocate("a", 10 * BLOCK)
    assert levels == more == [CRITICAL]


def test_changes_before_registration_are_not_told() -> None:
    manager, levels = PagedKvCacheManager(CONFIG), list[MemoryPressure]()
    handle = manager.allocate("a", 10 * BLOCK)
    manager.on_pressure(levels.append)
    assert levels == []
    manager.free(handle)
    assert levels == [LOW]
