"""A prompt begins where the cache has blocks and state, although one of them is evicted between match and load."""

import pytest

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.cache.tiers.files import FileRead
from tests.cache.recurrent.hashing_model import HashingModel, make_manager
from tests.cache.tiers.test_files import DictStore
from tests.deadline import HANG_S

PROMPT = [token * 5 % 7 for token in range(21)]
LENGTH = len(PROMPT) - 1


class Prompts:
    """Runs prompts, with a snapshot of the state before the last token, and checks all states after each."""

    def __init__(self, manager: PagedKvCacheManager) -> None:
        self.manager, self.model = manager, HashingModel(manager)

    def run(self, tokens: list[int], from_files: FileRead | None = None) -> int:
        """Return how many tokens were cached."""
        handle: KvCacheHandle = self.manager.allocate("prompt", token_ids=tokens, from_files=from_files)
        num_cached = handle.num_tokens
        for end in (LENGTH, len(tokens)):
            if end > handle.num_tokens:
                self.model.run([(handle, tokens[handle.num_tokens : end])])
        self.model.check({"prompt": tokens})
        self.manager.free(handle)
        return num_cached


def with_one_host_state(num_blocks: int) -> Prompts:
    """Host memory for one state, and for the blocks of three prompts."""
    manager = make_manager(4, num_blocks=num_blocks, ring=200, num_swap_slots=0, host_cache_bytes=8192)
    assert manager._kinds[-1].shelf.pool.num_blocks == 1
    return Prompts(manager)


def test_a_state_is_replaced_by_those_of_blocks_that_its_own_replace() -> None:
    """The load evicts blocks of another prompt, whose state takes the only place in host memory."""
    prompts = with_one_host_state(num_blocks=8)
    prompts.run(PROMPT)
    prompts.manager.evict(8)
    prompts.run([token + 10 for token in PROMPT])
    assert prompts.run(PROMPT) == LENGTH
    assert prompts.run([token + 10 for token in PROMPT]) == LENGTH
    assert prompts.manager.stats().host_loaded_states == 2


@pytest.mark.parametrize(("later", "num_cached"), [((), LENGTH), ((10,), LENGTH), ((10, 20), 0)])
def test_a_state_is_evicted_while_files_are_read(later: tuple[int, ...], num_cached: int) -> None:
    """Later prompts take its slot, then its place in host memory; its blocks stay there."""
    prompts = with_one_host_state(num_blocks=16)
    prompts.run(PROMPT)
    prompts.manager.attach_store(DictStore())
    read = prompts.manager.read_files(PROMPT)
    assert read is not None
    read.wait(HANG_S)
    for first in later:
        prompts.manager.evict(16)
        prompts.run([token + first for token in PROMPT])
    assert prompts.run(PROMPT, read) == num_cached


def test_a_state_comes_back_to_blocks_that_stayed() -> None:
    """Sequences without full blocks take its slot, so that the device has all of the prompt but the state."""
    prompts = with_one_host_state(num_blocks=60)
    prompts.run(PROMPT)
    others = [prompts.manager.allocate(name) for name in range(4)]
    for other in others:
        prompts.model.run([(other, [50])])
    stats = prompts.manager.stats()
    assert (stats.state_snapshots, stats.evictions, stats.host_states) == (0, 0, 1)
    for other in others:
        prompts.manager.free(other)
    assert prompts.run(PROMPT) == LENGTH
    assert prompts.manager.stats().host_loaded_states == 1


def test_a_load_may_evict_the_snapshot_that_the_prompt_would_use_without_it() -> None:
    """The evicted snapshot does not take the only place in host memory from the state that is loaded."""
    manager = make_manager(3, num_blocks=20, ring=200, num_swap_slots=0, host_cache_bytes=8192)
    prompts = Prompts(manager)
    prompts.run(PROMPT)
    manager.evict(20)
    short = manager.allocate("short", token_ids=PROMPT[:9])
    prompts.model.run([(short, PROMPT[:8])])
    prompts.model.run([(short, PROMPT[8:9])])
    manager.free(short)
    others = {name: [50] for name in ("x", "y")}  # they leave the slot of the snapshot behind token 8 alone
    for name in others:
        prompts.model.run([(manager.allocate(name), [50])])
    stats = manager.stats()
    assert (stats.state_snapshots, stats.free_state_slots, stats.host_states) == (1, 1, 1)
    handle = manager.allocate("prompt", token_ids=PROMPT)
    assert (handle.num_tokens, handle.num_loaded_tokens, manager.stats().host_loaded_states) == (LENGTH, 12, 1)
    prompts.model.check({"prompt": PROMPT[:LENGTH], **others})
