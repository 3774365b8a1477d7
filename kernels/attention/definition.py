"""Attention over paged caches as formulas; see `kernels.layers.definition` for what a definition is.

Queries of similar shape are one product, because a decode step of many sequences would otherwise take one for each.
Long prompts are cut, so that memory stays bounded. `group_queries` does both, for all layers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.nn import functional

from ..core.dtypes import KV_KINDS, as_kernel_argument
from .keys import NO_LIMIT

# Most queries of a chunk. Early queries of a prompt are not multiplied with keys that only later chunks see.
_MAX_QUERIES = 256
# Most scores, keys and values in memory at once, each 64 MB in float32. Larger groups gain nothing on a CPU.
_MAX_NUMBERS = 1 << 24
# Most padding of a group, in multiplications. This many take 60 us, as long as one more group.
_MAX_PADDING = 1 << 19


class QueryGroup(NamedTuple):
    """n chunks of queries, padded to Q queries, and the blocks of their keys, padded to L slots.

    Padding repeats the last query or block, so that no block of another sequence is read, and a padded query writes the
    result of the last one again.

    Attributes:
        rows: int64 [n, Q], in q.
        blocks: int64 [n, L / block_size], in the caches.
        visible: bool [n, 1, 1, Q, L]; [n, Hkv, 1, Q, L] if each KV head sees chosen blocks.
        hidden: int64, the slots of [n * L] that no query sees; they may hold NaN.
        has_blind_rows: whether a query sees no key.
        query_positions, key_positions: int64 [n, Q] and [n, L].
        counts: int64 [n, Hkv, 1, Q, L], how often each key is chosen; None without chosen blocks.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor
    has_blind_rows: bool
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    counts: torch.Tensor | None


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
    chosen_blocks: torch.Tensor | None = None,
    chosen_block_size: int = 0,
    groups: Iterable[QueryGroup] | None = None,
    needs_lse: bool = True,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scores) @ v, [num_tokens, Hq, Dv], and the log-sum-exps of scores, [Hq, num_tokens].

    The score of a query at position i and a key at position j is softcap(softmax_scale * q k) - slope * |i - j|.

    groups: `group_queries` of the step; None makes them.
    needs_lse: if False, log-sum-exps may be missing.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v_cache.shape[2], _width(v_cache)
    group_size = num_q_heads // num_kv_heads  # G, the query heads of a KV head
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(head_dim)
    is_fused = not needs_scores(needs_lse, sinks, alibi_slopes, softcap, chosen_blocks)
    if groups is None:
        groups = group_queries(
            q, k_cache, v_cache, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, causal=causal,
            window_size=window_size, attention_chunk_size=attention_chunk_size, mask=mask, has_scores=not is_fused,
            chosen_blocks=chosen_blocks, chosen_block_size=chosen_block_size,
        )  # fmt: skip
    k_factor = _factor_of_heads(k_scale, k_table_scale, compute)
    v_factor = _factor_of_heads(v_scale, v_table_scale, compute)
    out = torch.zeros(num_tokens, num_q_heads, v_head_dim, dtype=compute, device=q.device)
    lse = torch.full((num_tokens, num_q_heads), -math.inf, dtype=compute, device=q.device)
    if sinks is not None:
        sinks = sinks.to(compute)
        lse[: int(cu_seqlens_q[-1])] = sinks  # also of rows that see no key
        sinks = sinks.view(num_kv_heads, group_size, 1)
    for group in groups:
        shape, rows = group.rows.shape, group.rows.flatten()  # n, Q
        queries = q.index_select(0, rows).to(compute).view(*shape, num_kv_heads, group_size, head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [n, Hkv, G * Q, D]
        keys = _numbers(k_cache, k_scale, group, compute)  # [n, Hkv, L, D]
        values = _numbers(v_cache, v_scale, group, compute)  # [n, Hkv, L, Dv]
        visible = group.visible.expand(-1, -1, group_size, -1, -1)  # [n, 1, G, Q, L]
        if k_factor is not None:
            queries = queries * k_factor
        if is_fused and not group.has_blind_rows:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible.flatten(2, 3), scale=softmax_scale
            )
        else:
            scores = (queries @ keys.transpose(-1, -2)).mul_(softmax_scale)  # [n, Hkv, G * Q, L]
            if softcap > 0:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            by_query = scores.unflatten(2, (group_size, -1))  # [n, Hkv, G, Q, L]
            if alibi_slopes is not None:
                slopes = alibi_slopes.to(compute).view(num_kv_heads, group_size, 1, 1)
                distance = (group.key_positions[:, None] - group.query_positions[:, :, None]).abs_()  # [n, Q, L]
                by_query -= slopes * distance[:, None, None]
            if group.counts is not None:  # a key that is chosen twice is two keys
                by_query += group.counts.to(compute).log()
            by_query.masked_fill_(~visible, -math.inf)
            row_sinks = None
            if sinks is not None:
                row_sinks = sinks.expand(-1, -1, shape[1]).flatten(1)  # [Hkv, G * Q]
            attended, row_lse = attend(scores, values, row_sinks)  # [n, Hkv, G * Q, Dv], [n, Hkv, G * Q]
            row_lse = row_lse.unflatten(2, (group_size, -1))  # [n, Hkv, G, Q]
            lse.index_copy_(0, rows, row_lse.permute(0, 3, 1, 2).reshape(-1, num_q_heads))
        if v_factor is not None:
            attended = attended * v_factor
        del keys, values  # before those of the next group are gathered
        attended = attended.unflatten(2, (group_size, -1))  # [n, Hkv, G, Q, Dv]
        out.index_copy_(0, rows, attended.permute(0, 3, 1, 2, 4).reshape(-1, num_q_heads, v_head_dim))
    return out, lse.T


