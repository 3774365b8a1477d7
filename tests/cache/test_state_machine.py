"""Random sequences of cache calls against a dictionary of what every sequence holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged import OutOfBlocksError
from paged.batch import KvSlotRequest
from paged.kv_cache import KvCacheHandle, KvSlotReservation, PagedKvCacheConfig
from paged.kv_cache_manager import PagedKvCacheManager

BLOCK_SIZE = 4
NUM_BLOCKS = 9
SMALL = st.integers(0, 6)


@dataclass
class Open:
    """A reservation that has not ended: the tokens it would commit, and the blocks a rollback brings back."""

    reservation: KvSlotReservation
    pending: dict[int, list[int]]
    blocks_before: dict[int, tuple[int, ...]]


class CacheMachine(RuleBasedStateMachine):
    """The model: sequence id to its tokens; a token's K is filled with its number and its V with the negative."""

    def __init__(self) -> None:
        super().__init__()
        config = PagedKvCacheConfig(1, 1, 8, BLOCK_SIZE, NUM_BLOCKS, dtype=torch.float32, device="cpu")
        self.manager = PagedKvCacheManager(config)
        self.tokens: dict[int, list[int]] = {}
        self.open: list[Open] = []
        self.next_id = 0
        self.next_token = 1

    def handle(self, data: st.DataObject) -> KvCacheHandle:
        return self.lookup(data.draw(st.sampled_from(sorted(self.tokens))))

    def lookup(self, seq_id: int) -> KvCacheHandle:
        handle = self.manager.get_handle(seq_id)
        assert handle is not None
        return handle

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def write(self, handle: KvCacheHandle, position: int, count: int) -> list[int]:
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        key = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 8)
        self.manager.write_kv(handle, 0, position, key, -key)
        return tokens

    def changed(self, handle: KvCacheHandle) -> None:
        for entry in self.open:
            entry.pending.pop(int(handle.cache_id), None)

    def snapshot(self) -> Any:
        handles = [(h.cache_id, h.blocks, h.num_tokens, h.num_cached_tokens) for h in self.manager.handles()]
        stats = replace(self.manager.stats(), allocation_failures=0, cow_copies=0)
        return handles, stats, list(self.manager._pool._ref_counts)

    @contextmanager
    def unless_full(self) -> Iterator[None]:
        """A call that finds no blocks changes nothing, and there were indeed too few."""
        before, refused = self.snapshot(), None
        try:
            yield
        except OutOfBlocksError as error:
            refused = error
        if refused is not None:
            assert refused.needed > refused.free == before[1].free_blocks
            assert self.snapshot() == before

    @rule(room=st.integers(0, 14))
    def allocate(self, room: int) -> None:
        seq_id = self.new_id()
        fits = self.manager.can_allocate(room)
        with self.unless_full():
            assert self.manager.allocate(seq_id, room).num_tokens == 0
            self.tokens[seq_id] = []
        assert fits == (seq_id in self.tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=SMALL)
    def extend(self, data: st.DataObject, count: int) -> None:
        handle = self.handle(data)
        start = handle.num_tokens
        with self.unless_full():
            self.manager.extend(handle, count)
            self.tokens[int(handle.cache_id)] += self.write(handle, start, count)
            self.changed(handle)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def write_and_advance(self, data: st.DataObject) -> None:
        handle = self.handle(data)
        count = data.draw(st.integers(0, handle.capacity - handle.num_tokens))
        with self.unless_full():
            written = self.write(handle, handle.num_tokens, count)
            self.manager.advance(handle, count)
            self.tokens[int(handle.cache_id)] += written
            self.changed(handle)

    @precondition(lambda self: any(self.tokens.values()))
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        reserved = {seq_id for entry in self.open for seq_id in entry.pending}
        ids = [seq_id for seq_id, tokens in self.tokens.items() if tokens and seq_id not in reserved]
        if not ids:
            return
        seq_id = data.draw(st.sampled_from(sorted(ids)))
        tokens = self.tokens[seq_id]
        position = data.draw(st.integers(0, len(tokens) - 1))
        count = data.draw(st.integers(1, len(tokens) - position))
        with self.unless_full():
            tokens[position : position + count] = self.write(self.lookup(seq_id), position, count)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        handle, seq_id = self.handle(data), self.new_id()
        self.manager.fork(handle, seq_id)
        self.tokens[seq_id] = list(self.tokens[int(handle.cache_id)])
        self.changed(handle)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.handle(data)
        length = data.draw(st.integers(0, handle.num_tokens))
        self.manager.truncate(handle, length)
        del self.tokens[int(handle.cache_id)][length:]
        assert handle.capacity - length < BLOCK_SIZE
        self.changed(handle)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = self.handle(data)
        self.changed(handle)
        self.manager.free(handle)
        self.manager.free(handle)
        del self.tokens[int(handle.cache_id)]

    @precondition(lambda self: any(len(tokens) >= BLOCK_SIZE for tokens in self.tokens.values()))
    @rule(data=st.data(), room=SMALL)
    def share_prefix_blocks(self, data: st.DataObject, room: int) -> None:
        full = {
            seq_id: len(tokens) // BLOCK_SIZE for seq_id, tokens in self.tokens.items() if len(tokens) >= BLOCK_SIZE
        }
        source = data.draw(st.sampled_from(sorted(full)))
        num_blocks = data.draw(st.integers(1, full[source]))
        seq_id = self.new_id()
        with self.unless_full():
            target = self.manager.allocate(seq_id, room)
            self.manager.share_prefix_blocks(self.lookup(source), target, num_blocks)
            self.tokens[seq_id] = self.tokens[source][: num_blocks * BLOCK_SIZE]
            assert target.num_cached_tokens == target.num_tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), write=st.booleans())
    def reserve(self, data: st.DataObject, write: bool) -> None:
        growth = data.draw(st.dictionaries(st.sampled_from(sorted(self.tokens)), SMALL, min_size=1))
        requests = [KvSlotRequest(seq_id, len(self.tokens[seq_id]) + count) for seq_id, count in growth.items()]
        before = {seq_id: self.lookup(seq_id).blocks for seq_id in growth}
        with self.unless_full():
            reservation = self.manager.reserve(requests)
            for seq_id in growth:
                self.changed(self.lookup(seq_id))
            pending = {
                seq_id: self.write(self.lookup(seq_id), len(self.tokens[seq_id]), count)
                for seq_id, count in growth.items()
            }
            self.open.append(Open(reservation, pending, before))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reserve_and_roll_back(self, data: st.DataObject) -> None:
        reserved = {seq_id for entry in self.open for seq_id in entry.pending}
        ids = sorted(set(self.tokens) - reserved)
        if not ids:
            return
        growth = data.draw(st.dictionaries(st.sampled_from(ids), SMALL, min_size=1))
        before = self.snapshot()
        requests = [KvSlotRequest(seq_id, len(self.tokens[seq_id]) + count) for seq_id, count in growth.items()]
        with self.unless_full():
            reservation = self.manager.reserve(requests)
            self.manager.check_integrity()
            for seq_id, count in growth.items():
                self.write(self.lookup(seq_id), len(self.tokens[seq_id]), count)
            reservation.rollback()
            assert self.snapshot() == before

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(["commit", "rollback", "leave"]))
    def end_reservation(self, data: st.DataObject, end: str) -> None:
        entry = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if end == "commit":
            entry.reservation.commit()
            for seq_id, pending in entry.pending.items():
                self.tokens[seq_id] += pending
        elif end == "rollback":
            entry.reservation.rollback()
            for seq_id in entry.pending:
                assert self.lookup(seq_id).blocks == entry.blocks_before[seq_id]
        else:
            with entry.reservation:
                pass

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.manager.check_integrity()
        assert {handle.cache_id for handle in self.manager.handles()} == set(self.tokens)
        for seq_id, tokens in self.tokens.items():
            handle = self.lookup(seq_id)
            assert handle.num_tokens == len(tokens)
            key, value = self.manager.read_kv(handle, 0, 0, len(tokens))
            assert torch.equal(key, -value)
            assert key[:, 0, 0].tolist() == key[:, 0, 7].tolist() == tokens

    def teardown(self) -> None:
        for handle in self.manager.handles():
            self.manager.free(handle)
        self.manager.check_integrity()
        assert self.manager.stats().free_blocks == NUM_BLOCKS


class TestCache(CacheMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(
        max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )

    @pytest.fixture(autouse=True)
    def _torch_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies by PyTorch: thousands of launches of Triton's interpreter would take minutes."""
        monkeypatch.setenv("PAGED_BACKEND", "torch")
