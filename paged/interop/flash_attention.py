"""FlashAttention's inference functions on `paged_attention`: the arguments of versions 2 and 3, and of vLLM's fork.

Without a block table keys and values are not copied either: a row is then a cache block of one token, and a sequence
of a padded cache one block. A row of queries that sees no key gives 0 and, unlike there, lse -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import one_for_all_sequences, refuse
from paged.kernels.paged_attention import paged_attention
from paged.kernels.reshape_and_cache import reshape_and_cache
from paged.kernels.rotary_embedding import rotary_embedding


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn.flash_attn_varlen_func`, forward only: attention of sequences of different lengths.

    Args:
        q: [total_q, num_q_heads, head_dim].
        k, v: [total_k, num_kv_heads, head_dim]; with a block table [num_blocks, block_size, num_kv_heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [num_seqs + 1], where sequences begin; those of the keys are not needed with
            a block table and seqused_k.
        max_seqlen_q, max_seqlen_k: at least the longest; that of the keys is not needed with a block table. Without one
            a table of int32 [num_seqs, max_seqlen_k] is made.
        seqused_k: int32 [num_seqs], how many keys of each sequence count; all where not given.
        causal, window_size, softcap, softmax_scale, out: as in `paged_attention`, the last query standing at the last
            key. Any negative edge of a window is no limit.
        alibi_slopes, s_aux (sinks): [num_q_heads], k_descale, v_descale (scales of an e4m3 cache): one or
            [num_kv_heads]. One row for each sequence is taken where it is one row, expanded.
        deterministic, num_splits, scheduler_metadata, fa_version, pack_gqa, sm_margin: change nothing here.

    Returns:
        out [total_q, num_q_heads, head_dim]; with return_softmax_lse also float32 [num_q_heads, total_q].

    Raises:
        InvalidInputError: lengths are missing, or as in `paged_attention`.
        UnsupportedError: an argument that cannot be honoured, by name: dropout, attention probabilities, a scale of q.
    """
    refuse("flash_attn_varlen_func", {"dropout_p": dropout_p, "return_attn_probs": return_attn_probs, **others})
    if cu_seqlens_q is None or max_seqlen_q is None:
        raise InvalidInputError("cu_seqlens_q, max_seqlen_q: None, expected both")
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise InvalidInputError("cu_seqlens_k, seqused_k: both None, expected one of them")
        seqused_k = cu_seqlens_k.diff()
    if block_table is None:
        if cu_seqlens_k is None or max_seqlen_k is None:
            raise InvalidInputError("cu_seqlens_k, max_seqlen_k: expected both where there is no block_table")
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        offsets = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        block_table = cu_seqlens_k[:-1, None] + offsets
    return paged_attention(
        *(_with_contiguous_rows(x) for x in (q, k, v)),
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seqused_k,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_window(window_size),
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=one_for_all_sequences("alibi_slopes", alibi_slopes),
        k_scale=one_for_all_sequences("k_descale", k_descale),
        v_scale=one_for_all_sequences("v_descale", v_descale),
        out=out,
        return_lse=return_softmax_lse,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn.flash_attn_with_kvcache`: new keys and values go to the cache, and the queries attend to all of it.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] with a block table, else [batch_cache,
            seqlen_cache, num_kv_heads, head_dim].
        k, v: [batch, seqlen_new, num_kv_heads, head_dim], written behind the cache_seqlens keys that are there.
        rotary_cos, rotary_sin: [max_position, rotary_dim / 2]: k, and q where causal or windowed, are rotated from
            position cache_seqlens on, as they are written and read; otherwise all of q at that one position.
        cache_seqlens: int32 [batch], or one length for all; the whole cache where not given, which takes no k and v.
        cache_batch_idx: int32 [batch], rows of a cache without block table; 0, 1, ... where not given.
        block_table: int32 [batch, max_blocks_per_seq].

    The others are those of `flash_attn_varlen_func`.

    Returns:
        out like q; with return_softmax_lse also float32 [batch, num_q_heads, seqlen_q].

    Raises:
        InvalidInputError: k without v, new keys without lengths, rotation without new keys, or as in `paged_attention`.
        UnsupportedError: an argument that cannot be honoured, by name: left padding, queries of different lengths.
    """
    refuse("flash_attn_with_kvcache", {"cache_leftpad": cache_leftpad, **others})
    if q.dim() != 4:
        raise InvalidInputError(f"q: shape {list(q.shape)}, expected [batch, seqlen_q, num_q_heads, head_dim]")
    if (k is None) != (v is None):
        raise InvalidInputError("k, v: one of them is None, expected both or neither")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise InvalidInputError("rotary_cos, rotary_sin: expected both, with k and v, or neither")
    if block_table is not None and cache_batch_idx is not None:
        raise UnsupportedError("cache_batch_idx: flash_attn_with_kvcache takes it without block_table only")
    batch, seqlen_q = q.shape[:2]
    int32: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    if block_table is None:
        rows = torch.arange(batch, **int32) if cache_batch_idx is None else cache_batch_idx.to(torch.int32)
        block_table = rows.unsqueeze(1)
    if cache_seqlens is None:
        if k is not None:
            raise InvalidInputError("cache_seqlens: None, expected the lengths before k and v")
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    seq_lens = torch.full((batch,), cache_seqlens, **int32) if isinstance(cache_seqlens, int) else cache_seqlens
    left, right = _window(window_size)
    k_scale = one_for_all_sequences("k_descale", k_descale)
    v_scale = one_for_all_sequences("v_descale", v_descale)
    if k is not None and v is not None:
        positions = seq_lens.long()[:, None] + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            table = torch.cat([rotary_cos, rotary_sin], 1).float()
            steps = torch.arange(seqlen_q, device=q.device)
            if not causal and left == right == -1:
                steps.zero_()
            q = _rotated(q, seq_lens.long()[:, None] + steps, table, rotary_interleaved)
            k = _rotated(k, positions, table, rotary_interleaved)
        block_size = k_cache.shape[1]
        blocks = block_table.gather(1, positions // block_size)
        slots = (blocks.long() * block_size + positions % block_size).flatten()
        new_k, new_v = (_with_contiguous_rows(x).flatten(0, 1) for x in (k, v))
        reshape_and_cache(new_k, new_v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        seq_lens = seq_lens + k.shape[1]
    result, lse = paged_attention(
        _with_contiguous_rows(q).flatten(0, 1),
        k_cache,
        v_cache,
        block_table=block_table,
        cu_seqlens_q=torch.arange(batch + 1, **int32) * seqlen_q,
        seq_lens=seq_lens,
        max_seqlen_q=seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=one_for_all_sequences("alibi_slopes", alibi_slopes),
        k_scale=k_scale,
        v_scale=v_scale,
        out=None if out is None else out.view(-1, *out.shape[2:]),
        return_lse=True,
    )
    result = result.view(q.shape)
    return (result, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)) if return_softmax_lse else result


def _window(window_size: Sequence[int] | None) -> tuple[int, int]:
    """(left, right); every negative edge, and no window, stand for no limit."""
    left, right = (-1, -1) if window_size is None else window_size
    return max(left, -1), max(right, -1)


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """A rotated copy of x [batch, seqlen, num_heads, head_dim] at positions [batch, seqlen]."""
    rotated = x.clone(memory_format=torch.contiguous_format)
    rotary_embedding(positions.flatten(), rotated.flatten(0, 1), None, table, interleaved=interleaved)
    return rotated
