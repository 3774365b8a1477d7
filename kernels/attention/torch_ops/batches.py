"""Sequences of similar shape as padded batches for attention on a CPU; all layers share their indices and masks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from ...common.attention.keys import NO_LIMIT
from ...common.id_checks import Sequences, check_sequences_on_host
from ..config import AttentionCall

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
    num_rows: rows from a cache's first element to its last.
    """

    steps: tuple[int, int, int]
    block_size: int
    num_kv_heads: int
    num_rows: int

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of all heads at slots [n, L]: int64 [n, num_kv_heads, L]."""
        block_step, position_step, head_step = self.steps
        rows = slots // self.block_size * block_step + slots % self.block_size * position_step
        return rows.unsqueeze(1) + torch.arange(self.num_kv_heads, device=slots.device)[:, None] * head_step


def row_layout(k_cache: torch.Tensor, v_cache: torch.Tensor) -> RowLayout | None:
    """Return the layout, or None if the caches are not such rows: values narrower than keys beside them, or no rows."""
    steps = []
    for cache in (k_cache, v_cache):
        (block, position, head, _), width = cache.stride(), cache.shape[3]
        if not cache.numel() or block % width or position % width or head % width:
            return None
        steps.append((block // width, position // width, head // width))
    k_steps, v_steps = steps
    if k_steps != v_steps:
        return None
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    block_step, position_step, head_step = k_steps
    last = (num_blocks - 1) * block_step + (block_size - 1) * position_step + (num_kv_heads - 1) * head_step
    return RowLayout(k_steps, block_size, num_kv_heads, last + 1)


class BatchLayout(NamedTuple):
    """Everything besides a step's lengths, blocks and masks that batches depend on.

    Attributes:
        keeps_scores: the scores of all heads are held at once, even if keys are gathered.
        rows: layout of the caches' rows; None if they are none.
        max_in_place: largest number of queries whose keys are read in place; 0 if they cannot be.
    """

    q_shape: torch.Size
    cache_shape: torch.Size
    window: tuple[int, int]
    chunk_size: int
    deterministic: bool
    keeps_scores: bool
    rows: RowLayout | None
    max_in_place: int

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        window: tuple[int, int],
        chunk_size: int,
        deterministic: bool,
        *,
        keeps_scores: bool,
    ) -> BatchLayout:
        """Return the layout of calls with these arguments."""
        rows, max_in_place = row_layout(k_cache, v_cache), 0
        if rows is not None and k_cache.dtype == torch.float32 and k_cache.is_cpu:
            max_in_place = _MAX_ROWS_IN_PLACE * k_cache.shape[2] // q.shape[1]
        return cls(q.shape, k_cache.shape, window, chunk_size, deterministic, keeps_scores, rows, max_in_place)


QueryChunk = tuple[int, int, int, int, int, int, int]
"""Consecutive queries of a sequence, and the keys that any of them may see: sequence, row of the first query in q,
number of queries, position of the first one, position of the sequence's first query, first key, number of keys.

