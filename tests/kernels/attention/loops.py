"""Attention in float64, one row and one head at a time: the rules that products of many queries and masks hide."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.float64 import f64


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
    mask: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
    chosen_blocks: torch.Tensor | None = None,
    chosen_block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention`'s out and lse, one row and one head at a time."""
    q, k_cache, v_cache = f64(q), f64(k_cache), f64(v_cache)
    if k_scale is not None:
        k_cache = k_cache * f64(k_scale)[..., None]
    if v_scale is not None:
        v_cache = v_cache * f64(v_scale)[..., None]
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    if isinstance(causal, bool):
        is_causal = [causal] * len(seq_lens)
    else:
        is_causal = causal.tolist()
    window_left, window_right = window_size
    out = q.new_zeros(num_tokens, num_q_heads, v_cache.shape[3])
    lse = torch.full((num_q_heads, num_tokens), -math.inf, dtype=torch.float64)
    offsets, lengths, table = cu_seqlens_q.tolist(), seq_lens.tolist(), block_table.tolist()
    for seq, seq_len in enumerate(lengths):
        first, last = offsets[seq], offsets[seq + 1]
        slots = [(table[seq][j // block_size], j % block_size) for j in range(seq_len)]
        for row in range(first, last):
            position = seq_len - (last - first) + (row - first)
            low, high = 0, seq_len
            if window_left >= 0:
                low = max(low, position - window_left)
            if window_right >= 0:
                high = min(high, position + window_right + 1)
            if is_causal[seq]:
                high = min(high, position + 1)
            new = seq_len - (last - first)  # position of the first query
            keys = [j for j in range(low, high) if mask is None or j < new or mask[row, j - new]]
            if attention_chunk_size:
                keys = [j for j in keys if j // attention_chunk_size == position // attention_chunk_size]
            keys_of_sequence = keys
            for head in range(num_q_heads):
                if chosen_blocks is not None:
                    chosen = chosen_blocks[row, head // group].tolist()
                    keys = [j for block in chosen for j in keys_of_sequence if j // chosen_block_size == block]
                blocks = torch.tensor([slots[j][0] for j in keys], dtype=torch.int64)
                offs = torch.tensor([slots[j][1] for j in keys], dtype=torch.int64)
                scores = k_cache[blocks, offs, head // group] @ q[row, head] * softmax_scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores -= float(alibi_slopes[head]) * (position - torch.tensor(keys, dtype=torch.float64)).abs()
                if sinks is not None:
                    scores = torch.cat([scores, f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    weights = torch.exp(scores - lse[head, row])
                    out[row, head] = weights[: len(keys)] @ v_cache[blocks, offs, head // group]
    return out, lse


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` by its formula."""
    out_a, lse_a, out_b, lse_b = f64(out_a), f64(lse_a), f64(out_b), f64(lse_b)
    lse_a, lse_b = (torch.where(lse == math.inf, -math.inf, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - lse))
        out += torch.where(weight.T.unsqueeze(-1) == 0, 0.0, weight.T.unsqueeze(-1) * part)
    return out, lse


# Magnitudes of the eight codes of e2m1.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def numbers(kv_cache: torch.Tensor, k_scale: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers that a latent cache stands for; uint8 rows have the published forms of 656 and 352 bytes."""
    if kv_cache.dtype != torch.uint8:
        if k_scale is None:
            return f64(kv_cache)
        return f64(kv_cache) * f64(k_scale)
    rows = kv_cache.cpu().contiguous()
    if rows.shape[-1] == 352:
        eights = rows[..., 256:].view(torch.float8_e4m3fn).double()  # rotated numbers, then scales
        bytes_of_codes, scales = torch.arange(512) // 2, torch.arange(512) // 16
        nibbles = rows[..., bytes_of_codes].int() >> 4 * (torch.arange(512) % 2)
        signs = 1 - 2 * (nibbles // 8 % 2)
        latents = signs * E2M1[nibbles % 8] * eights[..., 64 + 8 * (scales & 3) + (scales >> 2)]
        return torch.cat([latents, eights[..., :64]], -1)
    codes, scales = rows[..., :512].view(torch.float8_e4m3fn), rows[..., 512:528].view(torch.float32)
    scale_of = torch.arange(512) // 128
    return torch.cat([f64(codes) * f64(scales)[..., scale_of], f64(rows[..., 528:].view(torch.bfloat16))], -1)


def paged_mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    v_head_dim: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_mla_attention`'s out and lse, one row and one head at a time.

    values: [num_blocks, block_size, v_head_dim] in place of the cache's latents.
    """
    q, cache, block_size = f64(q), numbers(kv_cache, k_scale), kv_cache.shape[1]
    values = cache[..., :v_head_dim] if values is None else f64(values)
    num_tokens, num_heads, _ = q.shape
    out = q.new_zeros(num_tokens, num_heads, v_head_dim)
    lse = torch.full((num_heads, num_tokens), -math.inf, dtype=torch.float64)
    offsets, lengths, table = cu_seqlens_q.tolist(), seq_lens.tolist(), block_table.tolist()
    for seq, seq_len in enumerate(lengths):
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            left, right = window_size
            first, end = 0, seq_len
            if left >= 0:
                first = max(position - left, 0)
            if right >= 0:
                end = min(end, position + right + 1)
            if causal:
                end = min(end, position + 1)
            keys = list(range(first, end))
            if indices is not None:
                keys = [key for key in indices[row].tolist() if 0 <= key < end]
            slots = [(table[seq][key // block_size], key % block_size) for key in keys]
            places = tuple(torch.tensor(slots, dtype=torch.int64).view(-1, 2).T)
            for head in range(num_heads):
                scores = cache[places] @ q[row, head] * softmax_scale
                if sinks is not None:
                    scores = torch.cat([scores, f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    out[row, head] = torch.exp(scores[: len(keys)] - lse[head, row]) @ values[places]
    return out, lse


def paged_compressed_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    entry_cache: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    entry_table: torch.Tensor | None = None,
    pool_size: int = 1,
    indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_compressed_attention`'s out and lse, one row and one head at a time; pairs turn as complex numbers."""
    q, cache, out = f64(q), _numbers_of_rows(kv_cache), torch.zeros_like(f64(q))
    if entry_cache is not None:
        entry_cache = _numbers_of_rows(entry_cache)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    offsets = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            keys = []
            for key in range(max(0, position - sliding_window + 1), position + 1):
                keys.append(cache[int(block_table[seq, key // cache.shape[1]]), key % cache.shape[1]])
            if entry_cache is not None and entry_table is not None:
                closed = range((position + 1) // pool_size)
                chosen = closed if indices is None else indices[row].tolist()
                for entry in chosen:
                    if entry in closed:
                        block = int(entry_table[seq, entry // entry_cache.shape[1]])
                        keys.append(entry_cache[block, entry % entry_cache.shape[1]])
            numbers = torch.stack(keys) if keys else q.new_zeros(0, q.shape[2])
            for head in range(q.shape[1]):
                scores = numbers @ q[row, head] * softmax_scale
                if sinks is not None:
                    scores = torch.cat([scores, f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    out[row, head] = torch.exp(scores[: len(keys)] - lse[head, row]) @ numbers
            if cos_sin_cache is not None and keys:
                cos, sin = f64(cos_sin_cache[position]).chunk(2)
                turned = out[row, :, q.shape[2] - 2 * len(cos) :]
                pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, -sin)
                turned.copy_(torch.view_as_real(pairs).flatten(-2))
    return out, lse


def _numbers_of_rows(cache: torch.Tensor) -> torch.Tensor:
    """The numbers that rows of `paged_compressed_attention` stand for."""
    if cache.dtype != torch.uint8:
        return f64(cache)
    rows = cache.cpu().contiguous()
    if rows.shape[-1] == 384:
        codes = torch.stack([rows[..., :224] & 15, rows[..., :224] >> 4], -1).flatten(-2).long()
        magnitudes = E2M1[codes % 8]
        scales = f64(rows[..., 352:380].contiguous().view(torch.float8_e4m3fn))[..., torch.arange(448) // 16]
        numbers = torch.where(codes < 8, 1, -1) * magnitudes * scales
        return torch.cat([numbers, f64(rows[..., 224:352].contiguous().view(torch.bfloat16))], -1)
    if rows.shape[-1] == 528:
        powers = 2.0 ** (rows[..., 512:].double() - 127)
        return f64(rows[..., :512].view(torch.float8_e4m3fn)) * powers[..., torch.arange(512) // 32]
    powers = 2.0 ** (rows[..., 576:583].double() - 127)
    codes = f64(rows[..., :448].view(torch.float8_e4m3fn)) * powers[..., torch.arange(448) // 64]
    return torch.cat([codes, f64(rows[..., 448:576].contiguous().view(torch.bfloat16))], -1)


def numbers_of_keys(key_cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The numbers that a cache of an indexer's keys stands for."""
    keys = key_cache.cpu()
    if keys.dtype != torch.uint8:
        return f64(keys)
    codes, scales = keys[..., :head_dim].contiguous(), keys[..., head_dim:].contiguous()
    if keys.dim() == 2:  # a block's keys, then its scales
        block_size = keys.shape[1] // (head_dim + 4)
        codes = keys[:, : block_size * head_dim].reshape(-1, block_size, head_dim)
        scales = keys[:, block_size * head_dim :].reshape(-1, block_size, 4)
    return f64(codes.view(torch.float8_e4m3fn)) * f64(scales.view(torch.float32))


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    pool_size: int = 1,
    candidates: torch.Tensor | None = None,
    candidate_size: int = 1,
) -> list[torch.Tensor]:
    """The scores of every token and the keys that it sees, in the order of `choose_keys`' formula; -inf for keys that
    are in no candidate."""
    wide = numbers_of_keys(key_cache, q.shape[2])
    block_size = wide.shape[1]
    q, weights, offsets, table = f64(q), f64(weights), cu_seqlens_q.tolist(), block_table.tolist()
    keys_of_token = [torch.zeros(0, dtype=torch.float64)] * len(q)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for row in range(offsets[seq], offsets[seq + 1]):
            end = (seq_len - offsets[seq + 1] + row + 1) // pool_size
            seen = [wide[table[seq][key // block_size], key % block_size] for key in range(end)]
            keys_of_token[row] = torch.tensor(
                [float(weights[row] @ (q[row] @ key).clamp(min=0)) for key in seen], dtype=torch.float64
            )
            if candidates is not None:
                for key in range(end):
                    if key // candidate_size not in candidates[row].tolist():
                        keys_of_token[row][key] = -math.inf
    return keys_of_token


def choose_blocks(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    chosen_block_size: int,
    weights: torch.Tensor | None = None,
    pool_size: int = 1,
    reduction: str = "max",
    local_blocks: int = 1,
) -> list[list[list[int]]]:
    """`choose_blocks`: the ids of each token and list, ascending, one list and one block at a time."""
    wide = numbers_of_keys(key_cache, q.shape[2])
    q, offsets, table, cache_size = f64(q), cu_seqlens_q.tolist(), block_table.tolist(), key_cache.shape[1]
    lists: list[list[list[int]]] = [[[]] * (q.shape[1] if weights is None else 1) for _ in q]
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            keys = range((position + 1) // pool_size)
            seen = [wide[table[seq][key // cache_size], key % cache_size] for key in keys]
            products = [(q[row] @ key).tolist() for key in seen]
            for number in range(len(lists[row])):
                scores: dict[int, list[float]] = {}
                for key, by_head in zip(keys, products, strict=True):
                    score = by_head[number]
                    if weights is not None:
                        score = sum(float(w) * max(s, 0.0) for w, s in zip(weights[row], by_head, strict=True))
                    scores.setdefault(key * pool_size // chosen_block_size, []).append(score)
                own = position // chosen_block_size
                forced = [block for block in range(own - local_blocks + 1, own + 1) if block >= 0]
                count = top_k
                if local_blocks == 0 and position >= 0 and (position + 1) % pool_size:
                    forced, count = [own], top_k + 1
                best = {block: max(each) for block, each in scores.items()}
                if reduction == "mean":
                    best = {block: sum(each) / len(each) for block, each in scores.items()}
                others = sorted(
                    (block for block in best if block not in forced), key=lambda block: (-best[block], block)
                )
                lists[row][number] = sorted([*forced, *others][:count])
    return lists


def choose_keys(
    q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, *, top_k: int, **sequences: Any
) -> torch.Tensor:
    """`choose_keys`, each row in ascending order."""
    scores = index_scores(q, weights, key_cache, **sequences)
    count = min(top_k, sequences["block_table"].shape[1] * key_cache.shape[1])
    indices = torch.full((len(q), count), -1, dtype=torch.int32)
    for row, scores_of_row in enumerate(scores):
        best = scores_of_row.argsort(descending=True)[:count].sort().values.int()
        indices[row, count - len(best) :] = best
    return indices