def needs_scores(
    needs_lse: bool,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    softcap: float,
    chosen_blocks: torch.Tensor | None,
) -> bool:
    """Return whether `paged_attention` writes scores. Fused attention does not, and takes a third of the time."""
    has_tensors = sinks is not None or alibi_slopes is not None or chosen_blocks is not None
    return needs_lse or has_tensors or softcap > 0


def attend(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scores) @ values and the log-sum-exps; overwrites scores [..., R, L].

    A score of -inf has weight 0, and a row without others gives 0 and -inf.

    sinks: [..., R], the score of one more key, whose value is 0.
    """
    # Subtract the largest score, not the log-sum-exp, which is rounded: by 2e-3 in float32 if it is 46,000.
    largest = scores.amax(-1, keepdim=True)  # [..., R, 1]
    if sinks is not None:
        largest = largest.maximum(sinks.unsqueeze(-1))
    largest.clamp_(min=torch.finfo(scores.dtype).min)  # -inf - -inf is NaN
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.unsqueeze(-1) - largest).exp_()
    attended = (weights @ values).div_(total.masked_fill(total == 0, 1.0))
    return attended, (total.log() + largest).squeeze(-1)


def _factor_of_heads(
    scale: torch.Tensor | None, table_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the scale of each head, [1 or Hkv, 1, 1], or of a table whose rows have scales; None without it."""
    if scale is not None and scale.dim() >= 3:
        scale = table_scale
    if scale is None:
        return None
    return scale.to(dtype).view(-1, 1, 1)


def _width(cache: torch.Tensor) -> int:
    """Return the numbers of a row of a cache."""
    if cache.dtype in KV_KINDS:
        return KV_KINDS[cache.dtype].width(cache)
    return cache.shape[3]


