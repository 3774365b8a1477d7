"""Sequences over a pool of K/V blocks: room, lengths, sharing with copy-on-write, and what a forward needs to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from threading import RLock

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import KvSlotRequest, SeqId, UnifiedBatchItem
from paged.block_pool import BlockPool
from paged.errors import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError, StaleHandleError
from paged.kernels.attention_plan import AttentionPlan
from paged.kv_cache import (
    CacheStats,
    KvCacheHandle,
    KvSlotReservation,
    PagedKvCacheConfig,
    ReservedSlots,
    SequenceState,
    check_count,
)
from paged.kv_cache_tensors import KvCacheTensors, to_device
from paged.metadata import AttentionMetadata

_Span = tuple[SequenceState, int, int]
"""A sequence, the first position that will be written, and the end of those."""


class PagedKvCacheManager:
    """The K/V cache of many sequences. Thread-safe; a call that raises leaves everything as it was.

    `num_tokens` of a handle counts positions that hold valid K/V, `capacity` those its blocks have room for. Blocks
    may be shared; before a shared one is written it is replaced by a copy with its data.

    Every call that takes a handle raises StaleHandleError when its sequence has been freed (except `free`) and
    InvalidInputError when it belongs to another manager.
    """

    def __init__(self, config: PagedKvCacheConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks)
        self._tensors = KvCacheTensors(config)
        self._handles: dict[SeqId, KvCacheHandle] = {}
        self._lock = RLock()
        self._cow_copies = 0
        self._allocation_failures = 0

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._tensors.storage.device

    def allocate(
        self,
        request_id: SeqId,
        num_tokens: int = 0,
        *,
        token_ids: Sequence[int] | None = None,
        namespace: Hashable = None,
    ) -> KvCacheHandle:
        """A new sequence of length 0 with room for `num_tokens`, or for `token_ids` where those are more.

        Raises:
            InvalidInputError: `request_id` names a live sequence, or `num_tokens` is negative.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        check_count("num_tokens", num_tokens)
        room = max(num_tokens, 0 if token_ids is None else len(token_ids))
        with self._lock:
            self._check_new(request_id)
            self._check_length(room)
            state = SequenceState(request_id, namespace)
            self._make_room([(state, 0, room)])
            self._tensors.clear(state.blocks)
            return self._add(state)

    def extend(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Room for `num_tokens` more, and the length grows; the caller writes the K/V. New blocks hold zeros.

        Raises:
            InvalidInputError: `num_tokens` is negative.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        check_count("num_tokens", num_tokens)
        with self._lock:
            state = self._state(handle)
            target = state.num_tokens + num_tokens
            self._check_length(target)
            num_blocks_before = len(state.blocks)
            self._make_exclusive([(state, state.num_tokens, target)])
            self._tensors.clear(state.blocks[num_blocks_before:])
            self._settle(state)
            state.num_tokens = target

    def advance(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """`num_tokens` more positions now hold valid K/V.

        Raises:
            InvalidInputError: `num_tokens` is negative or goes beyond the capacity.
            SequenceTooLongError: beyond `max_seq_len`.
        """
        check_count("num_tokens", num_tokens)
        with self._lock:
            state = self._state(handle)
            target = state.num_tokens + num_tokens
            if target > handle.capacity:
                raise InvalidInputError(f"num_tokens: length {target}, expected at most the capacity {handle.capacity}")
            self._check_length(target)
            self._settle(state)
            state.num_tokens = target

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` positions; blocks beyond them are given back.

        Raises:
            InvalidInputError: `num_tokens` is negative or more than the sequence holds.
        """
        check_count("num_tokens", num_tokens)
        with self._lock:
            state = self._state(handle)
            if num_tokens > state.num_tokens:
                raise InvalidInputError(f"num_tokens: {num_tokens}, expected at most the length {state.num_tokens}")
            self._settle(state)
            kept = self._blocks_for(num_tokens)
            dropped, state.blocks = state.blocks[kept:], state.blocks[:kept]
            self._pool.release(dropped)
            state.num_tokens = state.num_written = num_tokens
            state.num_cached_tokens = min(state.num_cached_tokens, num_tokens)

    def fork(self, handle: KvCacheHandle, request_id: SeqId) -> KvCacheHandle:
        """A second sequence with the same tokens, over the same blocks until either writes to one.

        Raises:
            InvalidInputError: `request_id` names a live sequence.
        """
        with self._lock:
            source = self._state(handle)
            self._check_new(request_id)
            self._settle(source)
            blocks = source.blocks[: self._blocks_for(source.num_tokens)]
            self._pool.share(blocks)
            return self._add(SequenceState(request_id, source.namespace, blocks=blocks, num_tokens=source.num_tokens))

    def free(self, handle: KvCacheHandle) -> None:
        """Give the sequence up; a second time does nothing. Blocks are free again once nobody holds them.

        Raises:
            InvalidInputError: the handle belongs to another manager.
        """
        with self._lock:
            if not handle.is_valid:
                return
            state = self._state(handle)
            self._settle(state)
            self._pool.release(state.blocks)
            state.blocks, state.is_valid = (), False
            state.num_tokens = state.num_cached_tokens = state.num_written = 0
            del self._handles[state.request_id]

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Room for every sequence up to its `target_len`, for all of them or for none.

        `admission_target_len` is not given room: it is only checked that all sequences would fit at those lengths.

        Raises:
            InvalidInputError: an id is unknown or given twice, or a length is below the sequence's own.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        with self._lock:
            spans, admission_spans = self._spans(requests)
            if admission_spans != spans:
                self._check_free(sum(len(shared) + fresh for shared, fresh in map(self._needs, admission_spans)))
            before = [(len(state.blocks), state.num_written) for state, _, _ in spans]
            replaced = self._make_room(spans)
            for state, _, _ in spans:
                self._settle(state)
            slots = [
                ReservedSlots(state, target, num_blocks, num_written, swapped)
                for (state, _, target), (num_blocks, num_written), swapped in zip(spans, before, replaced, strict=True)
            ]
            return KvSlotReservation(self._lock, self._pool, slots)

    def share_prefix_blocks(self, source: KvCacheHandle, target: KvCacheHandle, num_blocks: int) -> None:
        """The first `num_blocks` blocks of `source` become those of the empty `target`, in place of room it had there.

        Raises:
            InvalidInputError: the blocks are not all full of valid tokens, `target` is not empty or is `source`, or
                their namespaces differ.
        """
        check_count("num_blocks", num_blocks)
        with self._lock:
            giver, taker = self._state(source), self._state(target)
            if giver is taker:
                raise InvalidInputError("target: the same sequence as source")
            if giver.namespace != taker.namespace:
                raise InvalidInputError(f"target: namespace {taker.namespace!r}, expected {giver.namespace!r}")
            if taker.num_tokens > 0:
                raise InvalidInputError(f"target: holds {taker.num_tokens} tokens, expected an empty sequence")
            num_tokens = num_blocks * self.config.block_size
            if num_tokens > giver.num_tokens:
                full = giver.num_tokens // self.config.block_size
                raise InvalidInputError(f"num_blocks: {num_blocks}, expected at most the {full} full blocks of source")
            self._settle(taker)
            shared, dropped = giver.blocks[:num_blocks], taker.blocks[:num_blocks]
            self._pool.share(shared)
            self._pool.release(dropped)
            taker.blocks = shared + taker.blocks[num_blocks:]
            taker.num_tokens = taker.num_cached_tokens = taker.num_written = num_tokens

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate` would find room for a new sequence of `num_tokens`.

        Raises:
            InvalidInputError: `num_tokens` is negative.
        """
        check_count("num_tokens", num_tokens)
        longest = self.config.max_seq_len
        return (longest is None or num_tokens <= longest) and self._blocks_for(num_tokens) <= self._pool.num_free

    def get_handle(self, request_id: SeqId) -> KvCacheHandle | None:
        """The live sequence of that name, or None."""
        return self._handles.get(request_id)

    def handles(self) -> tuple[KvCacheHandle, ...]:
        """All live sequences, oldest first."""
        with self._lock:
            return tuple(self._handles.values())

    def k_cache(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: there is no such layer.
        """
        self._check_layer(layer)
        return self._tensors.k_cache(layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k_cache`."""
        self._check_layer(layer)
        return self._tensors.v_cache(layer)

    def build_metadata(self, items: Iterable[UnifiedBatchItem | tuple[KvCacheHandle, int]]) -> AttentionMetadata:
        """One forward's view of its sequences, whose new tokens stand right after the `num_tokens` they hold.

        Args:
            items: batch items (without `kv_cache`, the sequence named `seq_id`), or pairs of handle and new tokens.

        Raises:
            InvalidInputError: a sequence is unknown, given twice, or has no room for its tokens.
            OutOfBlocksError: a shared block would have to be copied, and none is free; not after `reserve`.
        """
        with self._lock:
            states, counts = self._new_tokens(items)
            self._make_exclusive(
                [(state, state.num_tokens, state.num_tokens + n) for state, n in zip(states, counts, strict=True)]
            )
            table = np.zeros((len(states), max((len(state.blocks) for state in states), default=0)), np.int32)
            for row, state in zip(table, states, strict=True):
                row[: len(state.blocks)] = state.block_row()
            lengths = np.fromiter((state.num_tokens for state in states), np.int64, len(states))
        query_lens = np.array(counts, np.int64)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(query_lens, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(lengths - offsets[:-1], query_lens)
        blocks, within = np.divmod(positions, self.config.block_size)
        slots = table[np.repeat(np.arange(len(counts)), query_lens), blocks] * np.int64(self.config.block_size) + within
        seq_lens = lengths + query_lens
        max_seqlen_q, max_seqlen_k = int(query_lens.max(initial=0)), int(seq_lens.max(initial=0))
        slot_mapping, positions_there, cu_seqlens_q, seq_lens_there, block_table = to_device(
            (slots, positions, offsets.astype(np.int32), seq_lens.astype(np.int32), table), self.device
        )
        return AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens_there,
            block_table=block_table,
            slot_mapping=slot_mapping,
            positions=positions_there,
            max_seqlen_q=max_seqlen_q,
            plan=AttentionPlan(cu_seqlens_q, seq_lens_there, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k),
        )

    def write_kv(
        self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of the token at `position`, [num_kv_heads, head_dim], or of consecutive ones from there, with a
        first axis. Slow: for tests and inspection. The length stays; positions may lie anywhere within the capacity.

        Raises:
            InvalidInputError: layer, position or a shape does not fit.
            OutOfBlocksError: a shared block would have to be copied, and none is free.
        """
        self._check_layer(layer)
        check_count("position", position)
        if key.dim() == 2 and value.dim() == 2:
            key, value = key[None], value[None]
        self._tensors.check_rows(key, value)
        with self._lock:
            state = self._state(handle)
            end = position + len(key)
            if end > handle.capacity:
                raise InvalidInputError(f"position: {position}..{end}, expected within the capacity {handle.capacity}")
            self._make_exclusive([(state, position, end)])
            self._tensors.write(layer, self._slots(state, position, end), key, value)
            readable = max(state.num_tokens, state.num_written)
            if position <= readable:
                state.num_written = max(readable, end)

    def read_kv(
        self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at positions start..start + num_tokens, each [num_tokens, num_kv_heads, head_dim]. Slow.

        Raises:
            InvalidInputError: there is no such layer, or a position holds nothing: it is not below `num_tokens`, and
                `write_kv` has not written everything from there up to it.
        """
        self._check_layer(layer)
        check_count("start", start)
        check_count("num_tokens", num_tokens)
        with self._lock:
            state = self._state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            return self._tensors.read(layer, self._slots(state, start, end))

    def stats(self) -> CacheStats:
        """The cache as of now."""
        with self._lock:
            free, total = self._pool.num_free, self._pool.num_blocks
            return CacheStats(
                num_blocks=total,
                free_blocks=free,
                used_blocks=total - free,
                shared_blocks=self._pool.num_shared,
                num_sequences=len(self._handles),
                num_tokens=sum(handle.num_tokens for handle in self._handles.values()),
                capacity_tokens=total * self.config.block_size,
                utilization=(total - free) / total,
                cow_copies=self._cow_copies,
                allocation_failures=self._allocation_failures,
                bytes_per_block=self._tensors.bytes_per_block,
            )

    def check_integrity(self) -> None:
        """Recount every reference from the live sequences and open reservations.

        Raises:
            PagedError: names the first contradiction.
        """
        with self._lock:
            references: Counter[int] = Counter()
            reservations: set[KvSlotReservation] = set()
            for handle in self._handles.values():
                state = self._state(handle)
                references.update(state.blocks)
                if state.reservation is not None:
                    reservations.add(state.reservation)
                if len(set(state.blocks)) != len(state.blocks):
                    raise PagedError(f"{state.request_id!r} holds a block twice: {state.blocks}")
                if not state.num_cached_tokens <= state.num_tokens <= handle.capacity:
                    raise PagedError(
                        f"{state.request_id!r}: {state.num_cached_tokens} cached of {state.num_tokens} tokens, "
                        f"capacity {handle.capacity}"
                    )
            for reservation in reservations:
                references.update(reservation.kept_blocks)
            self._pool.check(references)

    def _state(self, handle: KvCacheHandle) -> SequenceState:
        state = handle._state
        if not state.is_valid:
            raise StaleHandleError(f"handle: {state.request_id!r} has been freed")
        if self._handles.get(state.request_id) is not handle:
            raise InvalidInputError(f"handle: {state.request_id!r} belongs to another manager")
        return state

    def _add(self, state: SequenceState) -> KvCacheHandle:
        handle = KvCacheHandle(state, self._pool, self.config.block_size)
        self._handles[state.request_id] = handle
        return handle

    @staticmethod
    def _settle(state: SequenceState) -> None:
        if state.reservation is not None:
            state.reservation.settle(state)

    def _spans(self, requests: Sequence[KvSlotRequest]) -> tuple[list[_Span], list[_Span]]:
        """What the requests write: up to their targets, and up to their admission lengths."""
        spans, admission_spans = [], []
        seen: set[SeqId] = set()
        for request in requests:
            handle = self._handles.get(request.cache_id)
            if handle is None:
                raise InvalidInputError(f"cache_id: {request.cache_id!r} names no live sequence")
            if request.cache_id in seen:
                raise InvalidInputError(f"cache_id: {request.cache_id!r} is given twice")
            seen.add(request.cache_id)
            state, target = self._state(handle), request.target_len
            admission = target if request.admission_target_len is None else request.admission_target_len
            if not state.num_tokens <= target <= admission:
                raise InvalidInputError(
                    f"target_len, admission_target_len: {target}, {admission} for {request.cache_id!r}, "
                    f"expected {state.num_tokens} <= target_len <= admission_target_len"
                )
            self._check_length(admission)
            spans.append((state, state.num_tokens, target))
            admission_spans.append((state, state.num_tokens, admission))
        return spans, admission_spans

    def _needs(self, span: _Span) -> tuple[list[int], int]:
        """Indices of the shared blocks that the span writes to, and the number of blocks missing at its end."""
        state, start, end = span
        num_blocks, blocks = self._blocks_for(end), state.blocks
        written = range(start // self.config.block_size, min(num_blocks, len(blocks))) if start < end else ()
        return [i for i in written if self._pool.ref_count(blocks[i]) > 1], max(0, num_blocks - len(blocks))

    def _make_room(self, spans: Sequence[_Span]) -> list[dict[int, int]]:
        """Give every sequence room up to its span's end, and copies in place of the shared blocks the span writes to.

        Returns, for every span, the shared blocks replaced, by index; their references are now the caller's.
        """
        needs = [self._needs(span) for span in spans]
        needed = sum(len(shared) + fresh for shared, fresh in needs)
        self._check_free(needed)
        taken = self._pool.allocate(needed)
        supply, pairs, replaced = iter(taken), [], []
        grown: list[tuple[SequenceState, tuple[int, ...]]] = []
        for (state, _, _), (shared, fresh) in zip(spans, needs, strict=True):
            replaced.append({index: state.blocks[index] for index in shared})
            if shared or fresh:
                blocks = list(state.blocks)
                for index in shared:
                    blocks[index] = next(supply)
                    pairs.append((state.blocks[index], blocks[index]))
                blocks += [next(supply) for _ in range(fresh)]
                grown.append((state, tuple(blocks)))
        try:
            self._tensors.copy(pairs)
        except BaseException:
            self._pool.release(taken)
            raise
        for state, new_blocks in grown:
            state.blocks = new_blocks
        self._cow_copies += len(pairs)
        return replaced

    def _make_exclusive(self, spans: Sequence[_Span]) -> None:
        """Make room, and keep nothing of the shared blocks that copies replaced."""
        for replaced in self._make_room(spans):
            self._pool.release(list(replaced.values()))

    def _check_free(self, needed: int) -> None:
        if needed > self._pool.num_free:
            self._allocation_failures += 1
            raise OutOfBlocksError(needed, self._pool.num_free)

    def _check_new(self, request_id: SeqId) -> None:
        if request_id in self._handles:
            raise InvalidInputError(f"request_id: {request_id!r} names a live sequence")

    def _check_length(self, num_tokens: int) -> None:
        longest = self.config.max_seq_len
        if longest is not None and num_tokens > longest:
            raise SequenceTooLongError(f"{num_tokens} tokens, max_seq_len is {longest}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.config.num_layers:
            raise InvalidInputError(f"layer: {layer}, expected 0 <= layer < {self.config.num_layers}")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _slots(self, state: SequenceState, start: int, end: int) -> NDArray[np.int64]:
        blocks, within = np.divmod(np.arange(start, end), self.config.block_size)
        return state.block_row()[blocks] * np.int64(self.config.block_size) + within

    def _new_tokens(
        self, items: Iterable[UnifiedBatchItem | tuple[KvCacheHandle, int]]
    ) -> tuple[list[SequenceState], list[int]]:
        states, counts = [], []
        for item in items:
            if isinstance(item, UnifiedBatchItem):
                handle, count = item.kv_cache or self._handles.get(item.seq_id), len(item.q_tokens)
                if handle is None:
                    raise InvalidInputError(f"items: {item.seq_id!r} names no live sequence")
            else:
                handle, count = item
            check_count("items: number of new tokens", count)
            state = self._state(handle)
            if state.num_tokens + count > handle.capacity:
                raise InvalidInputError(f"items: {handle!r} has no room for {count} more tokens")
            states.append(state)
            counts.append(count)
        if len({id(state) for state in states}) != len(states):
            raise InvalidInputError("items: a sequence is given twice")
        return states, counts