A plain tuple: a step of 256 decodes makes 256 of them."""


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


# Batches by their layout and the step's tensors, which are kept with them.
SharedBatches = dict[Hashable, tuple[list[SequenceBatch], tuple[torch.Tensor | None, ...]]]


def check_step(call: AttentionCall) -> None:
    """Raise InvalidInputError if queries, lengths or blocks lie outside of their tensors."""
    ids, (num_blocks, block_size) = (call.block_table, call.cu_seqlens_q, call.seq_lens), call.k_cache.shape[:2]
    sizes = len(call.q), num_blocks, block_size, call.max_seqlen_q, call.window[0]
    check_sequences_on_host(Sequences(*ids, *sizes, keys_at_once=1, chunk_size=call.chunk_size or NO_LIMIT))


def make_batches(call: AttentionCall, layout: BatchLayout) -> list[SequenceBatch]:
    """Return all queries that see keys, in batches that the layers of a step share."""
    _, num_q_heads, head_dim = call.q.shape
    batches: list[SequenceBatch] = []
    batch: list[QueryChunk] = []
    num_queries = num_keys = pairs = 0  # of the batch
    scores_per_pair = num_q_heads if layout.keeps_scores else 1
    chunks = _chunks(call, scores_per_pair)
    for chunk in sorted(chunks, key=itemgetter(2, 6), reverse=True):
        _, _, chunk_queries, *_, chunk_keys = chunk
        num_queries, num_keys = max(num_queries, chunk_queries), max(num_keys, chunk_keys)
        pairs += chunk_queries * chunk_keys
        padded = (len(batch) + 1) * num_queries * num_keys
        kept_heads = num_q_heads if layout.keeps_scores or num_queries <= layout.max_in_place else 1
        is_full = padded * kept_heads > _MAX_SCORES or (padded - pairs) * num_q_heads * head_dim > _MAX_PADDING
        if batch and (is_full or call.deterministic):  # padding changes the order of sums
            batches.append(_batch(call, batch, layout))
            batch = []
            num_queries, num_keys, pairs = chunk_queries, chunk_keys, chunk_queries * chunk_keys
        batch.append(chunk)
    if batch:
        batches.append(_batch(call, batch, layout))
    return batches


def _chunks(call: AttentionCall, scores_per_pair: int) -> list[QueryChunk]:
    starts, lengths = call.cu_seqlens_q.tolist(), call.seq_lens.tolist()
    window_left, window_right = call.window
    rights = [window_right] * len(lengths)
    if call.is_causal is not None:
        for seq, is_causal in enumerate(call.is_causal.tolist()):
            if is_causal:
                rights[seq] = 0
    chunks: list[QueryChunk] = []
    for seq, (start, end) in enumerate(pairwise(starts)):
        context = lengths[seq] - (end - start)
        longest = min(_MAX_QUERIES, max(1, _MAX_SCORES // max(1, lengths[seq] * scores_per_pair)))
        for row in range(start, end, longest):
            num_queries = min(end - row, longest)
            position = context + row - start
            first_key, last = max(0, position - window_left), position + num_queries - 1
            end_key = min(lengths[seq], last + rights[seq] + 1)
            if chunk_size := call.chunk_size:
                first_key = max(first_key, position // chunk_size * chunk_size)
                end_key = min(end_key, (last // chunk_size + 1) * chunk_size)
            num_keys = end_key - first_key
            if num_keys > 0:
                chunks.append((seq, row, num_queries, position, context, first_key, num_keys))
    return chunks


def _batch(call: AttentionCall, chunks: list[QueryChunk], layout: BatchLayout) -> SequenceBatch:
    device, block_size = call.q.device, call.k_cache.shape[1]
    window_left, window_right = call.window
    columns = torch.tensor(chunks, device=device).T.unsqueeze(-1)  # [7, n, 1]
    seq, row, num_queries, first_position, context, first_key, num_keys = columns
    query = torch.arange(int(num_queries.max()), device=device).minimum(num_queries - 1)  # [n, Q]
    offs_n = torch.arange(int(num_keys.max()), device=device)
    key = first_key + offs_n.minimum(num_keys - 1)  # [n, L]
    slots = call.block_table[seq, key // block_size].long() * block_size + key % block_size

    rows, position = row + query, first_position + query  # [n, Q]
    visible = (offs_n < num_keys)[:, None]  # [n, 1, L]: chunks of one query need no more
    if rows.shape[1] > 1:
        ahead = key[:, None] - position[:, :, None]  # [n, Q, L]
        visible = visible & (ahead >= -window_left) & (ahead <= window_right)
        if call.chunk_size:
            visible &= key[:, None] // call.chunk_size == position[:, :, None] // call.chunk_size
        if call.is_causal is not None:
            visible &= (ahead <= 0) | ~call.is_causal[seq, None]
    if call.mask is not None:
        column = (key - context)[:, None].expand(-1, rows.shape[1], -1)  # among the new keys
        allowed = call.mask[rows].gather(2, column.clamp(0, call.mask.shape[1] - 1))
        visible = visible & (allowed | (column < 0))
    # A query sees at least itself, unless it comes before the first key or a mask hides its own key.
    may_be_blind = call.mask is not None or int(first_position.min()) < 0
    blind_rows = None
    if may_be_blind:
        blind_rows = rows[~visible.any(-1)]
    pairs = None
    if layout.rows is not None and rows.shape[1] <= layout.max_in_place:
        pairs = _pairs(call, layout.rows, slots, rows.shape[1])
    return SequenceBatch(
        rows=rows.flatten(),
        slots=slots,
        visible=visible.unsqueeze(1),
        blind_rows=blind_rows,
        positions=(position, key),
        layout=layout.rows,
        pairs=pairs,
    )


def _pairs(call: AttentionCall, layout: RowLayout, slots: torch.Tensor, num_queries: int) -> torch.Tensor:
    """See `SequenceBatch.pairs`; slots: [n, L]."""
    num_q_heads, num_kv_heads = call.q.shape[1], call.k_cache.shape[2]
    rows_per_head = num_queries * num_q_heads // num_kv_heads
    columns = layout.rows_of(slots).unsqueeze(2).expand(-1, -1, rows_per_head, -1).reshape(-1)
    num_rows, num_keys = len(slots) * num_q_heads * num_queries, slots.shape[1]
    rows, size = torch.arange(num_rows + 1) * num_keys, (num_rows, layout.num_rows)
    with warnings.catch_warnings():  # PyTorch warns about sparse CSR tensors, which callers cannot avoid
        warnings.simplefilter("ignore")
        # The operations that read it accept unsorted and repeated columns.
        return torch.sparse_csr_tensor(rows, columns, torch.zeros(len(columns)), size=size, check_invariants=False)
