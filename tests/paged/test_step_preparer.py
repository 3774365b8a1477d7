"""A forward that was prepared before its tokens were known: it is used as it stands, or leaves nothing behind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged.batch import UnifiedBatchItem, VerifyLogits
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.forward_step import PreparedStep, StepPreparer

Manager = PagedKvCacheManager


@pytest.fixture
def manager(device: torch.device) -> Manager:
    """Sequences a, b and c of 8, 6 and 4 tokens in blocks of 4, five of nine of them."""
    config = PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=9, num_swap_blocks=4, device=device, max_seq_len=12)
    made = Manager(config)
    for name, length in (("a", 8), ("b", 6), ("c", 4)):
        handle = made.allocate(name, length)
        made.extend(handle, length)
        made.commit(handle, [ord(name)] * length)
    return made


def preparer_of(manager: Manager, max_seq_len: int = 100) -> StepPreparer:
    return StepPreparer(manager, vocab_size=128, max_seq_len=max_seq_len)


def prepared_by(steps: StepPreparer, handles: list[KvCacheHandle]) -> PreparedStep:
    prepared = steps.prepare(handles)
    assert prepared is not None
    return prepared


def handles(manager: Manager, names: str = "abc") -> list[KvCacheHandle]:
    return [handle for name in names if (handle := manager.get_handle(name))]


def items(manager: Manager, names: str = "abc", count: int = 1) -> list[UnifiedBatchItem]:
    tokens = [7, 8, 9][:count]
    return [UnifiedBatchItem(h.cache_id, tokens, pos_offset=h.num_tokens) for h in handles(manager, names)]


def state(manager: Manager) -> object:
    manager.check_integrity()
    return [(h.cache_id, h.blocks, h.num_tokens) for h in manager.handles()], manager.stats().free_blocks


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_what_was_prepared_is_used(manager: Manager, is_uploaded: bool) -> None:
    steps = preparer_of(manager)
    prepared = prepared_by(steps, handles(manager))
    if is_uploaded:
        prepared.step.upload()
    assert manager.stats().free_blocks == 2, "a and c begin new blocks"
    blocks = [handle.blocks for handle in handles(manager)]
    batch = [
        UnifiedBatchItem(name, [token], kv_cache=handle, pos_offset=handle.num_tokens)
        for name, token, handle in zip("xyz", (11, 12, 13), handles(manager), strict=True)
    ]
    with steps.forward(batch) as step:
        assert step is prepared.step
        assert step.input_ids.tolist() == [11, 12, 13]
        assert step.sample_rows.tolist() == [0, 1, 2]
        assert step.metadata.seq_lens.tolist() == [9, 7, 5]
        slots = [4 * row[-1] + at for row, at in zip(blocks, (0, 2, 0), strict=True)]
        assert step.metadata.slot_mapping.tolist() == slots
    assert prepared.is_used
    assert [handle.num_tokens for handle in handles(manager)] == [9, 7, 5]
    assert [handle.blocks for handle in handles(manager)] == blocks
    manager.check_integrity()
    with steps.forward(items(manager, "b")) as step:
        assert step is not prepared.step
    again = manager.allocate("again", token_ids=[*[ord("b")] * 6, 12, 7, 5])
    assert again.num_tokens == 8, "its tokens are published"


@pytest.mark.parametrize(
    "other",
    [
        lambda manager: items(manager, "ab"),
        lambda manager: items(manager, "bac"),
        lambda manager: items(manager, "abc", 2),
        lambda manager: [*items(manager, "ab"), UnifiedBatchItem("c", [1], pos_offset=4, is_final_chunk=False)],
        lambda manager: [*items(manager), UnifiedBatchItem("new", [1])],
        lambda manager: [],
    ],
)
def test_another_forward_cancels_it(manager: Manager, other: Callable[[Manager], list[UnifiedBatchItem]]) -> None:
    steps = preparer_of(manager)
    prepared = prepared_by(steps, handles(manager))
    batch = other(manager)
    lengths = {handle.cache_id: handle.num_tokens for handle in manager.handles()}
    with steps.forward(batch) as step:
        assert step is not prepared.step
        assert step.metadata.seq_lens.tolist() == [lengths.get(item.seq_id, 0) + len(item.q_tokens) for item in batch]
    assert not prepared.is_used
    used = sum(-(-handle.num_tokens // 4) for handle in manager.handles())
    assert manager.stats().used_blocks == used, "no room is left over"
    manager.check_integrity()


@pytest.mark.parametrize(
    ("fields", "is_in_order"),
    [
        ({"q_tokens": [128]}, False),
        ({"pos_offset": 7}, False),
        ({"seq_id": "b"}, False),
        ({"seq_id": "x"}, True),
        ({"logits_policy": VerifyLogits()}, True),  # one row of drafts is a row
    ],
    ids=str,
)
def test_what_is_not_in_order_is_not_expected(manager: Manager, fields: dict[str, Any], is_in_order: bool) -> None:
    """Then all checks are made, which say what is wrong."""
    steps = preparer_of(manager)
    prepared_by(steps, handles(manager, "ab"))
    pairs = zip(items(manager, "ab"), handles(manager, "ab"), strict=True)
    first, second = (replace(item, kv_cache=handle) for item, handle in pairs)
    assert steps.expects([replace(first, **fields), second]) == is_in_order
    assert steps.expects([first, second])


@pytest.mark.parametrize(
    "change",
    [
        lambda manager, b: manager.truncate(b, 5),
        lambda manager, b: manager.advance(b, 1),
        lambda manager, b: manager.fork(b, "d"),
        lambda manager, b: manager.swap_out(b),
        lambda manager, b: manager.free(b),
        lambda manager, b: manager.extend(b, 1),
        lambda manager, b: manager.write_kv(b, 0, 2, *torch.zeros(2, 1, 1, 8, device=manager.device)),
        lambda manager, b: manager.share_prefix_blocks(manager.get_handle("a"), manager.allocate("d"), 1),
        lambda manager, b: manager.clear_prefix_cache(),
        lambda manager, b: manager.evict(9),
        lambda manager, b: manager.allocate("d", 8),
        lambda manager, b: manager.commit(b, [ord("b")] * 6),
    ],
)
def test_anything_may_happen_to_the_cache_meanwhile(
    manager: Manager, change: Callable[[Manager, KvCacheHandle], object]
) -> None:
    """Used or not, the forward that follows is the one that would have run without it."""
    steps = preparer_of(manager)
    prepared_by(steps, handles(manager))
    b = handles(manager, "b")[0]
    change(manager, b)
    names = "abc" if b.is_valid and not b.is_swapped else "ac"
    lengths = [handle.num_tokens for handle in handles(manager, names)]
    with steps.forward(items(manager, names)) as step:
        assert step.metadata.positions.tolist() == lengths
        blocks = [h.blocks[n // 4] for h, n in zip(handles(manager, names), lengths, strict=True)]
        assert step.metadata.slot_mapping.tolist() == [4 * at + n % 4 for at, n in zip(blocks, lengths, strict=True)]
        assert not set(blocks) & manager._pool.shared
    for handle in manager.handles():
        manager.free(handle)
    assert manager.stats().used_blocks == 0
    manager.check_integrity()


def test_a_forward_that_fails_gives_the_room_back(manager: Manager) -> None:
    steps, before = preparer_of(manager), state(manager)
    prepared = prepared_by(steps, handles(manager))

    def fail() -> None:
        with steps.forward(items(manager)) as step:
            assert step is prepared.step
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert state(manager) == before
    with steps.forward(items(manager)) as step:
        assert step.metadata.seq_lens.tolist() == [9, 7, 5]


def test_where_there_is_no_room_nothing_is_prepared(manager: Manager) -> None:
    steps = preparer_of(manager)
    other = manager.allocate("other", 12)
    before = state(manager)
    assert steps.prepare(handles(manager)) is None
    assert state(manager) == before
    manager.free(other)
    full = manager.allocate("full", 12)
    manager.advance(full, 12)
    assert steps.prepare([full]) is None, "it is as long as it may be"
    manager.free(full)
    assert steps.prepare([full]) is None
    short = preparer_of(manager, max_seq_len=8)
    assert short.prepare(handles(manager)) is None, "beyond what the model can run"
    prepared_by(short, handles(manager, "bc")).cancel()
    prepared_by(steps, handles(manager))
    prepared_by(steps, handles(manager, "b"))
    assert manager.stats().free_blocks == 4, "the one before is cancelled"
    manager.check_integrity()
