"""References of the definitions that we write: PyTorch in float32, for readers who have PyTorch alone."""

NORM = """\
import torch


@torch.no_grad()
def run(hidden_states, weight):
    EPS = {eps!r}
    x = hidden_states.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (normed * weight.float()).to(hidden_states.dtype)
"""

ATTENTION = """\
import math

import torch


@torch.no_grad()
def run({signature}):
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    output = torch.zeros_like(q)
    lse = torch.full((num_tokens, num_q_heads), -math.inf, device=q.device)
    query_offsets, kv_offsets = {query_offsets}, kv_indptr.tolist()
    last_lens = {last_lens}
    for seq in range(len(kv_offsets) - 1):
        first, end = query_offsets[seq], query_offsets[seq + 1]
        pages = kv_indices[kv_offsets[seq] : kv_offsets[seq + 1]].long()
        if first == end or len(pages) == 0:
            continue
        seq_len = (len(pages) - 1) * page_size + last_lens[seq]
        keys = k_cache[pages].flatten(0, 1)[:seq_len].float()
        values = v_cache[pages].flatten(0, 1)[:seq_len].float()
        keys = keys.repeat_interleave(num_q_heads // num_kv_heads, dim=1)
        values = values.repeat_interleave(num_q_heads // num_kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * sm_scale
        query_positions = torch.arange(seq_len - (end - first), seq_len, device=q.device)
        is_later = torch.arange(seq_len, device=q.device) > query_positions[:, None]
        scores = scores.masked_fill(is_later, -math.inf)
        sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - sums[..., None]).nan_to_num(0.0)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        lse[first:end] = sums.T / math.log(2)
    return output, lse
"""
