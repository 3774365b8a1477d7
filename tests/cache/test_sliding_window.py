"""Blocks out of every later token's sight are given back, and nothing that one can still see."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import CacheGroup, InvalidInputError, KvCacheHandle
from paged.cache.groups import ROLLBACK_SLACK
from paged.cache.manager import PagedKvCacheManager
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from tests.cache.prefix_cache import BLOCK, Cache
from tests.pairwise import pairwise

SLIDING = 6
KINDS = ["alone", "beside others"]


def make(device: torch.device, kind: str, window: int = SLIDING) -> Cache:
    """Layers that all have a window; or 1 and 3 have one, 0 and 2 see everything, 4 reads another's K/V."""
    groups = [CacheGroup((0, 2)), CacheGroup((1, 3), sliding_window=window)]
    changes: dict[str, Any] = {"sliding_window": window} if kind == "alone" else {"num_layers": 5, "groups": groups}
    return Cache(device=device, num_blocks=200, num_swap_blocks=100, **changes)


def of_window(cache: Cache, handle: KvCacheHandle) -> tuple[int, ...]:
    """The blocks of the last table, which has the window."""
    num_tables = len(cache.manager.config.tables)
    return handle.blocks[num_tables - 1 :: num_tables]


@pairwise(kind=KINDS, window=[1, 6, 16], chunk=[1, 7, 50])
def test_only_what_no_later_token_sees_is_given_back(kind: str, window: int, chunk: int, device: torch.device) -> None:
    cache = make(device, kind, window)
    handle = cache.begin("a", [] if kind == "alone" else range(150))
    assert not any(of_window(cache, handle)), "a long prompt's blocks come with its chunks"
    for start in range(0, 150, chunk):
        cache.feed(handle, range(start, min(start + chunk, 150)))
        # After a rollback of ROLLBACK_SLACK the next token sees window positions, itself included.
        gone = max(0, handle.num_tokens - ROLLBACK_SLACK - window + 1) // BLOCK
        held = -(-handle.num_tokens // BLOCK)
        assert [bool(block) for block in of_window(cache, handle)[:held]] == [index >= gone for index in range(held)]
        assert kind == "alone" or 0 not in handle.blocks[::2]
        cache.check(handle)
    assert cache.manager.stats().used_blocks == held - gone + (0 if kind == "alone" else held)
    assert cache.manager.stats().used_blocks == sum(t.blocks_kept(150, BLOCK) for t in cache.manager.config.tables)
    row = torch.zeros(1, 1, 8)
    for call in (
        lambda at: cache.manager.read_kv(handle, 1, at, 2),
        lambda at: cache.manager.write_kv(handle, 1, at, row, row),
    ):
        with pytest.raises(InvalidInputError, match="behind its sliding window"):
            call(gone * BLOCK - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_share_with_a_gap(kind: str, device: torch.device) -> None:
    cache = make(device, kind)
    handle, target = cache.run("a", range(150)), cache.begin("b", [])
    with pytest.raises(InvalidInputError, match="behind its sliding window"):
        cache.manager.share_prefix_blocks(handle, target, 10)
    if kind != "alone":
        cache.manager.share_prefix_blocks(handle, target, 37)
        cache.tokens[target] = list(range(148))
        cache.feed(target, range(300, 330))
        assert cache.manager.stats().cow_copies == 0
    for one in (handle, target):
        cache.check(one)
        cache.truncate(one, 0)
    assert cache.manager.stats().used_blocks == 0


@pytest.mark.parametrize("chunk", [30, 150])
def test_prompt_begins_with_what_ran_before(chunk: int, device: torch.device) -> None:
    """Chunks beyond a window are published before they are given back."""
    cache = make(device, "alone")
    first = cache.begin("a", range(150))
    for start in range(0, 150, chunk):
        cache.feed(first, range(start, start + chunk))
    assert cache.found(range(150)) == 148
    cache.free(first)
    second = cache.run("b", range(150))
    assert second.num_cached_tokens == 148
    assert second.blocks.count(0) == (150 - ROLLBACK_SLACK - SLIDING + 1) // BLOCK
    cache.check(second)


def test_a_hit_takes_only_what_windows_see(device: torch.device) -> None:
    cache = make(device, "beside others")
    cache.free(cache.run("a", range(100)))
    second = cache.begin("b", [*range(100), 7])
    assert second.num_cached_tokens == 100
    assert 0 not in second.blocks[::2]
    seen = (100 - SLIDING + 1) // BLOCK
    assert [bool(block) for block in second.blocks[1::2]] == [index in range(seen, 25) for index in range(26)]
    cache.feed(second, [7])
    assert cache.run("c", range(100)).num_cached_tokens == 99
    cache.check()


CHUNK = 80


class Chunked(CacheGroup):
    """Layers whose tokens see the tokens of their own chunk."""

    @property
    def most_seen(self) -> int | None:
        return CHUNK

    def first_seen_block(self, num_tokens: int, block_size: int) -> int:
        return num_tokens // CHUNK * CHUNK // block_size


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20])
def test_a_group_may_have_another_rule_than_a_window(host_cache_bytes: int, device: torch.device) -> None:
    """A prefix that ends with a chunk needs no block of it; one within a chunk needs the blocks from its start on."""
    groups = [CacheGroup((0,)), Chunked((1,))]
    cache = Cache(device=device, num_blocks=200, groups=groups, host_cache_bytes=host_cache_bytes)
    num_before = CHUNK // BLOCK
    first = cache.begin("a", [])
    for start in range(0, 150, 10):
        cache.feed(first, range(start, start + 10))
    assert [bool(block) for block in first.blocks[1::2]] == [False] * num_before + [True] * (38 - num_before)
    cache.check()
    cache.free(first)
    assert cache.manager.evict(num_before) == num_before  # the chunk's blocks were freed first
    border = cache.begin("b", [*range(CHUNK), 900])
    assert border.num_cached_tokens == CHUNK
    assert not any(border.blocks[1::2])
    cache.free(border)
    if host_cache_bytes:
        cache.manager.evict(200)
    within = cache.begin("c", range(150))
    assert within.num_cached_tokens == 148
    assert [bool(block) for block in within.blocks[1::2]][: 148 // BLOCK] == [False] * num_before + [True] * 17
    assert cache.manager.stats().host_loaded_blocks == (37 + 17 if host_cache_bytes else 0)
    cache.check()


@pytest.mark.parametrize(("family", "num_blocks"), [("mistral", 12), ("gemma3", 13), ("gpt_oss", 13)])
@pytest.mark.thorough
def test_generates_like_transformers_in_bounded_room(family: str, num_blocks: int, tmp_path: Path) -> None:
    from tests.models.families import FAMILIES, WINDOW, Case, assert_same_logits, save_checkpoint, tokens

    config = deepcopy(FAMILIES[family])
    config.max_position_embeddings = 256
    theirs = save_checkpoint(config, tmp_path)
    block_size = 8
    case = Case(theirs, load_model(tmp_path, block_size=block_size, num_blocks=num_blocks))
    manager = case.ours.kv_manager
    windows = [table.sliding_window for table in manager.config.tables]
    assert windows == ([WINDOW] if family == "mistral" else [None, WINDOW])
    known = tokens(20)
    assert len(known) > WINDOW
    rows = [case.ours.prefill("a", known)]
    for _ in range(100):
        known.append(int(rows[-1].argmax()))
        rows.append(case.ours.decode("a", known[-1], len(known) - 1))
        behind_window, whole = (ROLLBACK_SLACK + WINDOW) // block_size + 2, -(-len(known) // block_size)
        assert manager.stats().used_blocks <= behind_window + whole * windows.count(None)
    assert num_blocks < len(known) // block_size  # which would take that many of every layer
    assert_same_logits(torch.stack(rows), case.expected(known)[19:])
    manager.check_integrity()
    # Of a cache that keeps everything the same.
    plain = replace(manager.config, sliding_window=None, groups=None, num_blocks=15)
    model = PagedCausalLM(case.ours.network, PagedKvCacheManager(plain))
    whole_rows = [model.prefill("a", known[:20])]
    whole_rows += [model.decode("a", known[position], position) for position in range(20, 120)]
    assert_same_logits(torch.stack(rows), torch.stack(whole_rows))
    assert 0 not in model.kv_manager.handles()[0].blocks