def _numbers(cache: torch.Tensor, scale: torch.Tensor | None, group: QueryGroup, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in the group's blocks, times the scales of rows, [n, Hkv, L, D]; 0 if no query sees them."""
    blocks = group.blocks.flatten()
    if cache.dtype in KV_KINDS:
        row_scales = None
        if scale is not None and scale.dim() >= 3:
            row_scales = as_kernel_argument(scale).index_select(0, blocks).view(scale.dtype)
        stored = (
            as_kernel_argument(cache).index_select(0, blocks).view(cache.dtype)
        )  # as bytes, as PyTorch does not index int4
        rows = KV_KINDS[cache.dtype].decode(stored, row_scales, dtype)  # [n * L / block_size, block_size, Hkv, D]
    else:
        rows = cache.index_select(0, blocks)
    numbers = rows.to(dtype).flatten(0, 1)  # [n * L, Hkv, D]
    numbers.index_fill_(0, group.hidden, 0.0)
    return numbers.unflatten(0, (len(group.blocks), -1)).transpose(1, 2)


def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(lse_a - lse) out_a + exp(lse_b - lse) out_b and lse = log(exp(lse_a) + exp(lse_b)).

    out: [num_tokens, num_heads, head_dim]. lse: [num_heads, num_tokens].
    """
    # FlashAttention writes inf for a row without keys; the merge writes -inf.
    lse_a, lse_b = (lse.to(compute).masked_fill(lse == math.inf, -math.inf) for lse in (lse_a, lse_b))
    out = torch.zeros(out_a.shape, dtype=compute, device=out_a.device)
    for part, part_lse, other_lse in ((out_a, lse_a, lse_b), (out_b, lse_b, lse_a)):
        # exp(part_lse - lse) is this sigmoid; lse is rounded: by 5e-4 in float32 if it is 5,000.
        weight = torch.sigmoid(part_lse - other_lse).masked_fill(part_lse == -math.inf, 0.0)
        weight = weight.T.unsqueeze(-1)  # [num_tokens, num_heads, 1]
        out += torch.where(weight == 0, 0.0, weight * part)  # 0 * NaN is NaN: an empty side is left out
    return out, torch.logaddexp(lse_a, lse_b)


def group_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    causal: bool | torch.Tensor,
    window_size: tuple[int, int],
    attention_chunk_size: int,
    mask: torch.Tensor | None,
    has_scores: bool,
    deterministic: bool = False,
    chosen_blocks: torch.Tensor | None = None,
    chosen_block_size: int = 0,
) -> Iterator[QueryGroup]:
    """Yield groups of all queries that may see a key; arguments as in `paged_attention`.

    Together they hold up to a byte for each query and key, so a long prompt's are not kept.

    has_scores: `needs_scores`; if not, chunks have more queries, so that keys are gathered less often.
    deterministic: each chunk is a group of its own, because padding changes the order of sums.
    """
    _, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = v_cache.shape
    v_head_dim = _width(v_cache)
    window_left, window_right = (NO_LIMIT if size < 0 else size for size in window_size)
    # Fused attention takes a mask of float32 for the query heads of a KV head.
    numbers_of_pair = num_q_heads if has_scores else num_q_heads // num_kv_heads
    chunks = _chunks(
        cu_seqlens_q.tolist(), seq_lens.tolist(), _rights(causal, window_right, len(seq_lens)), window_left,
        attention_chunk_size, block_size, numbers_of_pair,
    )  # fmt: skip
    groups: list[list[QueryChunk]] = []
    num_queries = num_blocks = num_pairs = 0  # of the last group, pairs of a query and a block
    for chunk in sorted(chunks, key=attrgetter("num_queries", "num_blocks"), reverse=True):
        num_queries = max(num_queries, chunk.num_queries)
        num_blocks = max(num_blocks, chunk.num_blocks)
        num_pairs += chunk.num_queries * chunk.num_blocks
        num_chunks = len(groups[-1]) + 1 if groups else 1
        padding = num_chunks * num_queries * num_blocks - num_pairs
        is_wasteful = padding * block_size * num_q_heads * head_dim > _MAX_PADDING
        numbers_of_key = num_queries * num_q_heads + num_kv_heads * (head_dim + v_head_dim)
        is_full = num_chunks * num_blocks * block_size * numbers_of_key > _MAX_NUMBERS
        if not groups or is_full or is_wasteful or deterministic:
            groups.append([])
            num_queries, num_blocks = chunk.num_queries, chunk.num_blocks
            num_pairs = num_queries * num_blocks
        groups[-1].append(chunk)
    rules = block_table, cu_seqlens_q, seq_lens, window_left, attention_chunk_size, mask, block_size
    for group in groups:
        yield _group(group, *rules, chosen_blocks, chosen_block_size)


class QueryChunk(NamedTuple):
    """Consecutive queries of a sequence, and the blocks of keys that any of them may see.

    row, position: of the first query, in q and in the sequence.
    right: positions that each query sees right of its own.
    """

    seq: int
    row: int
    num_queries: int
    position: int
    right: int
    first_block: int
    num_blocks: int


def _rights(causal: bool | torch.Tensor, window_right: int, num_seqs: int) -> list[int]:
    """Return how many positions right of its own a query of each sequence sees."""
    if isinstance(causal, torch.Tensor):
        is_causal = causal.expand(num_seqs).tolist()
    else:
        is_causal = [causal] * num_seqs
    return [0 if flag else window_right for flag in is_causal]


def _chunks(
    offsets: list[int],
    lengths: list[int],
    rights: list[int],
    window_left: int,
    chunk_size: int,
    block_size: int,
    numbers_of_pair: int,
) -> Iterator[QueryChunk]:
    """Yield chunks whose numbers for pairs of a query and a key fit into _MAX_NUMBERS."""
    for seq, (start, end) in enumerate(pairwise(offsets)):
        seq_len, right = lengths[seq], rights[seq]
        longest = max(1, min(_MAX_QUERIES, _MAX_NUMBERS // max(1, seq_len * numbers_of_pair)))
        for row in range(start, end, longest):
            num_queries = min(longest, end - row)
            position = seq_len - end + row
            last = position + num_queries - 1
            first_key = max(0, position - window_left)
            end_key = min(seq_len, last + right + 1)
            if chunk_size:
                first_key = max(first_key, position // chunk_size * chunk_size)
                end_key = min(end_key, (last // chunk_size + 1) * chunk_size)
            if first_key < end_key:
                first_block = first_key // block_size
                num_blocks = (end_key - 1) // block_size + 1 - first_block
                yield QueryChunk(seq, row, num_queries, position, right, first_block, num_blocks)


def _group(
    chunks: list[QueryChunk],
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    window_left: int,
    chunk_size: int,
    mask: torch.Tensor | None,
    block_size: int,
    chosen_blocks: torch.Tensor | None,
    chosen_block_size: int,
) -> QueryGroup:
    device = block_table.device
    seq, row, num_queries, position, right, first_block, num_blocks = torch.tensor(chunks, device=device).T[..., None]
    query = torch.arange(int(num_queries.max()), device=device).minimum(num_queries - 1)  # [n, Q]
    block = torch.arange(int(num_blocks.max()), device=device).minimum(num_blocks - 1)  # [n, L / block_size]
    keys = first_block * block_size + torch.arange(block.shape[1] * block_size, device=device)  # [n, L]
    rows, queries = row + query, position + query  # [n, Q]
    starts = queries - window_left  # [n, Q], the first key that each query sees
    ends = (queries + right + 1).minimum(seq_lens[seq])  # [n, Q], one past the last
    if chunk_size:
        first = queries // chunk_size * chunk_size
        starts, ends = starts.maximum(first), ends.minimum(first + chunk_size)
    visible = (keys[:, None] >= starts[:, :, None]) & (keys[:, None] < ends[:, :, None])  # [n, Q, L]
    if mask is not None:
        first_query = seq_lens[seq] - cu_seqlens_q.diff()[seq]  # [n, 1], its position
        column = (keys - first_query)[:, None].expand_as(visible)
        visible &= (column < 0) | mask[rows].gather(2, column.clamp(0, mask.shape[1] - 1))
    visible = visible[:, None, None]  # [n, 1, 1, Q, L]
    counts = None
    if chosen_blocks is not None:
        counts = _times_chosen(chosen_blocks[rows], keys // chosen_block_size)
        visible = visible & (counts > 0)
    (hidden,) = (~visible.any((1, 2, 3))).flatten().nonzero(as_tuple=True)
    has_blind_rows = not bool(visible.any(-1).all())
    blocks = block_table[seq, first_block + block]
    return QueryGroup(rows, blocks, visible, hidden, has_blind_rows, queries, keys, counts)


def _times_chosen(chosen: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return how often each KV head of each query chooses the block of each key, int64 [n, Hkv, 1, Q, L].

    chosen: int32 [n, Q, Hkv, k]. blocks: int64 [n, L].
    """
    num_blocks = int(blocks.max()) + 1
    is_known = (chosen >= 0) & (chosen < num_blocks)
    ids = chosen.long().where(is_known, num_blocks)  # a last column counts entries without a block
    counts = ids.new_zeros(*ids.shape[:3], num_blocks + 1)  # [n, Q, Hkv, blocks]
    counts.scatter_add_(-1, ids, torch.ones_like(ids))
    of_keys = blocks[:, None, None].expand(-1, *ids.shape[1:3], -1)  # [n, Q, Hkv, L]
    return counts.gather(-1, of_keys).transpose(1, 2).unsqueeze(2)
