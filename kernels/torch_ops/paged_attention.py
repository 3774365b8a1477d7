"""Paged attention in PyTorch: gathered keys, one batched product for sequences of similar shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from paged.kernels.attention_call import AttentionCall

# Scores held at once, in elements: 16M float32 is 64 MB, beyond which a longer batch gains nothing on a CPU.
_MAX_SCORES = 1 << 24


def paged_attention(call: AttentionCall) -> None:
    """Twin of `kernels.paged_attention.paged_attention`: fills `call.out` and, where given, `call.lse`."""
    q, k_cache, v_cache, out, lse = call.q, call.k_cache, call.v_cache, call.out, call.lse
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    starts, lengths = call.cu_seqlens_q.tolist(), call.seq_lens.tolist()
    if lse is not None and call.sinks is not None:
        lse[:, : starts[-1]] = call.sinks.float()[:, None]
    for seqs, q_begin, q_len in _similar(starts, lengths, q.shape[1]):
        offs_q = torch.arange(q_begin, q_begin + q_len, device=q.device)
        first = torch.tensor([starts[seq] for seq in seqs], device=q.device)
        whole_q_len = starts[seqs[0] + 1] - starts[seqs[0]]
        seq_len = torch.tensor([lengths[seq] for seq in seqs], device=q.device)
        rows = first[:, None] + offs_q  # [n, q_len]
        position = seq_len[:, None] - whole_q_len + offs_q
        offs_n = torch.arange(int(seq_len.max()), device=q.device)
        visible = _visible(call, seqs, rows, position[:, :, None], offs_n, whole_q_len, seq_len[:, None, None])

        # What stands beyond seq_len in the table or in the last block is never used as a number, whatever it is.
        inside = offs_n < seq_len[:, None]  # [n, L]
        table = call.block_table[seqs][:, : -(-len(offs_n) // block_size)]
        table = table.masked_fill(~inside[:, ::block_size], 0).flatten()
        keys, values = (_gather(cache, table, len(seqs), len(offs_n)) for cache in (k_cache, v_cache))
        values.masked_fill_(~inside[:, None, :, None], 0.0)
        queries = q[rows].float().unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)  # [n, Hkv, G, q_len, D]

        if call.k_scale is not None:
            queries *= call.k_scale.reshape(-1, 1, 1, 1)
        scores = queries.flatten(2, 3) @ keys.transpose(-1, -2) * call.softmax_scale
        if call.softcap > 0:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.unflatten(2, (group, q_len))
        if call.alibi_slopes is not None:
            distance = (position[:, :, None] - offs_n).abs()[:, None, None]  # [n, 1, 1, q_len, L]
            scores -= call.alibi_slopes.float().view(num_kv_heads, group, 1, 1) * distance
        scores = scores.masked_fill_(~visible[:, None, None], -math.inf)
        row_lse = torch.logsumexp(scores, -1, keepdim=True)  # [n, Hkv, G, q_len, 1]
        if call.sinks is not None:
            row_lse = torch.logaddexp(row_lse, call.sinks.float().view(num_kv_heads, group, 1, 1))
        weights = torch.exp(scores.sub_(row_lse.clamp(min=torch.finfo(torch.float32).min)))
        attended = (weights.flatten(2, 3) @ values).unflatten(2, (group, q_len))
        if call.v_scale is not None:
            attended *= call.v_scale.reshape(-1, 1, 1, 1)
        out[rows] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
        if lse is not None:
            lse[:, rows.flatten()] = row_lse.squeeze(-1).permute(1, 2, 0, 3).reshape(q.shape[1], -1)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, num_seqs: int, length: int) -> torch.Tensor:
    """The first `length` keys of each sequence in float32, [n, Hkv, length, D]; copied by whole blocks."""
    rows = cache.index_select(0, blocks).view(num_seqs, -1, *cache.shape[2:])
    return rows[:, :length].float().transpose(1, 2)


def _visible(
    call: AttentionCall,
    seqs: list[int],
    rows: torch.Tensor,  # [n, q_len]
    position: torch.Tensor,  # [n, q_len, 1]
    key: torch.Tensor,  # [L]
    whole_q_len: int,
    seq_len: torch.Tensor,  # [n, 1, 1]
) -> torch.Tensor:
    """Which keys each row sees, [n, q_len, L]."""
    left, right = call.window
    visible = (key < seq_len) & (key >= position - left) & (key <= position + right)
    if call.is_causal is not None:
        visible &= (key <= position) | ~call.is_causal[seqs][:, None, None]
    if call.mask is not None:
        column = (key - (seq_len - whole_q_len)).expand(-1, position.shape[1], -1)  # among the new keys
        allowed = call.mask[rows].gather(2, column.clamp(0, call.mask.shape[1] - 1)) != 0
        visible &= allowed | (column < 0)
    return visible


def _similar(starts: list[int], lengths: list[int], num_heads: int) -> Iterator[tuple[list[int], int, int]]:
    """Batches of (sequences, first query, number of queries) whose scores fit _MAX_SCORES.

    Single-token sequences go together as long as padding at most doubles the keys read; others go alone, in chunks.
    """
    q_lens = [end - start for start, end in pairwise(starts)]
    singles = sorted((seq for seq, n in enumerate(q_lens) if n == 1 and lengths[seq] > 0), key=lengths.__getitem__)
    batch: list[int] = []
    for seq in singles:
        longest = lengths[seq]
        if batch and (longest > 2 * lengths[batch[0]] or (len(batch) + 1) * longest * num_heads > _MAX_SCORES):
            yield batch, 0, 1
            batch = []
        batch.append(seq)
    if batch:
        yield batch, 0, 1
    for seq, q_len in enumerate(q_lens):
        if q_len > 1 and lengths[seq] > 0:
            step = max(1, _MAX_SCORES // (lengths[seq] * num_heads))
            for begin in range(0, q_len, step):
                yield [seq], begin, min(step, q_len - begin)
