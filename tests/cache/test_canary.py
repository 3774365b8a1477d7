"""PAGED_CANARY=1: nothing right is refused, and every planted fault of the cache is, with its place."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from paged import (
    CacheGroup,
    CanaryError,
    InvalidInputError,
    KvCacheHandle,
    KvSlotRequest,
    OutOfBlocksError,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    RecurrentSpec,
    UnifiedBatchItem,
)
from paged.cache.canary import Canaries
from paged.cache.host_blocks import HostMemory
from paged.cache.prefix_index import PrefixIndex
from paged.cache.tensors import KvCacheTensors
from paged.step.batch_step import step_of
from paged.step.step import Step

BLOCK = 4
_LOCAL = CacheGroup(layers=(1, 2), sliding_window=6)
CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"dtype": torch.int8},
    "no prefix cache": {"enable_prefix_cache": False},
    "window": {"sliding_window": 6},
    "groups": {"num_layers": 3, "groups": [CacheGroup(layers=(0,)), _LOCAL], "num_blocks": 200},
    "latents": {"groups": [CacheGroup((0, 1), num_kv_heads=1, head_dim=16, v_head_dim=8, latent=True)]},
    "states": {
        "groups": [CacheGroup(layers=(0,))],
        "recurrent": RecurrentSpec((1,), conv_channels=8, conv_width=4, num_slots=300, num_swap_slots=8),
    },
    "states alone": {
        "groups": [],
        "recurrent": RecurrentSpec((0, 1), conv_channels=8, conv_width=4, num_slots=300, num_swap_slots=8),
    },
    "tier": {"host_cache_bytes": 1 << 16},
}
SHARING = [name for name in CACHES if name != "no prefix cache"]
A, B = list(range(30, 43)), [*range(30, 38), 7, 8, 9, 10, 11]  # 13 tokens, of which 8 are the same


@pytest.fixture(autouse=True)
def _canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CANARY", "1")


class Checked:
    """A cache whose forwards write and check canaries, and compute nothing."""

    def __init__(self, **changes: Any) -> None:
        options = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": BLOCK, "num_blocks": 64}
        options |= {"num_swap_blocks": 64, "device": "cpu"}
        self.manager = PagedKvCacheManager(PagedKvCacheConfig(**options | changes))
        for part in self.manager.tensors.host._parts:
            part._host.zero_()  # it may be the memory of an earlier test, with the canaries of the same tokens

    def begin(self, seq_id: str, tokens: Sequence[int], namespace: str | None = None) -> KvCacheHandle:
        """Run a prompt but for what is cached."""
        handle = self.manager.allocate(seq_id, token_ids=tokens, namespace=namespace)
        while handle.num_tokens < len(tokens):
            end = self.manager.chunk_end(handle, len(tokens), len(tokens))
            self.run((handle, tokens[handle.num_tokens : end]))
        return handle

    def run(self, *items: tuple[KvCacheHandle, Sequence[int]], device_ids: torch.Tensor | None = None) -> None:
        """One forward."""
        batch = []
        for handle, tokens in items:
            batch.append(UnifiedBatchItem(handle.cache_id, tokens, kv_cache=handle, pos_offset=handle.num_tokens))
        with step_of(self.manager, batch, device_ids=device_ids) as step:
            self.forward(step)

    def forward(self, step: Step) -> None:
        assert self.manager.canaries is not None
        self.manager.canaries.before_forward(step)

    def set_blocks(self, handle: KvCacheHandle, change: Callable[[list[int]], None]) -> None:
        """Change a sequence's blocks behind the cache's back."""
        blocks = list(handle.blocks)
        change(blocks)
        handle._state.blocks = tuple(blocks)


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> Checked:
    return Checked(**CACHES[request.param])


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest) -> Checked:
    """A cache that shares prefixes."""
    return Checked(**CACHES[request.param])


def swap(first: int, second: int) -> Callable[[list[int]], None]:
    """Exchange two entries."""

    def change(blocks: list[int]) -> None:
        blocks[first], blocks[second] = blocks[second], blocks[first]

    return change


def do_nothing(*_: object, **__: object) -> None:
    pass


# Right caches.


def test_whatever_a_cache_does_right_is_accepted(cache: Checked) -> None:
    """Hits, forks, drafts that are rejected, failed steps, swaps, clears, and many tokens behind a window."""
    manager = cache.manager
    first, second = cache.begin("first", A), cache.begin("second", B)
    other = cache.begin("other", A, namespace="other")
    fork = manager.fork(first, "fork")
    cache.run((first, [1]), (fork, [2]), (second, [3]), (other, [1]))
    for count in range(40):
        cache.run((first, [count]), (second, [count, 5, 6, 7]), (fork, [9]))
        manager.truncate(second, second.num_tokens - 3)
    with suppress(ZeroDivisionError), step_of(manager, one_more(first, 77)) as step:
        cache.forward(step)
        raise ZeroDivisionError
    cache.run((first, [78]), (fork, [77]))
    manager.swap_out(first)
    manager.check_integrity()
    third = cache.begin("third", A)
    manager.swap_in(first)
    cache.run((first, [8]), (third, [8]))
    manager.check_integrity()
    for handle in (first, second, other, fork):
        manager.free(handle)
    manager.evict(100)
    cache.begin("fourth", [*A, 4])
    manager.clear_prefix_cache()
    cache.begin("fifth", [*A, 4])
    manager.check_integrity()


def one_more(handle: KvCacheHandle, token: int) -> list[UnifiedBatchItem]:
    return [UnifiedBatchItem(handle.cache_id, [token], kv_cache=handle, pos_offset=handle.num_tokens)]


def test_tokens_that_only_the_device_knows(cache: Checked) -> None:
    """The hash is computed from ids on the device, and the next step knows them."""
    first, second = cache.begin("first", A), cache.begin("second", B)
    for token in range(12):
        cache.run((first, [0]), (second, [0]), device_ids=torch.tensor([token, token + 1]))
    cache.run((first, [0]), (second, [7, 8]), device_ids=torch.tensor([50]))
    for handle, tokens in ((first, [*A, *range(12), 50]), (second, [*B, *range(1, 13), 7, 8])):
        assert handle._state.parts[cache.manager.canaries].token_ids == tokens
    cache.manager.check_integrity()


def test_callers_without_an_executor(sharing: Checked) -> None:
    """What a commit names gets its canaries then; what it does not name is not checked."""
    manager = sharing.manager
    first = manager.allocate("first", token_ids=A)
    end = manager.chunk_end(first, len(A), len(A))
    with manager.reserve([KvSlotRequest("first", end)]) as reservation:
        manager.build_metadata([(first, end)])
        reservation.commit([A[:end]])
    assert sharing.begin("second", [*A[:end], 5]).num_cached_tokens > 0
    unnamed = manager.allocate("unnamed")
    with manager.reserve([KvSlotRequest("unnamed", 3)]) as reservation:
        manager.build_metadata([(unnamed, 3)])
        reservation.commit()
    sharing.run((unnamed, [1, 2]))
    manager.check_integrity()


def test_a_commit_that_fails_leaves_the_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Checked()
    canaries = cache.manager.tensors.canaries
    assert canaries is not None
    handle = cache.manager.allocate("first", token_ids=A)
    reservation = cache.manager.reserve([KvSlotRequest("first", len(A))])
    with monkeypatch.context() as patch:
        patch.setattr(Canaries, "drop", Mock(side_effect=ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            reservation.commit([A])
    assert not canaries.any()
    reservation.commit([A])
    assert canaries[list(handle.blocks)].count_nonzero() == len(A)


@pytest.mark.parametrize("value", ["", "0"])
def test_without_canaries_nothing_is_stored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_canaries = Checked().manager
    monkeypatch.setenv("PAGED_CANARY", value)
    manager = Checked().manager
    assert manager.canaries is manager.tensors.canaries is None
    assert with_canaries.stats().bytes_per_block - manager.stats().bytes_per_block == 8 * BLOCK
    for one in (manager, with_canaries):
        assert one.stats().bytes_per_block == one.config.block_bytes(torch.float32)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CANARY", "yes")
    with pytest.raises(InvalidInputError, match="PAGED_CANARY='yes': expected '1' or '0'"):
        PagedKvCacheConfig(1, 1, 8)


# Planted faults.


def test_a_table_entry_swapped(cache: Checked) -> None:
    first, second = cache.begin("first", A), cache.begin("second", [*B, 1, 2])
    num_tables = len(cache.manager.config.tables)
    for column in range(num_tables):
        change = swap(2 * num_tables + column, 3 * num_tables + column)
        cache.set_blocks(first, change)
        with pytest.raises(CanaryError, match=rf"'first': position 8 \(block \d+, offset 0 of table {column}\) holds"):
            cache.run((second, [1]), (first, [1]))
        cache.run((second, [1]))
        cache.set_blocks(first, change)
    cache.run((second, [1]), (first, [1]))


def test_the_error_says_what_was_found() -> None:
    cache = Checked()
    first = cache.begin("first", A)
    cache.set_blocks(first, swap(1, 2))
    block = first.blocks[1]
    expected = rf"'first': position 4 \(block {block}, offset 0 of table 0\) holds token 38, expected token 34"
    with pytest.raises(CanaryError, match=expected):
        cache.run((first, [1]))
    with pytest.raises(CanaryError, match=expected):
        cache.manager.check_integrity()


def test_a_block_of_another_namespace(sharing: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens at the same positions."""
    sharing.manager.free(sharing.begin("first", A, namespace="one"))
    match = PrefixIndex.match
    monkeypatch.setattr(PrefixIndex, "match", lambda self, token_ids, namespace: match(self, token_ids, "one"))
    with pytest.raises(CanaryError, match="of another sequence, namespace or position, expected token"):
        sharing.begin("second", A, namespace="two")


