"""Files of a rank other than 0, which holds other data in the same blocks."""

from unittest.mock import Mock

import pytest

from paged.errors import RankFailedError
from tests.cache.tiers.ranked_cache import RankedCache
from tests.cache.tiers.test_files import TOKENS, DictStore, hold_reads_of_host
from tests.deadline import HANG_S


def start(stores: list[DictStore]) -> RankedCache:
    """Host memory for one sequence of TOKENS, swapped out or evicted."""
    cache = RankedCache(device="cpu", num_blocks=30, num_swap_blocks=11, host_cache_bytes=11 * 512)
    remaining = iter(stores)
    cache.attach(lambda: next(remaining))
    cache.set_weights(0)
    return cache


def test_memory_that_is_used_again_is_not_written_as_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swapped sequence takes it before the other rank's writes begin."""
    stores = [DictStore(), DictStore()]
    cache = start(stores)
    begun, go_on = hold_reads_of_host(cache.other, monkeypatch)
    cache.free(cache.run("a", TOKENS))
    cache.manager.evict(30)
    cache.send()
    assert begun.wait(HANG_S)
    cache.manager.swap_out(cache.run("b", [token + 50 for token in TOKENS]))
    cache.send()
    go_on.set()
    cache.close(HANG_S)
    cache = start(stores)
    cache.run("a", TOKENS)
    cache.check()


def test_reads_that_nobody_takes_are_forgotten() -> None:
    """On the other rank, when the request that waited for them is gone."""
    stores = [DictStore(), DictStore()]
    cache = start(stores)
    cache.free(cache.run("a", TOKENS))
    cache.close(HANG_S)
    cache = start(stores)
    read = cache.manager.read_files(TOKENS)
    assert read is not None
    assert read.wait()
    assert len(read.blocks) == 10
    assert len(cache.other_files._reads) == 1
    del read
    cache.send()
    assert not cache.other_files._reads
    assert cache.run("a", TOKENS).num_cached_tokens == 40


def test_a_rank_that_has_ended_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step tells of it."""
    stores = [DictStore(), DictStore()]
    cache = start(stores)
    cache.free(cache.run("a", TOKENS))
    cache.close(HANG_S)
    cache = start(stores)
    tier = cache.manager.files
    assert tier is not None
    monkeypatch.setattr(tier, "compare", Mock(side_effect=RankFailedError("rank 1 has ended")))
    assert cache.run("a", TOKENS).num_cached_tokens == 0
    assert tier.num_faults == 1
