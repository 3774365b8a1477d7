"""A model whose recurrent state is a hash of all tokens, exact in float32, run on the cache's own slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paged.cache.events import BlocksStored, CacheEvent
from paged.cache.groups import CacheGroup, RecurrentSpec
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, OutOfBlocksError
from paged.step.batch import KvSlotRequest
from tests.cache.snapshot import published_hashes

MODULUS = 8191
WIDTH = 4


def make_manager(
    num_slots: int = 12,
    *,
    block_size: int = 4,
    num_blocks: int = 60,
    window: int | None = None,
    has_kv: bool = True,
    host_cache_bytes: int = 0,
    **changes: Any,
) -> PagedKvCacheManager:
    """A cache of one layer with attention and one with a state, in short rings; with a window, of one more layer.

    Without K/V, no layer has attention."""
    spec = RecurrentSpec(
        (1,), 1, WIDTH, 1, 1, 1, 1, num_slots, **{"num_swap_slots": 3, "ring": 6, "max_append": 3} | changes
    )
    groups = [CacheGroup((0,)), *([] if window is None else [CacheGroup((2,), sliding_window=window)])]
    layers, blocks = 1 + len(groups), num_blocks * len(groups)
    if not has_kv:
        groups = []
    config = PagedKvCacheConfig(
        layers,
        1,
        8,
        block_size,
        blocks,
        8,
        torch.float32,
        "cpu",
        groups=groups,
        recurrent=spec,
        host_cache_bytes=host_cache_bytes,
    )
    return PagedKvCacheManager(config)


def state_of(ids: Sequence[int]) -> tuple[float, list[float]]:
    """The state after `ids`: their hash, and the last rows of the convolution."""
    value = 0
    for token in ids:
        value = (value * 31 + token + 1) % MODULUS
    return float(value), [0.0] * (WIDTH - 1 - len(ids)) + [float(token) for token in ids[-(WIDTH - 1) :]]


class HashingModel:
    """Writes slots as the kernels' contract says, and knows from events which tokens every published block ends."""

    def __init__(self, manager: PagedKvCacheManager, layer: int = 1) -> None:
        self.manager, self.state = manager, manager.state(layer)
        self.ids_of: dict[Any, list[int]] = {}
        manager.subscribe(self._note)

    def _note(self, event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            ids, size = list(self.ids_of.get(event.parent_hash, [])), len(event.token_ids) // len(event.hashes)
            for index, hash_ in enumerate(event.hashes):
                ids = [*ids, *event.token_ids[index * size : (index + 1) * size]]
                self.ids_of[hash_] = ids

    def forward(self, handles: Sequence[KvCacheHandle], rows: Sequence[list[int]]) -> None:
        """Run reserved tokens on the slots of the step's metadata."""
        batch = self.manager.build_metadata(list(zip(handles, map(len, rows), strict=True))).recurrent
        assert batch is not None
        batch.check(sum(map(len, rows)), len(self.state.conv), self.manager.config.recurrent.ring)
        given = dict(zip(range(len(rows)), rows, strict=True))
        for row, tokens in zip(batch.rows(), [one for one in given.values() if one], strict=True):
            value, conv = 0.0, [0.0] * (WIDTH - 1)
            if row.read_slot >= 0:
                value, conv = self.read(row.read_slot, row.cursor)
            assert not np.isnan([value, *conv]).any()
            if row.read_slot == row.write_slot:
                self._append(row.write_slot, row.cursor, tokens)
            elif row.length <= batch.max_append:
                self._place(row.write_slot, value, conv)
                self._append(row.write_slot, 0, tokens)
            else:
                for position, token in enumerate(tokens, row.start + 1):
                    value, conv = (value * 31 + token + 1) % MODULUS, [*conv[1:], float(token)]
                    if row.snapshot_slot >= 0 and position == row.snapshot_len:
                        self._place(row.snapshot_slot, value, conv)
                self._place(row.write_slot, value, conv)

    def read(self, slot: int, cursor: int) -> tuple[float, list[float]]:
        """The state of a slot after `cursor` tokens of its ring."""
        conv = self.state.conv[slot, :, 0].tolist()
        value = self.state.state[slot].item()
        for token in conv[WIDTH - 1 : WIDTH - 1 + cursor]:
            value = (value * 31 + token + 1) % MODULUS
        assert self.state.ring_u[slot, :cursor].flatten().tolist() == conv[WIDTH - 1 : WIDTH - 1 + cursor]
        return value, conv[cursor : cursor + WIDTH - 1]

    def _place(self, slot: int, value: float, conv: Sequence[float]) -> None:
        for tensor in (self.state.conv, self.state.ring_u, self.state.state):
            tensor[slot] = torch.nan
        self.state.state[slot] = value
        self.state.conv[slot, : WIDTH - 1, 0] = torch.tensor(conv)

    def _append(self, slot: int, cursor: int, tokens: Sequence[int]) -> None:
        rows = torch.tensor(tokens, dtype=torch.float32)
        self.state.conv[slot, WIDTH - 1 + cursor : WIDTH - 1 + cursor + len(rows), 0] = rows
        self.state.ring_u[slot, cursor : cursor + len(rows), 0, 0] = rows

    def run(self, steps: Sequence[tuple[KvCacheHandle, list[int]]], *, fails: bool = False) -> None:
        """Reserve, write and commit; `fails` writes and takes it back."""
        requests = [KvSlotRequest(handle.cache_id, handle.num_tokens + len(ids)) for handle, ids in steps]
        handles, rows = [handle for handle, _ in steps], [ids for _, ids in steps]
        with self.manager.reserve(requests) as reservation:
            self.forward(handles, rows)
            if fails:
                reservation.rollback()
            else:
                reservation.commit(rows)

    def check(self, texts: dict[Any, list[int]]) -> None:
        """Every sequence and every snapshot holds the state of its tokens."""
        self.manager.check_integrity()
        states, hashes = self.manager._kinds[-1], published_hashes(self.manager)
        for handle in self.manager.handles():
            slot, ids = states.get(handle._state).slot, texts[handle.cache_id]
            assert handle.num_tokens == len(ids)
            if slot:
                assert self.read(slot, states.positions.cursor(slot, len(ids))) == state_of(ids)
            else:
                assert not ids or handle.is_swapped
        for block, (slot, position) in states.kept.items():
            ids = self.ids_of[hashes[block]]
            assert len(ids) == position
            assert self.read(slot, states.positions.cursor(slot, position)) == state_of(ids)


class RandomCalls:
    """Random calls of a cache with states, each followed by `HashingModel.check`."""

    def __init__(self, manager: PagedKvCacheManager, seed: int) -> None:
        self.manager, self.model = manager, HashingModel(manager)
        self.random = random.Random(seed)
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.seen: dict[str, int] = dict.fromkeys(
            ("hits", "refused", "kept", "lost", "swapped", "forked", "failed", "drafts", "chunks"), 0
        )
        self._next = 0
        trunk = [self.random.randrange(3) for _ in range(400)]
        self._trunks = [trunk, trunk[:70] + [self.random.randrange(3) for _ in range(200)]]

    def run(self, count: int) -> None:
        names = "begin step step step step fail fork free swap truncate evict".split()
        for _ in range(count):
            try:
                getattr(self, self.random.choice(names))()
            except OutOfBlocksError:
                self.seen["refused"] += 1
                if self.texts:
                    self.free()
            self.model.check(self.texts)
        for handle in self.manager.handles():
            self.manager.free(handle)
        self.manager.clear_prefix_cache()
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.free_state_slots == stats.num_state_slots
        assert stats.state_snapshots == 0

    def _handles(self, *, is_swapped: bool = False) -> list[KvCacheHandle]:
        return [one for one in self.manager.handles() if one.is_swapped == is_swapped]

    def begin(self) -> None:
        if len(self.texts) < 5:
            trunk = self.random.choice(self._trunks)
            prompt = trunk[: self.random.randint(1, 150)] + [
                self.random.randrange(3) for _ in range(self.random.randint(0, 9))
            ]
            handle = self.manager.allocate(self._next, token_ids=prompt)
            self.seen["hits"] += handle.num_tokens > 0
            self.texts[self._next], self.prompts[self._next] = prompt[: handle.num_tokens], prompt
            self._next += 1

    def _steps(self) -> list[tuple[KvCacheHandle, list[int], int]]:
        """Chunks, decodes and drafts of some sequences, with the tokens that stay of each."""
        steps = []
        for handle in self._handles():
            text, prompt = self.texts[handle.cache_id], self.prompts[handle.cache_id]
            if self.random.random() < 0.3:
                continue
            if len(text) < len(prompt):
                limit = min(len(prompt), len(text) + self.random.choice([1, 5, 30, 64, 100, 200]))
                if self.random.random() < 0.7:
                    limit = self.manager.chunk_end(handle, limit, len(prompt))
                ids = prompt[len(text) : limit]
                steps.append((handle, ids, len(ids)))
                self.seen["chunks"] += 1
            else:
                count = self.random.randint(1, self.manager.config.recurrent.max_append)
                steps.append((handle, [self.random.randrange(3) for _ in range(count)], self.random.randint(1, count)))
        return [step for step in steps if step[1]]

    def step(self) -> None:
        if steps := self._steps():
            self.model.run([(handle, ids) for handle, ids, _ in steps])
            for handle, ids, _ in steps:
                self.texts[handle.cache_id] += ids
            self.model.check(self.texts)
            for handle, ids, stay in steps:
                text = self.texts[handle.cache_id]
                if stay < len(ids):
                    self.seen["drafts"] += 1
                    del text[len(text) - len(ids) + stay :]
                    self.manager.truncate(handle, len(text))

    def fail(self) -> None:
        if steps := self._steps():
            self.model.run([(handle, ids) for handle, ids, _ in steps], fails=True)
            self.seen["failed"] += 1

    def fork(self) -> None:
        if (handles := self._handles()) and len(self.texts) < 5:
            source = self.random.choice(handles)
            self.manager.fork(source, self._next)
            self.texts[self._next] = self.texts[source.cache_id].copy()
            self.prompts[self._next] = self.prompts[source.cache_id]
            self._next += 1
            self.seen["forked"] += 1

    def free(self) -> None:
        if self.texts:
            name = self.random.choice(list(self.texts))
            self.manager.free(self.manager.get_handle(name))
            del self.texts[name], self.prompts[name]

    def swap(self) -> None:
        if swapped := self._handles(is_swapped=True):
            self.manager.swap_in(self.random.choice(swapped))
            self.seen["swapped"] += 1
        elif handles := self._handles():
            self.manager.swap_out(self.random.choice(handles))

    def truncate(self) -> None:
        if handles := self._handles():
            handle = self.random.choice(handles)
            text = self.texts[handle.cache_id]
            length = self.random.choice([len(text), max(len(text) - 2, 0), len(text) // 4 * 4, len(text) // 2])
            try:
                self.manager.truncate(handle, length)
            except InvalidInputError:
                self.seen["lost"] += 1
            else:
                del text[length:]
                self.seen["kept"] += 1

    def evict(self) -> None:
        if self.random.random() < 0.1:
            self.manager.evict(self.random.randint(1, 10))
