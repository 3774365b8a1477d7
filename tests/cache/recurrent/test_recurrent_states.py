"""States of recurrent layers in the cache: which slots steps read and write, snapshots, and all calls beside them.

SOAK=1 makes 21,000 random calls in place of 1,400."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from paged import KvSlotRequest, PagedKvCacheManager, RecurrentSpec
from paged.cache.slot_memory import StateTensors
from paged.errors import InvalidInputError, OutOfStateSlotsError, UnsupportedError
from tests.cache.recurrent.hashing_model import HashingModel, RandomCalls, make_manager
from tests.cache.stress.test_failed_calls import OURS
from tests.failure import CACHE_GUARD, Failure


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free slots hold NaN."""
    monkeypatch.setenv("PAGED_CHECK", "1")


@pytest.mark.parametrize(
    ("seed", "count", "num_slots", "block_size", "interval", "window", "has_kv"),
    [
        (0, 300, 12, 4, None, None, True),
        pytest.param(1, 700, 10, 4, 16, None, True, marks=pytest.mark.thorough),
        pytest.param(2, 400, 12, 16, None, 24, True, marks=pytest.mark.thorough),
        pytest.param(3, 300, 12, 4, None, None, False, marks=pytest.mark.thorough),
    ],
)
def test_every_state_equals_the_recurrence(
    seed: int, count: int, num_slots: int, block_size: int, interval: int | None, window: int | None, has_kv: bool
) -> None:
    """Random chunks, cuts, hits, forks, drafts, failures and swaps: the states of sequences and snapshots are those of
    their tokens after each."""
    sizes = {
        "block_size": block_size,
        "num_blocks": 240 // block_size * 2,
        "snapshot_interval": interval,
        "window": window,
        "has_kv": has_kv,
    }
    calls = RandomCalls(make_manager(num_slots, **sizes), seed)
    count *= 15 if "SOAK" in os.environ else 1
    calls.run(count)
    assert min(calls.seen.values()) > count // 1000, calls.seen


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("decays_channels", "rank"), [(False, 1), (True, 1), (True, 2)])
def test_bytes_of_a_slot(decays_channels: bool, rank: int, state_dtype: torch.dtype) -> None:
    """34 layers of GLM-5.3-Flash: 136 MiB of states in float32."""
    spec = RecurrentSpec(
        tuple(range(34)), 3 * 64 * 128, 4, 64, 128, 64, 128, 2,
        decays_channels=decays_channels, rank=rank, state_dtype=state_dtype,
    )  # fmt: skip
    states = StateTensors(spec, torch.bfloat16, torch.device("meta"))
    assert states.bytes_per_slot == spec.slot_bytes(torch.bfloat16)
    layer = states.layer(33)
    assert layer.state is not None
    assert layer.state.dtype == state_dtype
    num_bytes = layer.state[0].nbytes
    if state_dtype == torch.int8:  # a float32 scale for 128 codes
        assert layer.state_scale is not None
        num_bytes += layer.state_scale[0].nbytes
        assert num_bytes == layer.state[0].nbytes * 33 // 32
    assert layer.state[0].nbytes == (1 << 20) * state_dtype.itemsize
    assert spec.state_bytes == 34 * num_bytes
    rings = layer.rings()
    assert rings.rank == rank
    assert rings.g.shape[2:] == ((64, 128) if decays_channels else (64,))


