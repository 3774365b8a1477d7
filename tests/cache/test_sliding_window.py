"""Blocks out of every later token's sight are given back, and nothing that one can still see."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paged import InvalidInputError
from paged.cache.groups import ROLLBACK_SLACK
from paged.cache.manager import PagedKvCacheManager
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from tests.cache.prefix_cache import BLOCK, Cache
from tests.cache.snapshot import snapshot
from tests.models.families import FAMILIES, WINDOW, Case, assert_same_logits, save_checkpoint, tokens

SLIDING = 6

pytestmark = pytest.mark.usefixtures("torch_backend")


@pytest.fixture
def cache(device: torch.device) -> Cache:
    return Cache(device=device, num_blocks=64, sliding_window=SLIDING, num_swap_blocks=32)


@pytest.mark.parametrize("window", [1, 6, 16])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_only_what_no_later_token_sees_is_given_back(window: int, chunk: int, device: torch.device) -> None:
    cache = Cache(device=device, num_blocks=64, sliding_window=window)
    handle = cache.begin("a", [])
    for start in range(0, 150, chunk):
        cache.feed(handle, range(start, min(start + chunk, 150)))
        # After a rollback of ROLLBACK_SLACK the next token sees window positions, itself included.
        seen = max(0, handle.num_tokens - ROLLBACK_SLACK - window + 1)
        gone = handle.blocks.count(0)
        assert gone == seen // BLOCK
        assert 0 not in handle.blocks[gone:]
        cache.check(handle)
    assert cache.manager.stats().used_blocks <= (ROLLBACK_SLACK + window) // BLOCK + 2
    with pytest.raises(InvalidInputError, match="sliding window"):
        cache.manager.read_kv(handle, 0, gone * BLOCK - 1, 2)
    row = torch.zeros(1, 8)
    with pytest.raises(InvalidInputError, match="sliding window"):
        cache.manager.write_kv(handle, 0, gone * BLOCK - 1, row, row)


def test_without_a_window_all_is_kept(device: torch.device) -> None:
    cache = Cache(device=device, num_blocks=64)
    handle = cache.run("a", range(150))
    assert 0 not in handle.blocks
    cache.check()


def test_room_is_given_back_for_others(device: torch.device) -> None:
    cache = Cache(device=device, num_blocks=40, sliding_window=SLIDING)
    handles = [cache.begin(i, []) for i in range(2)]
    for step in range(30):  # 150 tokens each, of which 160 fit together
        for handle in handles:
            cache.feed(handle, [1000 * int(handle.cache_id) + step] * 5)
        cache.check()
        assert min(handle.blocks.count(0) for handle in handles) == max(0, 5 * step + 5 - 69) // BLOCK


def test_rollback_within_the_slack(cache: Cache) -> None:
    handle = cache.run("a", range(150))
    cache.truncate(handle, 150 - ROLLBACK_SLACK)
    cache.check(handle)
    cache.feed(handle, range(500, 540))
    cache.check(handle)


def test_rollback_beyond_what_is_kept(cache: Cache) -> None:
    handle = cache.run("a", range(150))
    first_kept = handle.blocks.count(0) * BLOCK
    before = snapshot(cache.manager)
    for length in (1, 50, first_kept + SLIDING - 2):
        with pytest.raises(InvalidInputError, match="sliding window"):
            cache.manager.truncate(handle, length)
        assert snapshot(cache.manager) == before
    # The next token would stand at first_kept + SLIDING - 1, and sees from first_kept on.
    cache.truncate(handle, first_kept + SLIDING - 1)
    cache.check(handle)
    cache.truncate(handle, 0)
    assert cache.manager.stats().used_blocks == 0


def test_fork_swap_and_share_with_a_gap(cache: Cache) -> None:
    handle = cache.run("a", range(150))
    gap = handle.blocks.count(0)
    assert gap > 0
    fork = cache.manager.fork(handle, "b")
    cache.tokens[fork] = list(range(150))
    cache.feed(fork, [7, 8, 9])
    cache.check(handle, fork)
    with pytest.raises(InvalidInputError, match="sliding window"):
        cache.manager.share_prefix_blocks(handle, cache.manager.allocate("c"), 2)
    cache.manager.swap_out(handle)
    cache.manager.swap_out(fork)
    other = cache.run("d", range(600, 700))
    cache.manager.swap_in(fork)
    cache.manager.swap_in(handle)
    assert handle.blocks.count(0) == gap
    cache.check(handle, fork)
    for each in (handle, fork, other):
        cache.free(each)
    assert cache.manager.stats().used_blocks == 0
    cache.manager.check_integrity()


def test_prompt_begins_with_what_ran_before(cache: Cache) -> None:
    first = cache.begin("a", [])
    for start in range(0, 150, 30):
        cache.feed(first, range(start, start + 30))
    cache.free(first)
    second = cache.run("b", range(150))
    assert second.num_cached_tokens == 148
    assert second.blocks.count(0) == (150 - ROLLBACK_SLACK - SLIDING + 1) // BLOCK
    cache.check(second)


@pytest.mark.parametrize(("family", "num_blocks"), [("mistral", 12), ("gemma3", 13), ("gpt_oss", 13)])
def test_generates_like_transformers_in_bounded_room(family: str, num_blocks: int, tmp_path: Path) -> None:
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
    assert len(known) == 120
    assert num_blocks < 120 // block_size  # which would take that many of every layer
    assert_same_logits(torch.stack(rows), case.expected(known)[19:])
    manager.check_integrity()
    # Of a cache that keeps everything the same, bit by bit.
    plain = replace(manager.config, sliding_window=None, groups=None, num_blocks=15)
    model = PagedCausalLM(case.ours.network, PagedKvCacheManager(plain))
    whole_rows = [model.prefill("a", known[:20])]
    whole_rows += [model.decode("a", known[position], position) for position in range(20, 120)]
    assert torch.equal(torch.stack(rows), torch.stack(whole_rows))
    assert 0 not in model.kv_manager.handles()[0].blocks
