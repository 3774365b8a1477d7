"""Prefix caching: an index of published full blocks, which the pool keeps until it needs their memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.events import BlockRemoved, BlocksStored, CacheCleared
from paged.cache.guard import CacheGuard
from paged.cache.kinds.kind import Kind, Match
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.pool import BlockPool
from paged.cache.prefix_index import PrefixIndex
from paged.cache.slot_reservation import SequenceState
from paged.cache.tiers.files import FileRead
from paged.cache.tiers.host import HostTier
from paged.cache.token_chain import Hash, PackedIds, TokenChain, pack, to_int32
from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown


class CachedPrefix(NamedTuple):
    """A published prefix: its length, its blocks of all tables, those of the first table, and the chain of its ids."""

    length: int
    blocks: list[int]
    firsts: list[int]
    chain: TokenChain


class PrefixCache:
    """Block pool with the index of its published blocks. Reports changes to `guard`; the caller holds the lock.

    kinds: all kinds of the cache. A cached prefix ends where every kind has what it needs.
    tier: host tier for evicted blocks, or None.
    """

    tier: HostTier | None = None

    def __init__(self, config: PagedKvCacheConfig, guard: CacheGuard) -> None:
        # A tier compares only a block's own ids, so the hash alone must identify the tokens before it.
        algorithm = "sha256" if config.has_tier else config.prefix_hash
        # Without a prefix cache, the index stays empty, and the ids of long blocks would take memory and time.
        block_size = config.block_size if config.enable_prefix_cache else 1
        num_tables, num_whole = len(config.tables), config.num_whole
        self.index = PrefixIndex(config.num_blocks, block_size, algorithm, guard.rollback, num_tables, num_whole)
        self.index.on_forget = self._withdrawn
        self.pool = BlockPool(config.num_blocks, self.index.published, self._evict, guard.rollback)
        self._listeners, self._rollback, self._counts = guard.listeners, guard.rollback, guard.counts
        self._block_size, self._tables = config.block_size, config.tables
        self._num_whole = num_whole
        self._is_enabled = config.enable_prefix_cache
        self.set_kinds(())

    def set_kinds(self, kinds: Sequence[Kind]) -> None:
        """Set all kinds of the cache."""
        self.kinds = kinds
        is_choosy = [type(kind).usable is not Kind.usable for kind in kinds]
        self._takes_all = len(self._tables) == 1 and not any(is_choosy)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take blocks for `count` times block_size positions; 0 for tables that get blocks when they are written."""
        taken, num_whole = self.pool.allocate(count * self._num_whole), self._num_whole
        num_others = len(self._tables) - num_whole
        if not num_others:
            return tuple(taken)
        rows = np.array(taken, np.int64).reshape(count, num_whole)
        return tuple(np.pad(rows, ((0, 0), (0, num_others))).ravel().tolist())

    def read(self, token_ids: list[int], namespace: Hashable) -> FileRead | None:
        """Start to read the blocks of `token_ids` that only files have; None without files."""
        if self.tier is None or self.tier.files is None:
            return None
        _, chain = self.index.match(token_ids, namespace)
        _, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        return self.tier.read(token_ids, namespace, hashes)

    def begin(
        self, state: SequenceState, token_ids: list[int], num_tokens: int, from_files: FileRead | None = None
    ) -> None:
        """Give a new sequence the published blocks that `token_ids` begins with, and fresh blocks up to `num_tokens`.

        from_files: result of `read` for these ids.
        """
        matched, chain = self.index.match(token_ids, state.namespace)
        longest = max(len(token_ids) - 1, 0)
        num_needed = -(-num_tokens // self._block_size)
        length, blocks, fresh = self._require(matched, longest, num_needed)
        if self.tier is not None:
            num_on_device = length
            is_loaded = self._load(token_ids, state.namespace, matched, chain, length, num_needed, from_files)
            if is_loaded:
                matched, chain = self.index.match(token_ids, state.namespace)
            # Also if nothing was loaded: a kind that made room for it may have evicted what this prefix needs.
            length, blocks, fresh = self._require(matched, longest, num_needed)
            if is_loaded:
                state.num_loaded_tokens = length - num_on_device
                self._counts.add("host_hit_tokens", state.num_loaded_tokens)
        self._take(state, chain, length, blocks)
        state.blocks += self.allocate(fresh)
        for kind in self.kinds:
            kind.begin(state, matched, len(token_ids))
        self._retain(state, 0)
        if length:
            self._counts.add("prefix_hits", 1)
            self._counts.add("prefix_hit_tokens", length)
        else:
            self._counts.add("prefix_misses", 1)

    def find(self, token_ids: list[int], namespace: Hashable) -> CachedPrefix:
        """Return the longest published prefix of `token_ids` that a longer prompt could begin with."""
        matched, chain = self.index.match(token_ids, namespace)
        length, blocks = self._usable(matched, len(matched) * self._block_size)
        return CachedPrefix(length, blocks, matched[: length // self._block_size], chain)

    def hold(self, state: SequenceState, prefix: CachedPrefix) -> None:
        """Give a pin a result of `find`."""
        self._take(state, prefix.chain, prefix.length, prefix.blocks)
        for kind in self.kinds:
            kind.begin(state, prefix.firsts, 0)

    def _take(self, state: SequenceState, chain: TokenChain, length: int, blocks: list[int]) -> None:
        """Give a new sequence the published `blocks` of its first `length` tokens."""
        self.pool.share(blocks)
        state.blocks = tuple(blocks)
        state.num_tokens = state.num_cached_tokens = state.num_written = length
        chain.cut(length, length // self._block_size, self._rollback)
        state.chain = chain

    def _retain(self, state: SequenceState, first: int) -> None:
        """Give a sequence's published blocks, from position `first` on, the priority that it asks for."""
        retention = state.retention
        if retention is None:
            return
        last = len(state.chain.serials)
        if retention.num_tokens is not None:
            last = min(last, retention.num_tokens // self._block_size)
        firsts: list[int] = []
        for count in range(first + 1, last + 1):
            block = self.index.block_of(state.chain, count)
            if block is not None:
                firsts.append(block)
        if not firsts:
            return
        blocks = self.index.rows[firsts].ravel()
        level = retention.level
        self.pool.priorities.raise_to(blocks[blocks != 0].tolist(), level)
        for kind in self.kinds:
            kind.retain(firsts, level)

    def _require(self, matched: list[int], longest: int, num_needed: int) -> tuple[int, list[int], int]:
        """Return the length of the prefix that a new sequence takes, its blocks, and the number of blocks to add.

        num_needed: blocks of the first table that the sequence will take.

        Raises:
            OutOfBlocksError: the pool has too few free blocks.
        """
        length, blocks = self._usable(matched, longest)
        fresh = max(0, num_needed - len(blocks) // len(self._tables))
        if fresh * self._num_whole + len(blocks) > self.pool.num_free:
            # A cached block that joins the new sequence can no longer be handed out, so it counts as needed.
            needed = fresh * self._num_whole + self.pool.count_cached(blocks)
            if needed > self.pool.num_free >= num_needed * self._num_whole:
                # A prefix also takes blocks of tables with a window, which a new sequence takes only when it writes.
                # Begin without the prefix, so that `allocate` succeeds whenever `can_allocate` said so.
                return 0, [], num_needed
            self.pool.require(needed)
        return length, blocks, fresh

    def _usable(self, matched: list[int], longest: int) -> tuple[int, list[int]]:
        """Return the length of the usable prefix, at most `longest`, and its blocks of all tables."""
        if self._takes_all or not matched:
            return min(len(matched) * self._block_size, longest), matched
        if len(self._tables) == 1:
            count = self._longest(Match(np.ones((len(matched), 1), bool), matched, (), longest))
            return min(count * self._block_size, longest), matched[:count]
        rows = self.index.rows[matched]  # a copy
        count = self._longest(Match(rows != 0, matched, (), longest))
        length = min(count * self._block_size, longest)
        self._drop_unseen(rows, length)
        return length, rows[:count].ravel().tolist()

    def _drop_unseen(self, rows: NDArray[Any], length: int) -> None:
        """Clear what a sequence of this length does not need, in an array by position and table."""
        for column in range(self._num_whole, len(self._tables)):
            rows[: self._tables[column].first_seen_block(length, self._block_size), column] = 0

    def _longest(self, match: Match) -> int:
        """Return the number of blocks of the longest prefix that every kind can use."""
        is_usable = np.ones(len(match.has_block) + 1, bool)
        for kind in self.kinds:
            of_kind = kind.usable(match)
            if of_kind is not None:
                is_usable &= of_kind
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

        matched, chain: published blocks found by the index. num_usable: length of the prefix that they give.
        num_needed: blocks of the first table that the sequence will take. from_files: blocks to add to the tier first.

        Returns:
            False if the tier cannot extend the prefix or the pool has too few blocks; then no block changes.
        """
        assert self.tier is not None
        size, num_matched = self._block_size, len(matched)
        in_tier, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        if from_files is not None:
            self.tier.keep(from_files, in_tier[in_tier != 0].tolist())
            in_tier, hashes = self.tier.find(token_ids, namespace, chain.hashes)
        self.tier.count(len(token_ids) - num_matched * size, is_hit=len(hashes) > num_matched)
        rows = np.zeros((len(in_tier), len(self._tables)), np.int64)
        rows[:num_matched] = self.index.rows[matched]
        match = Match((rows != 0) | (in_tier != 0), matched, hashes, max(len(token_ids) - 1, 0))
        count = self._longest(match)
        length = min(count * size, match.longest)
        if length <= num_usable:
            return False
        missing = (rows == 0) & (in_tier != 0)
        missing[count:] = False
        self._drop_unseen(missing, length)
        places = np.argwhere(missing)
        held: list[int] = rows[:count].ravel().tolist()
        num_fresh = max(0, num_needed - count) * self._num_whole
        if len(places) + self.pool.count_cached(held) + num_fresh > self.pool.num_free:
            return False
        is_fetched = all(kind.fetch(match, count) for kind in self.kinds)
        loaded: list[int] = []
        if is_fetched:
            self.pool.share(held)
            sources = in_tier[missing].tolist()
            self.tier.blocks.pool.share(sources)  # keep them: blocks evicted now go to the tier and could replace them
            targets = self.pool.allocate(len(places))
            self.overwrite(targets)
            self.tier.load(sources, targets)
            rows[missing] = targets
            self._publish_loaded(rows[:count], num_matched, chain, token_ids, namespace)
            for source, target in zip(sources, targets, strict=True):
                level = self.tier.blocks.pool.priorities.levels.get(source)
                if level is not None and target in self.index.published:
                    self.pool.priorities.raise_to([target], level)
            self.pool.release(held + targets)
            loaded = rows[:count, 0].tolist()
        for kind in self.kinds:
            kind.enter(loaded)
        return is_fetched

    def _publish_loaded(
        self,
        rows: NDArray[np.int64],
        num_matched: int,
        chain: TokenChain,
        token_ids: list[int],
        namespace: Hashable,
    ) -> None:
        """Publish the loaded blocks in `rows` (by position and table) behind the published `chain`."""
        num_tokens = len(rows) * self._block_size
        holder = SequenceState("", namespace, blocks=tuple(rows.ravel().tolist()), num_tokens=num_tokens)
        holder.chain = TokenChain(token_ids[:num_tokens], chain.hashes.copy(), chain.serials.copy())
        self.publish(holder)
        for row in rows[:num_matched].tolist():
            self.index.complete(row[0], row)

    def commit(self, state: SequenceState, token_ids: list[int]) -> None:
        """Publish the full blocks. `token_ids` are the known ids from position 0 on."""
        known, num_given = state.chain.ids, min(len(token_ids), state.num_tokens)
        num_known = len(known)
        if token_ids[: min(num_known, num_given)] != known[:num_given]:
            raise InvalidInputError(f"token_ids: differ from the ids given before for {state.seq_id!r}")
        packed: PackedIds | None = None
        if num_given > num_known:  # check all ids
            end_of_blocks = num_given - num_given % self._block_size
            packed = pack(token_ids[len(state.chain.serials) * self._block_size : end_of_blocks])
            pack(token_ids[end_of_blocks:num_given])
        self._rollback.keep_end(known, num_known)
        known += token_ids[num_known:num_given]
        self.publish(state, packed)

    def append(self, states: Sequence[SequenceState], token_ids: Sequence[list[int]]) -> None:
        """Note the newest ids of sequences whose earlier ids are known; publish full blocks."""
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
            self._retain(state, end - 1)
            self._report(state, end - 1)
        return True

    def publish(self, state: SequenceState, packed: PackedIds | None = None) -> None:
        """Publish the unpublished full blocks with known token ids. packed: the result of `pack` for them, if known."""
        chain, block_size = state.chain, self._block_size
        first, last = len(chain.serials), min(len(chain.ids), state.num_tokens) // block_size
        if last <= first or not self._is_enabled:
            return
        num_tables = len(self._tables)
        blocks = state.blocks[first * num_tables : last * num_tables : num_tables]
        if 0 in blocks:  # freed behind the sliding window, so the chain ends here
            return
        rows: list[tuple[int, ...]] = []
        if num_tables > 1:
            for start in range(first * num_tables, last * num_tables, num_tables):
                rows.append(state.blocks[start : start + num_tables])
        displaced = self.index.publish(blocks, chain, state.namespace, rows, packed)
        self._retain(state, first)
        self._report(state, first, displaced)

    def _report(self, state: SequenceState, first: int, displaced: Sequence[tuple[int, Hash]] = ()) -> None:
        """Tell listeners that a sequence's blocks from `first` on were published, and which blocks they replaced."""
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
        for kind in self.kinds:
            kind.check_share(giver, num_tokens)
        end = num_blocks * len(self._tables)
        shared, dropped = giver.blocks[:end], taker.blocks[:end]
        taker.begin_change(self._rollback)
        self.pool.share(shared)
        self.pool.release(dropped)
        taker.blocks = shared + taker.blocks[end:]
        taker.num_tokens = taker.num_cached_tokens = taker.num_written = num_tokens
        taker.chain = giver.chain.copy(num_tokens, num_blocks)
        for kind in self.kinds:
            kind.fork(giver, taker)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Withdraw `blocks`, so that no new sequence finds them."""
        withdrawn = self.index.forget(blocks)
        if self._listeners.on_event:
            for _, hash_ in withdrawn:
                self._listeners.events.append(BlockRemoved(hash_))

    def clear(self, states: Iterable[SequenceState]) -> None:
        """Withdraw all blocks; `states` are all live sequences."""
        self.index.forget(list(self.index.published))
        if self.tier is not None:
            self.tier.clear()
        for state in states:
            state.chain.cut(len(state.chain.ids), 0, self._rollback)
        if self._listeners.on_event:
            self._listeners.events.append(CacheCleared())

    def _withdrawn(self, firsts: Sequence[int], blocks: Sequence[int]) -> None:
        """Follow a withdrawal. firsts: blocks of the first table. blocks: all withdrawn blocks."""
        self.pool.unpublished(blocks)
        for kind in self.kinds:
            kind.withdrawn(firsts)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Prepare to write K/V to `blocks`. If a call that failed had evicted some of them, they stay evicted."""
        self._rollback.keep_lost(self._drop_cached, blocks)

    def _drop_cached(self, blocks: Sequence[int]) -> None:
        self._forget_evicted([block for block in blocks if block in self.pool.cached])

    def close_tiers(self, timeout_s: float) -> None:
        """Write free published blocks and the blocks of the host tier to files, then stop using files."""
        if self.tier is not None and self.tier.files is not None:
            self._store(list(self.pool.cached))
            self.tier.close(timeout_s)

    def _store(self, blocks: list[int]) -> None:
        """Copy published blocks and the states that follow them to the tier."""
        if self.tier is not None:
            self.tier.store(blocks)
            firsts: dict[int, None] = {}
            for first, _, _ in self.index.withdrawn_with(blocks):
                firsts[first] = None
            for kind in self.kinds:
                kind.store(firsts)

    def _evict(self, blocks: list[int]) -> None:
        self._store(blocks)
        self._forget_evicted(blocks)

    def _forget_evicted(self, blocks: list[int]) -> None:
        num_cached = len(self.pool.cached)
        self.withdraw(blocks)
        self._counts.add("evictions", num_cached - len(self.pool.cached))


def _cut_ids(chains: Iterable[TokenChain], lengths: Iterable[int]) -> None:
    for chain, length in zip(chains, lengths, strict=True):
        del chain.ids[length:]