def test_rejects_sizes_of_states() -> None:
    for bad, message in (
        ({"rank": 3}, "rank: 3, expected"),
        ({"decays_channels": 2}, "decays_channels: 2"),
        ({"state_dtype": torch.float16}, "state_dtype: torch.float16, expected float32, bfloat16 or int8"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            RecurrentSpec((0,), 1, 2, **bad)


@pytest.mark.thorough
def test_hits_behind_prompts_of_every_length() -> None:
    """Every remainder by block and by chunk of the scan, with drafts behind the prompt of which one stays."""
    trunk = [token % 7 for token in range(150)]
    for length in range(1, 131):
        manager = make_manager(block_size=16, num_blocks=40, max_append=6)
        model, texts, hits = HashingModel(manager), dict[str, list[int]](), 0
        for name, text in (("first", trunk[:length]), ("second", trunk[: length + 9])):
            handle = manager.allocate(name, token_ids=text)
            hits += handle.num_tokens
            while handle.num_tokens < len(text):
                end = manager.chunk_end(handle, min(len(text), handle.num_tokens + 64), len(text))
                model.run([(handle, text[handle.num_tokens : end])])
            texts[name] = text.copy()
            for drafts in ([1, 2, 3, 4, 5, 6], [3, 4], [5]):
                model.run([(handle, drafts)])
                manager.truncate(handle, len(texts[name]) + 1)
                texts[name].append(drafts[0])
            model.check(texts)
        assert hits >= (length - 1) // 16 * 16


def test_freed_slots_hold_nan() -> None:
    manager = make_manager(3)
    model = HashingModel(manager)
    freed, running = manager.allocate("freed"), manager.allocate("running")
    model.run([(freed, [1]), (running, [2])])
    slot = manager._kinds[-1].get(freed._state).slot
    assert model.state.state[slot].isfinite().all()
    manager.free(freed)
    model.run([(running, [3])])
    assert all(tensor[:, slot].isnan().all() for tensor in manager._kinds[-1].memory.all.values())
    model.check({"running": [2, 3]})


def test_a_hit_needs_the_blocks_and_a_snapshot() -> None:
    manager = make_manager(4)
    model, prompt = HashingModel(manager), list(range(10))
    first = manager.allocate("first", token_ids=prompt)
    model.run([(first, prompt[:8])])
    model.run([(first, prompt[8:])])
    second = manager.allocate("second", token_ids=[*prompt, 7])
    assert (second.num_tokens, manager.stats().state_hits) == (8, 1)
    model.check({"first": prompt, "second": prompt[:8]})
    manager.free(first)
    manager.free(second)
    # Other sequences take all slots: the blocks stay published, the state is gone.
    others = [manager.allocate(name, token_ids=[50 + name] * 3) for name in range(4)]
    for other in others:
        model.run([(other, [50 + other.cache_id] * 3)])
    assert manager.stats().state_snapshots == 0
    for other in others:
        manager.free(other)
    assert manager.stats().cached_blocks == 2
    again = manager.allocate("again", token_ids=prompt)
    assert again.num_tokens == 0
    # It parts from published blocks behind token 8, so its state there is kept anew.
    model.run([(again, prompt[:8])])
    manager.free(again)
    assert manager.stats().state_snapshots == 1
    # Without the blocks a snapshot is worth nothing, and goes with them.
    manager.clear_prefix_cache()
    assert manager.stats().state_snapshots == 0
    assert manager.allocate("last", token_ids=prompt).num_tokens == 0
    manager.check_integrity()


def test_what_states_refuse() -> None:
    """Without a reservation, or with too few slots, nothing changes; capacity without tokens is refused."""
    manager = make_manager(2)
    model = HashingModel(manager)
    handles = [manager.allocate(name, num_tokens=8) for name in "abc"]
    for call in (manager.extend, manager.advance):
        with pytest.raises(UnsupportedError, match="use reserve"):
            call(handles[0], 1)
    with pytest.raises(InvalidInputError, match="has no open reservation of 3 tokens"):
        manager.build_metadata([(handles[0], 3)])
    with pytest.raises(OutOfStateSlotsError, match="needs 3 more slots for states or rows of sequences, 2 are free"):
        model.run([(handle, [1, 2, 3]) for handle in handles])
    with pytest.raises(InvalidInputError, match="layer: 0 has no recurrent state"):
        manager.state(0)
    model.check({"a": [], "b": [], "c": []})
    model.run([(handles[0], [1, 2, 3, 4])])
    with pytest.raises(InvalidInputError, match="kept at positions 4 to 4 and at snapshots only"):
        manager.truncate(handles[0], 2)
    with pytest.raises(UnsupportedError, match="recurrent layers also need a state"):
        manager.share_prefix_blocks(handles[0], handles[1], 1)
    model.check({"a": [1, 2, 3, 4], "b": [], "c": []})
    for wrong in ({"max_append": 7}, {"snapshot_interval": 6}, {"num_slots": 1}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            make_manager(**wrong)


STEP = [KvSlotRequest("a", 12), KvSlotRequest("b", 20), KvSlotRequest("fork", 11)]
CALLS: dict[str, Callable[[PagedKvCacheManager], Callable[[], object]]] = {
    "hit": lambda manager: partial(manager.allocate, "new", token_ids=list(range(60, 70))),
    "reserve": lambda manager: partial(manager.reserve, STEP),
    "commit": lambda manager: manager.reserve(STEP).commit,
    "roll back": lambda manager: manager.reserve(STEP).rollback,
    "fork": lambda manager: partial(manager.fork, manager.get_handle("b"), "new"),
    "free": lambda manager: partial(manager.free, manager.get_handle("fork")),
    "swap out": lambda manager: partial(manager.swap_out, manager.get_handle("b")),
    "swap in": lambda manager: partial(manager.swap_in, manager.get_handle("out")),
    "clear": lambda manager: manager.clear_prefix_cache,
}


@pytest.mark.parametrize("name", CALLS)
def test_failure_anywhere_keeps_every_state(name: str) -> None:
    """Two sequences share a slot, one is swapped out, and a prompt that is gone has left a snapshot."""
    count, is_hit = 0, True
    while is_hit:
        manager = make_manager(6)
        model, texts = HashingModel(manager), {"a": list(range(10)), "b": list(range(20, 31)), "out": list(range(7))}
        for seq_id, text in {"gone": list(range(60, 69)), **texts}.items():
            model.run([(manager.allocate(seq_id, token_ids=text), text)])
        manager.free(manager.get_handle("gone"))
        manager.swap_out(manager.get_handle("out"))
        manager.fork(manager.get_handle("a"), "fork")
        texts["fork"] = texts["a"]
        call, before = CALLS[name](manager), manager.stats()
        is_hit = Failure(count, OURS, MemoryError(), skip=CACHE_GUARD).hits(call)
        if is_hit:
            model.check(texts)
            assert manager.stats() == before
        count += 7
    assert count > 50
