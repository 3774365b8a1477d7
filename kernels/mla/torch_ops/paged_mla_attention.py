"""Latent attention in PyTorch: one product for all queries and heads of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from ...common.attention.keys import NO_LIMIT
from ...common.attention.latent_cache import dequantized
from ...common.id_checks import Sequences, check_sequences_on_host
from ...common.numba_ops.recording import recording
from ..config import MlaCall

# Scores, or numbers of chosen keys, in memory at once: 16M float32 are 64 MB.
_MAX_NUMBERS = 1 << 24


def bind(_call: MlaCall, _plan: object) -> Callable[[MlaCall], None]:
    """Return a function that fills `out`, and `lse` if given, of any call."""
    return _compute


def _compute(call: MlaCall) -> None:
    active_recording = recording()
    if active_recording is not None:
        active_recording.note_read("paged_mla_attention, which no numba kernel computes")
    sizes = len(call.q), *call.kv_cache.shape[:2], call.max_seqlen_q, NO_LIMIT, 1
    check_sequences_on_host(Sequences(call.block_table, call.cu_seqlens_q, call.seq_lens, *sizes))
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(float("-inf"))
    num_heads, size = call.q.shape[1:]
    offsets, lengths, device = call.cu_seqlens_q.tolist(), call.seq_lens.tolist(), call.q.device
    for seq, ((start, stop), seq_len) in enumerate(zip(pairwise(offsets), lengths, strict=True)):
        numbers_per_query = num_heads * seq_len
        if call.indices is not None:
            numbers_per_query = call.indices.shape[1] * (size + num_heads)
        num_queries = max(1, _MAX_NUMBERS // max(1, numbers_per_query))
        for first in range(start, stop, num_queries):
            last = min(first + num_queries, stop)
            ends = torch.full((last - first,), seq_len, device=device)  # one past the last key of each query
            if call.causal:
                ends = ends.minimum(torch.arange(first + 1, last + 1, device=device) + seq_len - stop)
            if call.indices is None:
                keys = torch.arange(int(ends[-1].clamp(min=0)), device=device)
                _attend(call, slice(first, last), keys, keys < ends[:, None], seq)
            else:
                chosen = call.indices[first:last].long()
                visible = (chosen >= 0) & (chosen < ends[:, None])
                _attend(call, slice(first, last), chosen.where(visible, 0), visible, seq)


def _attend(call: MlaCall, rows: slice, keys: torch.Tensor, visible: torch.Tensor, seq: int) -> None:
    """Attention of some rows of a sequence to keys [L], or [n, L] of each row; visible: bool [n, L]."""
    if not int(call.seq_lens[seq]):
        keys, visible = keys[..., :0], visible[:, :0]
    block_size = call.kv_cache.shape[1]
    cache = call.kv_cache
    if cache.element_size() == 1:  # not every 8-bit dtype can be indexed
        cache = cache.view(torch.uint8)
    blocks = call.block_table[seq].long()[keys // block_size]
    stored = cache[blocks, keys % block_size].view(call.kv_cache.dtype)
    latents = dequantized(stored, call.v_head_dim, call.k_scale)  # [L, D] or [n, L, D]
    scores = call.q[rows].float() @ latents.transpose(-1, -2) * call.softmax_scale  # [n, H, L]
    scores.masked_fill_(~visible[:, None], float("-inf"))
    all_scores = scores
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None].expand(len(scores), -1, -1)
        all_scores = torch.cat([scores, sinks], -1)
    if not all_scores.shape[-1]:
        return
    # The largest score, not the log-sum-exp, is what can be subtracted: that is rounded, by 2e-3 where it is 46,000.
    largest = all_scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    total = (all_scores - largest).exp_().sum(-1, keepdim=True)
    weights = (scores - largest).exp_().div_(total.masked_fill(total == 0, 1.0))
    call.out[rows] = (weights @ latents[..., : call.v_head_dim]).to(call.out.dtype)
    if call.lse is not None:
        call.lse[:, rows] = total.log().add_(largest).squeeze(-1).T
