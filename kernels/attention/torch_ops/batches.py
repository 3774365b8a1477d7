"""Sequences of similar shape as padded batches: what attention on a CPU gathers and masks, the same in every layer."""

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

# Queries of a chunk: a long prompt is cut so that its first queries do not meet the keys that only its last ones see.
_MAX_QUERIES = 256
# Scores or mask elements held at once: 16M float32 are 64 MB, beyond which a larger batch gains nothing on a CPU.
_MAX_SCORES = 1 << 24
# Padding of a batch, in products of a query's and a key's element: it takes 60 us, as long as another batch.
_MAX_PADDING = 1 << 19
# Rows of a head of the cache (queries times heads of a group) up to which it is read in place. Every row takes as long
# as the first there, while keys are gathered once for all: 1.3 to 5 times as fast up to 8 rows, the same for 12 to 16.
_MAX_ROWS_IN_PLACE = 16


class RowLayout(NamedTuple):
    """Rows as wide as a key, and as a value, of which the caches have every one or, interleaved, every other.

    So [num_blocks, block_size, num_kv_heads, 2 * head_dim] is read as two matrices, whichever way its dimensions are
    ordered: gathering takes 1.0 to 1.4 times as long as from a contiguous cache, by indices of blocks and positions
    2.3 to 7 times.

    steps: how many rows two blocks, two positions and two heads are apart, the same for keys and values.
    """

    steps: tuple[int, int, int]
    block_size: int
    num_kv_heads: int

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of all heads at slots [n, L]: int64 [n, num_kv_heads, L]."""
        block_step, position_step, head_step = self.steps
        rows = slots // self.block_size * block_step + slots % self.block_size * position_step
        return rows.unsqueeze(1) + torch.arange(self.num_kv_heads, device=slots.device)[:, None] * head_step

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache's memory from its first element to its last: [num_rows, head_dim], contiguous."""
        last = sum((size - 1) * step for size, step in zip(cache.shape[:3], self.steps, strict=True))
        return cache.as_strided((last + 1, cache.shape[3]), (cache.shape[3], 1))


def row_layout(call: AttentionCall) -> RowLayout | None:
    """None where the caches are not such rows: with values narrower than the keys beside them, or empty ones."""
    caches = call.k_cache, call.v_cache
    strides = [(cache.stride(0), cache.stride(1), cache.stride(2), cache.shape[3]) for cache in caches]
    k_steps, v_steps = ((block // width, position // width, head // width) for block, position, head, width in strides)
    is_whole = all(stride % width == 0 for *steps, width in strides for stride in steps)
    if k_steps != v_steps or not is_whole or not call.k_cache.numel():
        return None
    return RowLayout(k_steps, *call.k_cache.shape[1:3])


class QueryChunk(NamedTuple):
    """Consecutive queries of a sequence and the keys that any of them may see.

    row: of the first query in q; position: its own; context: position of the first query of the whole sequence.
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
    """n chunks, padded to Q queries and L keys with copies of their last ones; the copies of keys are not visible.

    So nothing is gathered that is not of the sequence, and padded queries give what their row gets anyway.

    rows: int64 [n * Q], of q and out. slots: int64 [n, L], of the caches. visible: bool [n, 1, Q, L].
    blind_rows: int64, those of `rows` that see no key; None where all do. positions: int64, of queries [n, Q] and of
    keys [n, L].
    layout: of the caches' rows, None where they are none.
    pairs: sparse CSR [n * Hq * Q, rows of a cache] with L entries a row: where in the caches a query's keys lie, head
    by head. None where they are better gathered.
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
        """Of keys and of values: int64 [n, Hkv, L]."""
        assert self.layout is not None
        return self.layout.rows_of(self.slots)

    @cached_property
    def bias(self) -> torch.Tensor:
        """float32 like visible: 0 or -inf.

        Fused attention would convert bools in every layer, 5 % of a step of 32 decodes of 10M parameters.
        """
        return torch.zeros(self.visible.shape, device=self.visible.device).masked_fill_(~self.visible, -math.inf)

    def distance(self) -> torch.Tensor:
        """Between queries and keys, int64 [n, 1, Q, L]."""
        queries, keys = self.positions
        return (keys[:, None] - queries[:, :, None]).abs_().unsqueeze(1)


# Batches by what they depend on, with the tensors they were made of, so that no others can lie at their addresses.
SharedBatches = dict[Hashable, tuple[list[SequenceBatch], tuple[torch.Tensor | None, ...]]]


def sequence_batches(
    call: AttentionCall, shared: SharedBatches, *, keeps_scores: bool, by_loops: bool = False
) -> list[SequenceBatch]:
    """All queries that see keys, in batches, which layers of one step share; ids are checked where they are made.

    keeps_scores: the caller holds those of all heads at once, not only where keys are read in place. by_loops: numba's
    loops take all, and there are none.
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
    # A query sees itself at least, unless it comes before the first key or a mask hides its own key.
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
    with warnings.catch_warnings():  # PyTorch warns of such tensors: nothing that a caller of attention could help
        warnings.simplefilter("ignore")
        # Columns that are neither sorted nor distinct are all the same to what reads them here.
        return torch.sparse_csr_tensor(rows, columns, torch.zeros(len(columns)), size=size, check_invariants=False)


def _max_queries_in_place(call: AttentionCall, layout: RowLayout | None) -> int:
    """Queries of a chunk up to which its keys are read in place; 0 where they cannot be."""
    is_readable = layout is not None and call.k_cache.dtype == torch.float32 and call.k_cache.device.type == "cpu"
    return _MAX_ROWS_IN_PLACE * call.k_cache.shape[2] // call.q.shape[1] if is_readable else 0
