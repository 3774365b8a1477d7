"""Prefix caching: full blocks are published in an index, and the pool keeps them until it needs their memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paged.cache.events import BlockRemoved, BlocksStored, CacheCleared
from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.pool import BlockPool
from paged.cache.prefix_index import PrefixIndex
from paged.cache.recurrent_states import RecurrentStates
from paged.cache.slot_reservation import SequenceState
from paged.cache.tiers.files import FileRead
from paged.cache.tiers.host import HostTier
from paged.cache.tiers.states import HostState
from paged.cache.token_chain import Hash, TokenChain, pack, to_int32
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.scalars import shown


class PrefixCache:
    """A block pool and the index of its published blocks. Reports changes to `guard`; the caller holds its lock.

    recurrent: states of recurrent layers, if there are any; a prompt then begins only where a snapshot is kept.
    tier: where evicted blocks go, if there is one.
    """

    recurrent: RecurrentStates | None = None
    tier: HostTier | None = None

    def __init__(self, config: PagedKvCacheConfig, guard: CacheGuard) -> None:
        are_needed = [table.sliding_window is None for table in config.tables[1:]]
        # A tier compares a block's own ids. That those before it are the same, its hash has to tell.
        algorithm = "sha256" if config.has_tier else config.prefix_hash
        self.index = PrefixIndex(config.num_blocks, config.block_size, algorithm, guard.rollback, are_needed)
        self.pool = BlockPool(config.num_blocks, self.index.published, self._evict, guard.rollback)
        if self.index.other_tables is not None:
            self.index.other_tables.on_withdrawn = self.pool.unpublished
        self._listeners, self._rollback, self._counts = guard.listeners, guard.rollback, guard.counts
        self._block_size, self._tables = config.block_size, config.tables
        self._num_whole = config.num_whole
        self._is_enabled = config.enable_prefix_cache

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take blocks for `count` times block_size positions; 0 for a table that gets blocks when they are written."""
        taken, num_whole = self.pool.allocate(count * self._num_whole), self._num_whole
        num_others = len(self._tables) - num_whole
        if not num_others:
            return tuple(taken)
        rows = np.array(taken, np.int64).reshape(count, num_whole)
        return tuple(np.pad(rows, ((0, 0), (0, num_others))).ravel().tolist())

    def read(self, token_ids: list[int], namespace: Hashable) -> FileRead | None:
        """Begin to read what `token_ids` continues with from files; None without files."""
        if self.tier is None or self.tier.files is None:
            return None
        _, chain = self.index.match(token_ids, namespace)
        _, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        return self.tier.read(token_ids, namespace, hashes)

    def begin(
        self, state: SequenceState, token_ids: list[int], num_tokens: int, from_files: FileRead | None = None
    ) -> None:
        """Give a new sequence the published blocks that `token_ids` begins with, and others up to `num_tokens`.

        from_files: what `read` has returned for it.
        """
        matched, chain = self.index.match(token_ids, state.namespace)
        longest = max(len(token_ids) - 1, 0)
        length, blocks = self._usable(matched, longest)
        num_needed = -(-num_tokens // self._block_size)
        num_on_device = length
        if self.tier is not None and self._load(
            token_ids, state.namespace, matched, chain, length, num_needed, from_files
        ):
            matched, chain = self.index.match(token_ids, state.namespace)
            length, blocks = self._usable(matched, longest)
            state.num_loaded_tokens = length - num_on_device
            self._counts.add("host_hit_tokens", state.num_loaded_tokens)
        held = blocks
        if len(self._tables) > 1:
            held = [block for block in blocks if block]
        fresh = max(0, num_needed - len(blocks) // len(self._tables))
        if fresh * self._num_whole + len(held) > self.pool.num_free:
            # Revived free blocks can no longer be handed out.
            needed = fresh * self._num_whole + self.pool.count_cached(held)
            if needed > self.pool.num_free >= num_needed * self._num_whole:
                # A prefix also takes blocks of tables with a window; a new sequence takes those only when it writes.
                # Keep the capacity that `can_allocate` has promised.
                length, blocks, held, fresh = 0, [], [], num_needed
            else:
                self.pool.require(needed)
        self.pool.share(held)
        state.blocks = (*blocks, *self.allocate(fresh))
        state.num_tokens = state.num_cached_tokens = state.num_written = length
        chain.cut(length, length // self._block_size, self._rollback)
        state.chain = chain
        if self.recurrent is not None:
            self.recurrent.begin(state, matched, len(token_ids))
        if length:
            self._counts.add("prefix_hits", 1)
            self._counts.add("prefix_hit_tokens", length)
        else:
            self._counts.add("prefix_misses", 1)

    def _usable(self, matched: list[int], longest: int) -> tuple[int, list[int]]:
        """Return the length of the usable prefix, at most `longest`, and its blocks of all tables.

        A table with a window needs only the blocks that the next token sees.
        """
        block_size, other_tables = self._block_size, self.index.other_tables
        usable: list[int] | None = None
        if self.recurrent is not None:
            usable = self.recurrent.usable(matched, longest)
        if other_tables is None or not matched:
            if usable is not None:
                matched = matched[: usable[-1]]
            return min(len(matched) * block_size, longest), matched
        rows = np.column_stack([matched, other_tables.rows[matched]])
        count = self._longest(rows, longest, usable)
        length = min(count * block_size, longest)
        for column, table in enumerate(self._tables):
            if column:
                rows[: table.first_seen_block(length, block_size), column] = 0
        return length, rows[:count].ravel().tolist()

    def _longest(self, rows: NDArray[np.int64], longest: int, usable: Sequence[int] | None) -> int:
        """Return the number of blocks of the longest usable prefix.

        rows: blocks by position and table, 0 for a missing one. usable: possible numbers of blocks, None for all.
        """
        block_size, indices = self._block_size, np.arange(len(rows))
        lengths = np.minimum(np.arange(len(rows) + 1) * block_size, longest)  # for each number of blocks
        is_usable = np.ones(len(lengths), bool)
        for column, table in enumerate(self._tables):
            if column and table.sliding_window is not None:
                last_gap = np.maximum.accumulate(np.where(rows[:, column], -1, indices))
                first_seen = [table.first_seen_block(length, block_size) for length in lengths.tolist()[1:]]
                is_usable[1:] &= last_gap < first_seen
        if usable is not None:
            is_usable &= np.isin(np.arange(len(lengths)), usable)
        return int(np.flatnonzero(is_usable)[-1])

    def _load(
        self,
        token_ids: list[int],
        namespace: Hashable,
        matched: list[int],
        chain: TokenChain,
        num_usable: int,
        num_needed: int,
        from_files: FileRead | None,
    ) -> bool:
        """Copy blocks that `token_ids` begins with from the tier to free blocks, and publish them.

        matched, chain: from the index. num_usable: tokens that they are good for. num_needed: blocks of the first table
        that the sequence will take. from_files: blocks for the tier.

        Returns:
            False if the tier has none that help, or the pool has no memory for them; then nothing changes.
        """
        assert self.tier is not None
        size, num_tables, num_matched = self._block_size, len(self._tables), len(matched)
        in_tier, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        if from_files is not None:
            self.tier.keep(from_files, in_tier[in_tier != 0].tolist())
            in_tier, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        self.tier.count(len(token_ids) - num_matched * size, is_hit=len(hashes) > num_matched)
        rows = np.zeros((len(in_tier), num_tables), np.int64)
        rows[:num_matched, 0] = matched
        if self.index.other_tables is not None and matched:
            rows[:num_matched, 1:] = self.index.other_tables.rows[matched]
        longest = max(len(token_ids) - 1, 0)
        usable: list[int] | None = None
        if self.recurrent is not None and self.recurrent.tier is not None:
            usable = self.recurrent.usable(matched, longest)
            for end, hash_ in enumerate(hashes, 1):
                if hash_ in self.recurrent.tier.entries and end * size <= longest:
                    usable.append(end)
        count = self._longest(rows + in_tier, longest, usable)
        length = min(count * size, longest)
        if length <= num_usable:
            return False
        missing = (rows == 0) & (in_tier != 0)
        missing[count:] = False
        for column, table in enumerate(self._tables):
            missing[: table.first_seen_block(length, size), column] &= table.sliding_window is None or column == 0
        places = np.argwhere(missing)
        held: list[int] = rows[:count].ravel().tolist()
        num_fresh = max(0, num_needed - count) * self._num_whole
        if len(places) + self.pool.count_cached(held) + num_fresh > self.pool.num_free:
            return False
        loaded_state: tuple[int, HostState] | None = None
        if self.recurrent is not None and not (count <= num_matched and matched[count - 1] in self.recurrent.snapshots):
            loaded_state = self.recurrent.load(hashes[count - 1])
            if loaded_state is None:
                return False
        self.pool.share(held)
        sources = in_tier[missing].tolist()
        self.tier.pool.share(sources)  # evicted blocks go to the tier, and must not replace them there
        targets = self.pool.allocate(len(places))
        self.overwrite(targets)
        self.tier.load(sources, targets)
        rows[missing] = targets
        self._publish_loaded(rows[:count], num_matched, chain, token_ids, namespace)
        if loaded_state is not None and self.recurrent is not None:
            self.recurrent.keep_loaded(*loaded_state, int(rows[count - 1, 0]))
        self.pool.release(held + targets)
        return True

    def _publish_loaded(
        self,
        rows: NDArray[np.int64],
        num_matched: int,
        chain: TokenChain,
        token_ids: list[int],
        namespace: Hashable,
    ) -> None:
        """Publish the blocks of `rows` that are not yet, by position and table; `chain` is that of the others."""
        num_tokens = len(rows) * self._block_size
        holder = SequenceState("", namespace, blocks=tuple(rows.ravel().tolist()), num_tokens=num_tokens)
        holder.chain = TokenChain(token_ids[:num_tokens], chain.hashes.copy(), chain.serials.copy())
        self.publish(holder)
        other_tables = self.index.other_tables
        if other_tables is None:
            return
        for first, *other_blocks in rows[:num_matched].tolist():
            for column, other in enumerate(other_blocks):
                if other and not other_tables.rows[first, column]:
                    other_tables.add(other, first, column)

    def commit(self, state: SequenceState, token_ids: list[int]) -> None:
        """Publish the full blocks; `token_ids` are the known ids from position 0 on."""
        known, num_given = state.chain.ids, min(len(token_ids), state.num_tokens)
        num_known = len(known)
        if token_ids[: min(num_known, num_given)] != known[:num_given]:
            raise InvalidInputError(f"token_ids: differ from those given before for {state.request_id!r}")
        # Check the last, partial block; the others are checked when they are published.
        pack(token_ids[num_given - num_given % self._block_size : num_given])
        self._rollback.keep_end(known, num_known)
        known += token_ids[num_known:num_given]
        self.publish(state)

    def append(self, states: Sequence[SequenceState], token_ids: Sequence[list[int]]) -> None:
        """Record the ids at the last positions of sequences whose earlier ids are known; publish full blocks."""
        chains = [state.chain for state in states]
        self._rollback.append((_cut_ids, chains, [len(chain.ids) for chain in chains]))
        ready = []
        for state, chain, ids in zip(states, chains, token_ids, strict=True):
            if len(chain.ids) + len(ids) == state.num_tokens:
                chain.ids += ids
                if state.num_tokens // self._block_size > len(chain.serials):
                    ready.append(state)
        if not (len(ready) > 1 and self._publish_one_each(ready)):
            for state in ready:
                self.publish(state)

    def _publish_one_each(self, states: Sequence[SequenceState]) -> bool:
        """Publish the next block of every sequence at once, as after a decode step; False if one needs `publish`."""
        ends = [len(state.chain.serials) + 1 for state in states]
        if len(self._tables) > 1 or not self._is_enabled or 1 in ends:
            return False
        if ends != [state.num_tokens // self._block_size for state in states]:
            return False
        blocks = [state.blocks[end - 1] for state, end in zip(states, ends, strict=True)]
        if 0 in blocks or not self.index.publish_one_each(blocks, [state.chain for state in states]):
            return False
        for state, end in zip(states, ends, strict=True):
            self._report(state, end - 1)
        return True

    def publish(self, state: SequenceState) -> None:
        """Publish the full blocks whose token ids are known and that are not published yet."""
        chain, block_size = state.chain, self._block_size
        first, last = len(chain.serials), min(len(chain.ids), state.num_tokens) // block_size
        if last <= first or not self._is_enabled:
            return
        num_tables = len(self._tables)
        blocks = state.blocks[first * num_tables : last * num_tables : num_tables]
        if 0 in blocks:  # freed behind the sliding window: the chain ends
            return
        rows: list[tuple[int, ...]] = []
        if num_tables > 1:
            for start in range(first * num_tables, last * num_tables, num_tables):
                rows.append(state.blocks[start + 1 : start + num_tables])
        displaced = self.index.publish(blocks, chain, state.namespace, rows)
        self.pool.unpublished(block for block, _ in displaced)
        self._report(state, first, displaced)

    def _report(self, state: SequenceState, first: int, displaced: Sequence[tuple[int, Hash]] = ()) -> None:
        """Tell listeners that a sequence's blocks from `first` on were published, and others displaced."""
        if self._listeners.on_event:
            chain, block_size = state.chain, self._block_size
            hashes = tuple(chain.hashes[first:])
            for _, hash_ in displaced:
                if hash_ not in hashes:
                    self._listeners.events.append(BlockRemoved(hash_))
            if hashes:
                parent_hash = chain.hashes[first - 1] if first else self.index.root_hash(state.namespace)
                token_ids = tuple(to_int32(chain.ids[first * block_size : (first + len(hashes)) * block_size]))
                self._listeners.events.append(BlocksStored(hashes, parent_hash, token_ids, state.namespace))

    def share(self, giver: SequenceState, taker: SequenceState, num_blocks: int) -> None:
        """Implement `PagedKvCacheManager.share_prefix_blocks`."""
        if self.recurrent is not None:
            raise UnsupportedError(
                "share_prefix_blocks: recurrent layers also need a state; fork, or let prefixes match"
            )
        if giver is taker:
            raise InvalidInputError("target: the same sequence as source")
        if giver.namespace != taker.namespace:
            raise InvalidInputError(f"target: namespace {shown(taker.namespace)}, expected {shown(giver.namespace)}")
        if taker.num_tokens > 0:
            raise InvalidInputError(f"target: holds {taker.num_tokens} tokens, expected an empty sequence")
        num_tokens = num_blocks * self._block_size
        if num_tokens > giver.num_tokens:
            full = giver.num_tokens // self._block_size
            raise InvalidInputError(f"num_blocks: {num_blocks}, expected at most the {full} full blocks of source")
        num_tables = len(self._tables)
        end = num_blocks * num_tables
        shared, dropped = giver.blocks[:end], taker.blocks[:end]
        for index, table in enumerate(self._tables):
            first = table.first_seen_block(num_tokens, self._block_size) if index else 0
            if 0 in shared[first * num_tables + index :: num_tables]:
                raise InvalidInputError("source: the first of these blocks lie behind its sliding window")
        taker.begin_change(self._rollback)
        self.pool.share(shared)
        self.pool.release(dropped)
        taker.blocks = shared + taker.blocks[end:]
        taker.num_tokens = taker.num_cached_tokens = taker.num_written = num_tokens
        taker.chain = giver.chain.copy(num_tokens, num_blocks)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Make `blocks` unfindable."""
        withdrawn = self.index.forget(blocks)
        if self._listeners.on_event:
            for _, hash_ in withdrawn:
                self._listeners.events.append(BlockRemoved(hash_))

    def clear(self, states: Iterable[SequenceState]) -> None:
        """Withdraw all blocks; `states` are all live sequences."""
        published = list(self.index.published)
        self.index.forget(published)
        self.pool.unpublished(published)
        if self.tier is not None:
            self.tier.clear()
        if self.recurrent is not None and self.recurrent.tier is not None:
            self.recurrent.tier.clear()
        for state in states:
            state.chain.cut(len(state.chain.ids), 0, self._rollback)
        if self._listeners.on_event:
            self._listeners.events.append(CacheCleared())

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Prepare to write K/V to `blocks`: those that an earlier, failed call had evicted stay evicted."""
        self._rollback.keep_lost(self._drop_cached, blocks)

    def _drop_cached(self, blocks: Sequence[int]) -> None:
        evicted = [block for block in blocks if block in self.pool.cached]
        self._forget_evicted(evicted)
        self.pool.unpublished(evicted)

    def close_tiers(self, timeout_s: float) -> None:
        """Write free published blocks and those of the host to files, and use these no more."""
        if self.tier is not None and self.tier.files is not None:
            self._store(list(self.pool.cached))
            self.tier.close(timeout_s)

    def _store(self, blocks: list[int]) -> None:
        """Copy published blocks, and the states behind them, to the tier."""
        if self.tier is not None:
            self.tier.store(blocks)
            if self.recurrent is not None:
                firsts: dict[int, None] = {}
                for first, _, _ in self.index.withdrawn_with(blocks):
                    firsts[first] = None
                self.recurrent.store(firsts)

    def _evict(self, blocks: list[int]) -> None:
        self._store(blocks)
        self._forget_evicted(blocks)

    def _forget_evicted(self, blocks: list[int]) -> None:
        num_cached = len(self.pool.cached)
        self.withdraw(blocks)
        self._counts.add("evictions", len(blocks) + num_cached - len(self.pool.cached))  # with those that needed them


def _cut_ids(chains: Iterable[TokenChain], lengths: Iterable[int]) -> None:
    for chain, length in zip(chains, lengths, strict=True):
        del chain.ids[length:]
