"""Sequences of similar shape as padded batches for attention on a CPU; all layers share their indices and masks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from paged.kernels.attention.call import NO_LIMIT, AttentionCall
from paged.kernels.common.id_checks import Sequences, check_sequences_on_host

# Queries of a chunk: long prompts are cut, so that early queries do not meet keys that only later ones see.
_MAX_QUERIES = 256
# Scores or mask elements in memory at once: 16M float32 are 64 MB; larger batches gain nothing on a CPU.
_MAX_SCORES = 1 << 24
# Limit of a batch's padding, in products of elements: this much takes 60 us, as long as another batch.
_MAX_PADDING = 1 << 19
# Largest number of rows of a KV head (queries times heads of a group) for which it is read in place. Each row then
# reads the keys again, while gathering reads them once: in place is 1.3 to 5 times as fast up to 8 rows, equal for 12
# to 16.
_MAX_ROWS_IN_PLACE = 16


class RowLayout(NamedTuple):
    """The caches as rows of a key's and a value's width, all of them or, if K and V are interleaved, every other one.

    So [num_blocks, block_size, num_kv_heads, 2 * head_dim] is read as two matrices, with its dimensions in any order.
    Gathering then takes 1.0 to 1.4 times as long as from a contiguous cache; by indices of blocks and positions it
    takes 2.3 to 7 times as long.

    steps: distances in rows between two blocks, two positions and two heads, the same for keys and values.
    """

    steps: tuple[int, int, int]
    block_size: int
    num_kv_heads: int

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of all heads at slots [n, L]: int64 [n, num_kv_heads, L]."""
        block_step, position_step, head_step = self.steps
        rows = slots // self.block_size * block_step + slots % self.block_size * position_step
        return rows.unsqueeze(1) + torch.arange(self.num_kv_heads, device=slots.device)[:, None] * head_step

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the cache's memory from its first to its last element, contiguous [num_rows, head_dim]."""
        last = sum((size - 1) * step for size, step in zip(cache.shape[:3], self.steps, strict=True))
        return cache.as_strided((last + 1, cache.shape[3]), (cache.shape[3], 1))