def test_a_reused_block_that_is_still_published(sharing: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = sharing.manager
    manager.free(sharing.begin("first", A))
    with monkeypatch.context() as patch, suppress(OutOfBlocksError):
        patch.setattr(PrefixIndex, "forget", lambda self, blocks: manager._pool.unpublished(blocks) or [])
        for count in range(200):  # of less than a block, which would take the place of the old one in the index
            sharing.begin(f"fill{count}", [100 + count] * 3)
    assert manager.stats().free_blocks < len(manager.config.tables)
    for handle in manager.handles()[:8]:
        manager.free(handle)
    with pytest.raises(CanaryError, match="'second': position"):
        sharing.begin("second", A)


def test_a_late_copy_on_write(cache: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.begin("first", A)
    fork = cache.manager.fork(first, "fork")
    with monkeypatch.context() as patch:
        patch.setattr(KvCacheTensors, "copy", do_nothing)
        with pytest.raises(CanaryError, match=r"'(first|fork)': position 12 .* holds no token, expected token 42"):
            cache.run((fork, [1]), (first, [2]))


def test_no_copy_on_write(cache: Checked) -> None:
    """Both sequences write to the same slot; the first one finds it."""
    first = cache.begin("first", A)
    fork = cache.manager.fork(first, "fork")
    cache.run((first, [1]), (fork, [2]))
    cache.set_blocks(fork, lambda blocks: blocks.__setitem__(slice(None), first.blocks))
    with pytest.raises(CanaryError, match=r"'fork': position 13 .* holds token 1, expected token 2"):
        cache.run((fork, [4]))
    cache.run((first, [3]))


def test_two_sequences_write_to_one_slot(cache: Checked) -> None:
    """The error leaves the slot as it was, and whoever runs first keeps it."""
    first, second = cache.begin("first", A), cache.begin("second", A, namespace="other")
    num_tables = len(cache.manager.config.tables)
    cache.set_blocks(second, lambda blocks: blocks.__setitem__(slice(-num_tables, None), first.blocks[-num_tables:]))
    with pytest.raises(CanaryError, match=r"'first': position 13 .* holds token 2, expected token 1"):
        cache.run((first, [1]), (second, [2]))
    cache.run((first, [1]))


@pytest.mark.parametrize("move", ["swap_out", "swap_in"])
def test_a_late_swap(cache: Checked, move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = cache.begin("first", A), cache.begin("second", [9, *B])
    with monkeypatch.context() as patch:
        patch.setattr(KvCacheTensors, move, do_nothing)
        cache.manager.swap_out(first)
        cache.begin("third", [*range(200, 230)])
        cache.manager.swap_in(first)
    with pytest.raises(CanaryError, match="'first': position"):
        cache.run((second, [1]), (first, [1]))
    cache.run((second, [1]))


def test_a_damaged_host_block(cache: Checked) -> None:
    """The sweep reads swapped sequences too."""
    first = cache.begin("first", A)
    cache.manager.swap_out(first)
    cache.manager.check_integrity()
    hosts = first._state.host_blocks
    assert hosts is not None
    one, other = list(hosts.values())[:: len(cache.manager.config.tables)][-2:]
    host = cache.manager.tensors.host
    host.write(one, host.read(other))
    with pytest.raises(CanaryError, match="'first': position"):
        cache.manager.check_integrity()


@pytest.mark.parametrize("late", [False, True])
def test_a_late_load_from_the_host_tier(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Checked(**CACHES["tier"])
    cache.manager.free(cache.begin("first", A))
    cache.manager.evict(40)
    cache.begin("other", [*range(200, 230)])
    with monkeypatch.context() as patch:
        if late:
            patch.setattr(KvCacheTensors, "swap_in", do_nothing)
        with pytest.raises(CanaryError, match="'second': position") if late else nullcontext():
            assert cache.begin("second", A).num_loaded_tokens == 12


@pytest.mark.parametrize("late", [False, True])
def test_a_late_load_from_files(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"host_cache_bytes": 1 << 16, "cache_folder": tmp_path}
    cache = Checked(**options)
    cache.manager.free(cache.begin("first", A))
    cache.manager.close_tiers()
    again = Checked(**options)
    if late:
        monkeypatch.setattr(HostMemory, "write", do_nothing)
    with pytest.raises(CanaryError, match="'second': position") if late else nullcontext():
        assert again.begin("second", A).num_loaded_tokens == 12
    again.manager.close_tiers()


def test_files_without_canaries_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"host_cache_bytes": 1 << 16, "cache_folder": tmp_path}
    cache = Checked(**options)
    cache.manager.free(cache.begin("first", A))
    cache.manager.close_tiers()
    monkeypatch.setenv("PAGED_CANARY", "0")
    plain = Checked(**options).manager
    assert plain.allocate("second", token_ids=A).num_cached_tokens == 0
    assert plain.stats().folder_faults == 0
    plain.close_tiers()


def test_a_rewritten_block_that_is_still_published(sharing: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated within a published block and written again."""
    manager = sharing.manager
    if manager.config.recurrent is not None:
        pytest.skip("a state reaches back to no position within a published block")
    first = sharing.begin("first", A)
    manager.truncate(first, 10)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "forget", lambda self, blocks: [])
        sharing.run((first, [1]))
    with pytest.raises(CanaryError, match=r"'second': position 10 .* holds token 1, expected token 40"):
        sharing.begin("second", A)
    manager.free(manager.handles()[-1])
    with pytest.raises(CanaryError, match=r"a published prefix: position 10 .* holds token 1, expected token 40"):
        manager.check_integrity()


def test_a_block_freed_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Checked(**CACHES["groups"])
    first = cache.begin("first", A)
    column = len(cache.manager.config.tables) - 1
    assert cache.manager.config.tables[column].sliding_window == 6
    num_tables = len(cache.manager.config.tables)
    cache.set_blocks(first, lambda blocks: blocks.__setitem__(2 * num_tables + column, 0))
    with pytest.raises(CanaryError, match=rf"'first': position 8 \(block 0, offset 0 of table {column}\) holds no"):
        cache.run((first, [1]))


def test_slots_that_are_not_those_of_the_table(cache: Checked) -> None:
    first, second = cache.begin("first", A), cache.begin("second", B)
    step = step_of(cache.manager, [*one_more(first, 1), *one_more(second, 1)])
    step.slot_mappings = step.slot_mappings[:, ::-1].copy()
    with pytest.raises(CanaryError, match="'first': position 13"):
        cache.forward(step)
    step.rollback()
    cache.run((first, [1]), (second, [1]))


def test_a_rejected_draft_that_stays_in_its_slot(cache: Checked) -> None:
    """The token that takes its place is not written."""
    first = cache.begin("first", A)
    cache.run((first, [1, 2, 3]))
    cache.manager.truncate(first, first.num_tokens - 2)
    step = step_of(cache.manager, one_more(first, 4))
    step.slot_mappings = np.full_like(step.slot_mappings, -1)
    with pytest.raises(CanaryError, match=r"'first': position 14 .* holds token 2, expected token 4"):
        cache.forward(step)
    step.rollback()
    cache.run((first, [4]))


def test_the_sweep_reads_published_blocks_without_a_sequence(sharing: Checked) -> None:
    manager = sharing.manager
    first = sharing.begin("first", A)
    blocks = [first.blocks[index * len(manager.config.tables)] for index in range(3)]
    manager.free(first)
    manager.check_integrity()
    canaries = manager.tensors.canaries
    assert canaries is not None
    for index, block in enumerate(blocks):
        if block in manager.cached_blocks():
            canaries[block, 3] ^= 1 << 50
            with pytest.raises(CanaryError, match=rf"a published prefix: position {4 * index + 3} "):
                manager.check_integrity()
            canaries[block, 3] ^= 1 << 50
    manager.check_integrity()
