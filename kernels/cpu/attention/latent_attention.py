"""Launches of numba kernels of attention over latents (MLA), which all heads share."""

from __future__ import annotations

import torch

from ...attention.call import AttentionCall, MlaCall
from ..code_vectors import HAS_FLOAT16, NUMBERS
from ..launch import NumbaLaunch
from . import compressed_attention, paged_attention


def reads(call: MlaCall) -> bool:
    """Return whether numba kernels read the rows of a call: plain numbers, or codes in groups of 32."""
    if call.kv_cache.dtype == call.q.dtype:
        return True
    return HAS_FLOAT16 and call.q.shape[2] % NUMBERS == 0


def launch_for(call: MlaCall) -> NumbaLaunch:
    """Return a launch that fills the rows of calls like this one, with the same lengths and checked ids.

    cu_seqlens_q, seq_lens and sinks must be contiguous.
    """
    if call.indices is not None:
        return compressed_attention.launch_for_latents(call)
    return paged_attention.launch_for(_as_attention(call), keys_are_values=True)


def _num_kv_heads(call: MlaCall) -> int:
    """Return in how many parts heads attend: one, or several if there are fewer sequences than threads.

    Threads share sequences and KV heads of the kernel for few queries. More rows than it takes are shared without this.
    """
    num_tokens, num_heads, _ = call.q.shape
    num_threads = torch.get_num_threads()
    if call.deterministic or call.kv_cache.dtype == torch.uint8:
        return 1
    if num_tokens * num_heads > paged_attention.FEW_ROWS * num_threads:
        return 1
    num_parts = 1
    while num_parts * len(call.seq_lens) < num_threads and num_heads % (2 * num_parts) == 0:
        num_parts *= 2
    return num_parts


def _as_attention(call: MlaCall) -> AttentionCall:
    """Return the call of `paged_attention` whose KV heads are the same latents. Keys begin with their values."""
    keys = call.kv_cache.unsqueeze(2).expand(-1, -1, _num_kv_heads(call), -1)  # [num_blocks, block_size, heads, size]
    values = keys
    if keys.dtype != torch.uint8:
        values = keys[..., : call.v_head_dim]
    return AttentionCall(
        q=call.q,
        k_cache=keys,
        v_cache=values,
        block_table=call.block_table,
        cu_seqlens_q=call.cu_seqlens_q,
        seq_lens=call.seq_lens,
        max_seqlen_q=call.max_seqlen_q,
        is_causal=None,
        sinks=call.sinks,
        alibi_slopes=None,
        k_scale=call.k_scale,
        v_scale=call.k_scale,
        k_table_scale=None,
        v_table_scale=None,
        mask=None,
        chosen_blocks=None,
        chosen_block_size=0,
        softmax_scale=call.softmax_scale,
        window=call.window,
        chunk_size=0,
        softcap=0.0,
        deterministic=call.deterministic,
        return_lse=call.return_lse,
        out=call.out,
        v_head_dim=call.v_head_dim,
    )