def row_layout(call: AttentionCall) -> RowLayout | None:
    """Return the layout, or None if the caches are not such rows: values narrower than keys beside them, or no rows."""
    caches = call.k_cache, call.v_cache
    strides = [(cache.stride(0), cache.stride(1), cache.stride(2), cache.shape[3]) for cache in caches]
    k_steps, v_steps = ((block // width, position // width, head // width) for block, position, head, width in strides)
    is_whole = all(stride % width == 0 for *steps, width in strides for stride in steps)
    if k_steps != v_steps or not is_whole or not call.k_cache.numel():
        return None
    return RowLayout(k_steps, *call.k_cache.shape[1:3])


class QueryChunk(NamedTuple):
    """Consecutive queries of a sequence, and the keys that any of them may see.

    row: first query's row in q. position: its position. context: position of the sequence's first query.
    """

    seq: int
    row: int
    num_queries: int
    position: int
    context: int
    first_key: int
    num_keys: int


@dataclass(frozen=True)
class SequenceBatch:
    """n chunks, padded to Q queries and L keys with copies of their last ones; copies of keys are not visible.

    So only data of the sequence is gathered, and padded queries write their row's result again.

    rows: int64 [n * Q], in q and out. slots: int64 [n, L], in the caches. visible: bool [n, 1, Q, L].
    blind_rows: int64, those of `rows` that see no key; None if all see one. positions: int64, of queries [n, Q] and of
    keys [n, L].
    layout: layout of the caches' rows; None if they are none.
    pairs: sparse CSR [n * Hq * Q, rows of a cache] with L entries per row: places of a query's keys in the caches, for
    each head. None if gathering is faster.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor
    blind_rows: torch.Tensor | None
    positions: tuple[torch.Tensor, torch.Tensor]
    layout: RowLayout | None
    pairs: torch.Tensor | None

    @cached_property
    def cache_rows(self) -> torch.Tensor:
        """Rows of keys and of values: int64 [n, Hkv, L]."""
        assert self.layout is not None
        return self.layout.rows_of(self.slots)

    @cached_property
    def bias(self) -> torch.Tensor:
        """0 or -inf in the shape of `visible`, float32.

        Fused attention would convert bools in every layer, which takes 5 % of a step of 32 decodes at 10M parameters.
        """
        return torch.zeros(self.visible.shape, device=self.visible.device).masked_fill_(~self.visible, -math.inf)

    def distance(self) -> torch.Tensor:
        """Return the distances between queries and keys, int64 [n, 1, Q, L]."""
        queries, keys = self.positions
        return (keys[:, None] - queries[:, :, None]).abs_().unsqueeze(1)


# Batches by the values they depend on; the tensors are kept, so that no others can get their addresses.
SharedBatches = dict[Hashable, tuple[list[SequenceBatch], tuple[torch.Tensor | None, ...]]]


def sequence_batches(
    call: AttentionCall, shared: SharedBatches, *, keeps_scores: bool, by_loops: bool = False
) -> list[SequenceBatch]:
    """Return all queries that see keys, in batches that the layers of a step share; checks ids when it makes them.

    keeps_scores: the caller holds the scores of all heads at once, even if keys are gathered. by_loops: numba kernels
    take all sequences, so there are no batches.
    """
    tensors, layout = (call.block_table, call.is_causal, call.mask), row_layout(call)
    max_in_place = _max_queries_in_place(call, layout)
    key: Hashable = (
        *map(_memory, tensors), call.window, call.chunk_size, call.k_cache.shape, call.q.shape, call.deterministic,
        keeps_scores, by_loops, layout, max_in_place,
    )  # fmt: skip
    if key not in shared:
        ids, (num_blocks, block_size) = (call.block_table, call.cu_seqlens_q, call.seq_lens), call.k_cache.shape[:2]
        sizes = len(call.q), num_blocks, block_size, call.max_seqlen_q, call.window[0]
        check_sequences_on_host(Sequences(*ids, *sizes, keys_at_once=1, chunk_size=call.chunk_size or NO_LIMIT))
        batches = [] if by_loops else list(_batches(call, keeps_scores, layout, max_in_place))
        shared[key] = batches, tensors
    return shared[key][0]


def _memory(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride())


def _batches(
    call: AttentionCall, keeps_scores: bool, layout: RowLayout | None, max_in_place: int
) -> Iterator[SequenceBatch]:
    _, num_q_heads, head_dim = call.q.shape
    batch: list[QueryChunk] = []
    num_queries = num_keys = pairs = 0
    chunks = _chunks(call, num_q_heads if keeps_scores else 1)
    for chunk in sorted(chunks, key=lambda chunk: (chunk.num_queries, chunk.num_keys), reverse=True):
        num_queries, num_keys = max(num_queries, chunk.num_queries), max(num_keys, chunk.num_keys)
        pairs += chunk.num_queries * chunk.num_keys
        padded = (len(batch) + 1) * num_queries * num_keys
        kept_heads = num_q_heads if keeps_scores or num_queries <= max_in_place else 1
        is_full = padded * kept_heads > _MAX_SCORES or (padded - pairs) * num_q_heads * head_dim > _MAX_PADDING
        if batch and (is_full or call.deterministic):  # padding changes the order of sums
            yield _batch(call, batch, layout, max_in_place)
            batch = []
            num_queries, num_keys, pairs = chunk.num_queries, chunk.num_keys, chunk.num_queries * chunk.num_keys
        batch.append(chunk)
    if batch:
        yield _batch(call, batch, layout, max_in_place)


def _chunks(call: AttentionCall, scores_per_pair: int) -> Iterator[QueryChunk]:
    starts, lengths = call.cu_seqlens_q.tolist(), call.seq_lens.tolist()
    left, right = call.window
    is_causal = [False] * len(lengths) if call.is_causal is None else call.is_causal.tolist()
    for seq, (start, end) in enumerate(pairwise(starts)):
        context = lengths[seq] - (end - start)
        longest = min(_MAX_QUERIES, max(1, _MAX_SCORES // max(1, lengths[seq] * scores_per_pair)))
        for row in range(start, end, longest):
            num_queries = min(end - row, longest)
            position = context + row - start
            first_key, last = max(0, position - left), position + num_queries - 1
            end_key = min(lengths[seq], last + (0 if is_causal[seq] else right) + 1)
            if chunk_size := call.chunk_size:
                first_key = max(first_key, position // chunk_size * chunk_size)
                end_key = min(end_key, (last // chunk_size + 1) * chunk_size)
            num_keys = end_key - first_key
            if num_keys > 0:
                yield QueryChunk(seq, row, num_queries, position, context, first_key, num_keys)


def _batch(call: AttentionCall, chunks: list[QueryChunk], layout: RowLayout | None, max_in_place: int) -> SequenceBatch:
    device, block_size, (left, right) = call.q.device, call.k_cache.shape[1], call.window
    columns = torch.tensor(chunks, device=device).T.unsqueeze(-1)  # [7, n, 1]
    seq, row, num_queries, position, context, first_key, num_keys = columns
    query = torch.arange(max(chunk.num_queries for chunk in chunks), device=device).minimum(num_queries - 1)  # [n, Q]
    offs_n = torch.arange(max(chunk.num_keys for chunk in chunks), device=device)
    key = first_key + offs_n.minimum(num_keys - 1)  # [n, L]
    slots = call.block_table[seq, key // block_size].long() * block_size + key % block_size

    rows, position = row + query, position + query  # [n, Q]
    visible = (offs_n < num_keys)[:, None]  # [n, 1, L]: chunks of one query need no more
    if rows.shape[1] > 1:
        ahead = key[:, None] - position[:, :, None]  # [n, Q, L]
        visible = visible & (ahead >= -left) & (ahead <= right)
        if call.chunk_size:
            visible &= key[:, None] // call.chunk_size == position[:, :, None] // call.chunk_size
        if call.is_causal is not None:
            visible &= (ahead <= 0) | ~call.is_causal[seq, None]
    if call.mask is not None:
        column = (key - context)[:, None].expand(-1, rows.shape[1], -1)  # among the new keys
        allowed = call.mask[rows].gather(2, column.clamp(0, call.mask.shape[1] - 1))
        visible = visible & (allowed | (column < 0))
    # A query sees at least itself, unless it comes before the first key or a mask hides its own key.
    may_be_blind = call.mask is not None or any(chunk.position < 0 for chunk in chunks)
    return SequenceBatch(
        rows=rows.flatten(),
        slots=slots,
        visible=visible.unsqueeze(1),
        blind_rows=rows[~visible.any(-1)] if may_be_blind else None,
        positions=(position, key),
        layout=layout,
        pairs=_pairs(call, layout, slots, rows.shape[1]) if layout and rows.shape[1] <= max_in_place else None,
    )


def _pairs(call: AttentionCall, layout: RowLayout, slots: torch.Tensor, num_queries: int) -> torch.Tensor:
    """See `SequenceBatch.pairs`; slots: [n, L]."""
    num_q_heads, num_kv_heads = call.q.shape[1], call.k_cache.shape[2]
    rows_per_head = num_queries * num_q_heads // num_kv_heads
    columns = layout.rows_of(slots).unsqueeze(2).expand(-1, -1, rows_per_head, -1).reshape(-1)
    num_rows, num_keys = len(slots) * num_q_heads * num_queries, slots.shape[1]
    rows, size = torch.arange(num_rows + 1) * num_keys, (num_rows, len(layout.rows(call.k_cache)))
    with warnings.catch_warnings():  # PyTorch warns about sparse CSR tensors, which callers cannot avoid
        warnings.simplefilter("ignore")
        # The operations that read it accept unsorted and repeated columns.
        return torch.sparse_csr_tensor(rows, columns, torch.zeros(len(columns)), size=size, check_invariants=False)


def _max_queries_in_place(call: AttentionCall, layout: RowLayout | None) -> int:
    """Return the largest number of queries whose keys are read in place; 0 if they cannot be."""
    is_readable = layout is not None and call.k_cache.dtype == torch.float32 and call.k_cache.device.type == "cpu"
    return _MAX_ROWS_IN_PLACE * call.k_cache.shape[2] // call.q.shape[1] if is_readable else 0
