"""FlashAttention 2's functions on `paged_attention`, with its order of arguments; 3 and 4 have files of their own.

By keyword all of them take the other versions' arguments too, and those of vLLM's fork: `page_table`, `seqused_q`,
`seqused_k`, `learnable_sink` or `s_aux`, scales of 8-bit caches, `out`, `return_softmax_lse`. Nothing is ignored but
what FlashAttention does not read either, and what says how to compute and not what: `deterministic`, `num_splits`,
`scheduler_metadata`, `fa_version`, `pack_gqa`, `sm_margin`. What cannot be honoured raises UnsupportedError with its
name, unless it is None, False or 0.

Forward only. A row of queries that sees no key gives 0 and, unlike there, lse -inf.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from paged.errors import InvalidInputError
from paged.interop.arguments import takes
from paged.interop.attention import attend

_takes = partial(takes, options=lambda
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False: None
)  # fmt: skip
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]


@_takes("q k v")
def flash_attn_func(given: dict[str, Any]) -> Result:
    """`flash_attn.flash_attn_func`: attention of sequences of one length.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k, v: [batch, seqlen_k, num_kv_heads, head_dim].

    The others, the result and the errors are those of `flash_attn_varlen_func`, with the log-sum-exp
    [batch, num_q_heads, seqlen_q].
    """
    return _attend("flash_attn_func", given)


@_takes("q kv")
def flash_attn_kvpacked_func(given: dict[str, Any]) -> Result:
    """`flash_attn_func` with kv [batch, seqlen_k, 2, num_kv_heads, head_dim]."""
    return _attend("flash_attn_kvpacked_func", given)


@_takes("qkv")
def flash_attn_qkvpacked_func(given: dict[str, Any]) -> Result:
    """`flash_attn_func` with qkv [batch, seqlen, 3, num_heads, head_dim]."""
    return _attend("flash_attn_qkvpacked_func", given)


@takes("q k v", lambda
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None: None
)  # fmt: skip
def flash_attn_varlen_func(given: dict[str, Any]) -> Result:
    """`flash_attn.flash_attn_varlen_func`: attention of sequences of different lengths.

    Args:
        q: [total_q, num_q_heads, head_dim], float32, float16, bfloat16, or float8_e4m3fn with keys of that type.
        k, v: [total_k, num_kv_heads, head_dim], 1 to 512, v's may be another; with a block table
            [num_blocks, block_size, num_kv_heads, head_dim]; of q's type or float8_e4m3fn.
        cu_seqlens_q, cu_seqlens_k: int32 [num_seqs + 1], where sequences begin; those of the keys are not needed with
            a block table and seqused_k.
        max_seqlen_q, max_seqlen_k: at least the longest; that of the keys is not needed with a block table. Without one
            a table of int32 [num_seqs, max_seqlen_k] is made.
        dropout_p: 0.
        softmax_scale: 0 to 1e30; 1 / sqrt(head_dim) when not given.
        causal: the last query stands at the last key, and each sees what is not behind it.
        window_size: (left, right) keys seen on each side besides the own one; None, or a negative number, is no limit.
        attention_chunk: position i sees j only where j // attention_chunk is i // attention_chunk; 0 is no limit.
        softcap: 1e-6 to 1000, scores become softcap * tanh(score / softcap); None, 0 or a negative number is none.
        alibi_slopes: [num_q_heads], or [num_seqs, num_q_heads].
        block_table (page_table): int32 [num_seqs, max_blocks_per_seq].
        seqused_q, seqused_k: int32 [num_seqs], how many queries and keys of each sequence count; all where not given.
            The rows of other queries give 0 and -inf.
        s_aux (learnable_sink, sinks): [num_q_heads], the score of one more key, whose value is 0.
        q_descale, k_descale, v_descale: float32, one, [num_kv_heads] or [num_seqs, num_kv_heads], what 8-bit values are
            multiplied by; not read beside others. Rows that are not one row expanded are compared, on a device after
            waiting for it, and where they differ sequences run one after the other.
        out: like q (bfloat16 where that has 8 bits) with v's head_dim, written in place.

    Returns:
        out [total_q, num_q_heads, v's head_dim]; with return_softmax_lse (out, lse), lse float32 [num_q_heads,
        total_q]; with return_attn_probs (out, lse, None), there being no probabilities without dropout.

    Raises:
        InvalidInputError: an argument does not fit, by its name.
        UnsupportedError: an argument that cannot be honoured, by its name; or one that requires a gradient.
    """
    if given["cu_seqlens_k"] is None and given.get("seqused_k") is None:
        raise InvalidInputError("cu_seqlens_k, seqused_k: both None, expected one of them")
    has_table = given["block_table"] is not None or given.get("page_table") is not None
    for name in ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k")[: 2 if has_table else 4]:
        if given[name] is None:
            raise InvalidInputError(f"{name}: None, expected one; that of keys is not needed with a block_table")
    return _attend("flash_attn_varlen_func", given)


@_takes("q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k")
def flash_attn_varlen_kvpacked_func(given: dict[str, Any]) -> Result:
    """`flash_attn_varlen_func` with kv [total_k, 2, num_kv_heads, head_dim]."""
    return _attend("flash_attn_varlen_kvpacked_func", given)


@_takes("qkv cu_seqlens max_seqlen")
def flash_attn_varlen_qkvpacked_func(given: dict[str, Any]) -> Result:
    """`flash_attn_varlen_func` with qkv [total, 3, num_heads, head_dim]."""
    return _attend("flash_attn_varlen_qkvpacked_func", given)


@takes("q k_cache v_cache", lambda
    k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
    block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
    alibi_slopes=None, num_splits=0, return_softmax_lse=False: None
)  # fmt: skip
def flash_attn_with_kvcache(given: dict[str, Any]) -> Result:
    """`flash_attn.flash_attn_with_kvcache`: new keys and values go to the cache, and the queries attend to all of it.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim]; with cu_seqlens_q (and max_seqlen_q) as in
            `flash_attn_varlen_func`.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] with a block table, else [batch_cache,
            seqlen_cache, num_kv_heads, head_dim].
        k, v: [batch, seqlen_new, num_kv_heads, head_dim], written behind the cache_seqlens keys that are there; with
            cu_seqlens_k_new, int32 [batch + 1], [total_new, num_kv_heads, head_dim]. float8_e4m3fn only for a cache of
            that type, which keeps them as they are; others are divided by its scales.
        rotary_cos, rotary_sin: [max_position, rotary_dim / 2]: k, and q where causal or windowed, are rotated from
            position cache_seqlens on (rotary_seqlens where given), as they are written and read; otherwise all of q at
            that one position.
        cache_seqlens: int32 [batch], or one length for all; the whole cache where not given, which takes no k and v.
        cache_batch_idx: int32 or int64 [batch], rows of block_table, or of a cache without one; 0, 1, ... where not
            given.
        cache_leftpad: int32 [batch], keys at the start of each sequence that no query sees.
        block_table (page_table): int32 [batch, max_blocks_per_seq], of any number of rows with cache_batch_idx.

    The others are those of `flash_attn_varlen_func`.

    Returns:
        out like q; with return_softmax_lse also float32 [batch, num_q_heads, seqlen_q], or [num_q_heads, total_q].

    Raises:
        InvalidInputError: k without v, new keys without lengths, rotation without new keys, or an argument does not
            fit, by its name. The cache is as before.
        UnsupportedError: as in `flash_attn_varlen_func`.
    """
    return _attend("flash_attn_with_kvcache", given)


def _attend(function: str, given: dict[str, Any]) -> Result:
    out, lse = attend(function, given)
    if lse is None:
        return out
    return (out, lse, None) if given.get("return_attn_probs") else (out, lse)
