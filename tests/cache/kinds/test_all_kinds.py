"""All kinds in one cache, with a tier: random calls, and what each kind then holds of every sequence."""

from collections.abc import Callable

import pytest
import torch

from paged import InvalidInputError, KvCacheHandle, KvSlotRequest, OutOfBlocksError, PagedError, RecurrentSpec
from paged.cache.kinds.state import States
from tests.cache.kinds.test_new_kind import BLOCK, PooledModel, key_of, make
from tests.cache.recurrent.hashing_model import HashingModel

RECURRENT, WINDOW = 6, 5


class AllKinds(PooledModel):
    """A layer of each kind. Ids of a step are told with it, or later, while the next step is open."""

    def __init__(self, seed: int, tier_bytes: int) -> None:
        spec = RecurrentSpec(
            (RECURRENT,), 1, 4, 1, 1, 1, 1, num_slots=9, num_swap_slots=3, ring=6, max_append=3, snapshot_interval=BLOCK
        )
        sizes = {"num_layers": 7, "num_blocks": 90, "dtype": torch.float32, "device": "cpu"}
        super().__init__(make(recurrent=spec, host_cache_bytes=tier_bytes, **sizes), seed)
        self.hashing = HashingModel(self.manager, RECURRENT)
        self.untold: dict[KvCacheHandle, list[int]] = {}

    def run(self, handle: KvCacheHandle, tokens: list[int], *, fails: bool = False) -> None:
        """Run the tokens in chunks; the last one may fail."""
        while tokens:
            end = len(self.texts[handle]) + len(tokens)
            end = self.manager.chunk_end(handle, end, end)
            chunk, tokens = tokens[: end - handle.num_tokens], tokens[end - handle.num_tokens :]
            self.run_chunk(handle, chunk, fails=fails and not tokens)

    def run_chunk(self, handle: KvCacheHandle, tokens: list[int], *, fails: bool) -> None:
        text, untold = self.texts[handle] + tokens, self.untold.pop(handle, [])
        reservation = self.manager.reserve([KvSlotRequest(handle.cache_id, len(text))])
        self.hashing.forward([handle], [tokens])
        self.write(handle, text, handle.num_tokens)
        for layer in (0, 1):
            for position in range(handle.num_tokens, len(text)):
                self.row(handle, layer, position)[:] = key_of(layer, text, position)
        if untold:
            self.manager.append_tokens([(handle, untold)])
            self.seen["told late"] += 1
            self.seen["told late, then failed"] += fails
        if fails:
            reservation.rollback()
            self.seen["failed"] += 1
            return
        self.texts[handle] = text
        if self.random.random() < 0.5:
            reservation.commit([tokens])
        else:
            reservation.commit()
            self.untold[handle] = tokens

    def row(self, handle: KvCacheHandle, layer: int, position: int) -> torch.Tensor:
        row: torch.Tensor = self.manager.k_cache(layer)[self.block(handle, layer, position), position % BLOCK, 0]
        return row

    def check(self) -> None:
        super().check()
        self.hashing.check({handle.cache_id: text for handle, text in self.texts.items()})
        for handle, text in self.texts.items():
            if not handle.is_swapped:
                for layer, first in ((0, 0), (1, max(0, len(text) - WINDOW + 1))):
                    for position in range(first, len(text)):
                        assert torch.equal(self.row(handle, layer, position), key_of(layer, text, position))

    def truncate(self) -> None:
        handle = self.handle()
        length = max(0, handle.num_tokens - self.random.choice([1, 2, 3, handle.num_tokens % BLOCK, 20]))
        try:
            self.manager.truncate(handle, length)
        except InvalidInputError as error:
            for reason in ("within a pool", "sliding window", "at snapshots only"):
                self.seen[f"refused: {reason}"] += reason in str(error)
        else:
            del self.texts[handle][length:]
            self.untold.pop(handle, None)
            self.seen["truncated"] += 1


@pytest.mark.parametrize(("seed", "tier_bytes"), [(0, 0), (1, 1 << 16)])
def test_every_kind_holds_what_its_tokens_say(seed: int, tier_bytes: int) -> None:
    model = AllKinds(seed, tier_bytes)
    calls = {model.begin: 8, model.step: 12, model.truncate: 4, model.fork: 2, model.swap_out: 2, model.swap_in: 2}
    calls |= {model.free: 6, model.evict: 1}
    for call in model.random.choices(list(calls), list(calls.values()), k=200):
        try:
            call()
        except (IndexError, OutOfBlocksError):
            model.seen["refused"] += 1
        model.check()
    for handle in model.manager.handles():
        model.manager.free(handle)
    model.manager.clear_prefix_cache()
    model.manager.check_integrity()
    stats = model.manager.stats()
    assert (stats.used_blocks, stats.state_snapshots) == (0, 0)
    assert stats.free_state_slots == stats.num_state_slots
    events = ("hits", "failed", "forks", "swapped", "truncated", "told late", "told late, then failed")
    assert min(model.seen[event] for event in events) > 1, model.seen
    assert (stats.host_loaded_states > 0) == (tier_bytes > 0)


def lose_a_block(column: int) -> Callable[[AllKinds, KvCacheHandle], None]:
    """Plant a missing block in the last position of one table."""

    def plant(model: AllKinds, handle: KvCacheHandle) -> None:
        blocks = list(handle.blocks)
        index = len(blocks) - model.num_tables + column
        model.manager._pool.release([blocks[index]])
        blocks[index] = 0
        handle._state.blocks = tuple(blocks)

    return plant


def states_of(model: AllKinds) -> States:
    (states,) = [kind for kind in model.manager._kinds if isinstance(kind, States)]
    return states


def lose_a_withdrawal(model: AllKinds, _: KvCacheHandle) -> None:
    states = states_of(model)
    _, snapshot = states.kept.popitem()
    states.kept[model.manager.config.num_blocks] = snapshot


def lose_a_snapshot(model: AllKinds, _: KvCacheHandle) -> None:
    states_of(model).kept.clear()


def take_a_host_slot(model: AllKinds, _: KvCacheHandle) -> None:
    states_of(model).shelf.pool._free.pop()


def lose_a_slot(model: AllKinds, handle: KvCacheHandle) -> None:
    states = states_of(model)
    handle._state.parts[states] = states.empty


def lose_a_reservation(model: AllKinds, handle: KvCacheHandle) -> None:
    model.manager.reserve([KvSlotRequest(handle.cache_id, handle.num_tokens + 1)])
    handle._state.reservation = None


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lose_a_block(0), "lacks a block of table 0"),
        (lose_a_block(2), "lacks a block of table 2"),
        (lose_a_withdrawal, "behind block 90, which is unpublished"),
        (lose_a_snapshot, "slots are kept behind blocks .* expected 0"),
        (take_a_host_slot, "reference count 1, but 0 references are held"),
        (lose_a_slot, "reference count 1, but 0 references are held"),
        (lose_a_reservation, "has an open step without a reservation"),
    ],
)
def test_check_integrity_sees_a_contradiction_of_each_kind(
    plant: Callable[[AllKinds, KvCacheHandle], None], message: str
) -> None:
    model = AllKinds(0, 1 << 16)
    handle = model.manager.allocate("a", token_ids=model.trunk[:40])
    model.texts[handle] = []
    model.run(handle, model.trunk[:32])
    model.run(handle, model.trunk[32:40])
    assert [table.most_seen for table in model.manager.config.tables] == [None, None, WINDOW, 1]
    assert states_of(model).kept
    model.check()
    plant(model, handle)
    with pytest.raises(PagedError, match=message):
        model.manager.check_integrity()
