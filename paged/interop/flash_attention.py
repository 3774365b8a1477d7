"""FlashAttention 2's functions on `paged_attention`, with the argument order of FlashAttention 2.

Versions 3 and 4 are in `flash_attention_3` and `flash_attention_4`. By keyword, all functions also take the arguments
of the other versions and of vLLM's fork: `page_table`, `seqused_q`, `seqused_k`, `learnable_sink` or `s_aux`, scales of
8-bit caches, `out`, `return_softmax_lse`. Arguments that do not change the result are accepted without effect:
`deterministic`, `num_splits`, `scheduler_metadata`, `fa_version`, `ver`, `pack_gqa`, `sm_margin`, `min_seqlen_k`,
and all arguments that FlashAttention ignores. Any other argument raises UnsupportedError with its name, unless its
value is neutral: None, False or 0; 1 for `cp_world_size`, -1 for `window_size_left` and `window_size_right`.

Forward only. A query row that sees no key returns 0 and, unlike in FlashAttention, lse -inf.
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
def flash_attn_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of equal length, like `flash_attn.flash_attn_func`.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k, v: [batch, seqlen_k, num_kv_heads, head_dim].

    For other arguments, result and errors see `flash_attn_varlen_func`. The log-sum-exp is [batch, num_q_heads,
    seqlen_q].
    """
    return _attend("flash_attn_func", arguments)


@_takes("q kv")
def flash_attn_kvpacked_func(arguments: dict[str, Any]) -> Result:
    """`flash_attn_func` with kv [batch, seqlen_k, 2, num_kv_heads, head_dim]."""
    return _attend("flash_attn_kvpacked_func", arguments)


@_takes("qkv")
def flash_attn_qkvpacked_func(arguments: dict[str, Any]) -> Result:
    """`flash_attn_func` with qkv [batch, seqlen, 3, num_heads, head_dim]."""
    return _attend("flash_attn_qkvpacked_func", arguments)


@takes("q k v", lambda
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None: None
)  # fmt: skip
def flash_attn_varlen_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of different lengths, like `flash_attn.flash_attn_varlen_func`.

    Args:
        q: [total_q, num_q_heads, head_dim], float32, float16 or bfloat16; float8_e4m3fn if the keys are too.
        k, v: [total_k, num_kv_heads, head_dim], or with a block table [num_blocks, block_size, num_kv_heads, head_dim];
            dtype of q or float8_e4m3fn. Head sizes are 1 to 512; v may have another one.
        cu_seqlens_q, cu_seqlens_k: int32 [num_seqs + 1], offsets of the sequences. cu_seqlens_k may be None with
            seqused_k and a block table.
        max_seqlen_q, max_seqlen_k: upper bounds of the longest lengths. max_seqlen_k may be None with a block table.
            Without one, an int32 table [num_seqs, max_seqlen_k] is made.
        dropout_p: 0.
        softmax_scale: 0 to 1e30; None for 1 / sqrt(head_dim).
        causal: whether a query sees only keys up to its own position; the last query is aligned with the last key.
        window_size: (left, right), number of visible keys on each side besides its own; None or negative for no limit.
        attention_chunk: position i sees j only if j // attention_chunk equals i // attention_chunk; 0 for no limit.
        softcap: 1e-6 to 1000: scores become softcap * tanh(score / softcap). None, 0 or negative for none.
        alibi_slopes: [num_q_heads] or [num_seqs, num_q_heads].
        block_table (page_table): int32 [num_seqs, max_blocks_per_seq].
        seqused_q, seqused_k: int32 [num_seqs], number of queries and keys of each sequence that are used; None for all.
            Rows of other queries return 0 and -inf.
        s_aux (learnable_sink, sinks): [num_q_heads], score of an additional key with value 0.
        q_descale, k_descale, v_descale: float32, one value, [num_kv_heads] or [num_seqs, num_kv_heads], factors for
            8-bit values, otherwise ignored. Unless all rows are one expanded row, they are compared, which waits for
            the device. If they differ, sequences run one after another.
        out: like q (bfloat16 if q has 8 bits) with v's head_dim; None allocates it.

    Returns:
        out [total_q, num_q_heads, v's head_dim]. With return_softmax_lse (out, lse), lse float32 [num_q_heads,
        total_q]. With return_attn_probs (out, lse, None), because without dropout there are no probabilities.

    Raises:
        InvalidInputError: an argument is invalid; the message names it.
        UnsupportedError: an argument is not supported or requires a gradient; the message names it.
    """
    if arguments["cu_seqlens_k"] is None and arguments.get("seqused_k") is None:
        raise InvalidInputError("cu_seqlens_k, seqused_k: both None, expected one of them")
    has_table = arguments["block_table"] is not None or arguments.get("page_table") is not None
    for name in ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k")[: 2 if has_table else 4]:
        if arguments[name] is None:
            raise InvalidInputError(f"{name}: None, expected a number; max_seqlen_k may be None with a block_table")
    return _attend("flash_attn_varlen_func", arguments)


@_takes("q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k")
def flash_attn_varlen_kvpacked_func(arguments: dict[str, Any]) -> Result:
    """`flash_attn_varlen_func` with kv [total_k, 2, num_kv_heads, head_dim]."""
    return _attend("flash_attn_varlen_kvpacked_func", arguments)


@_takes("qkv cu_seqlens max_seqlen")
def flash_attn_varlen_qkvpacked_func(arguments: dict[str, Any]) -> Result:
    """`flash_attn_varlen_func` with qkv [total, 3, num_heads, head_dim]."""
    return _attend("flash_attn_varlen_qkvpacked_func", arguments)


@takes("q k_cache v_cache", lambda
    k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
    block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
    alibi_slopes=None, num_splits=0, return_softmax_lse=False: None
)  # fmt: skip
def flash_attn_with_kvcache(arguments: dict[str, Any]) -> Result:
    """Write new keys and values to a KV cache and attend to it, like `flash_attn.flash_attn_with_kvcache`.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim]; with cu_seqlens_q (and max_seqlen_q) as in
            `flash_attn_varlen_func`.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] with a block table, else [batch_cache,
            seqlen_cache, num_kv_heads, head_dim].
        k, v: [batch, seqlen_new, num_kv_heads, head_dim], appended to the cache_seqlens keys of each sequence; with
            cu_seqlens_k_new (int32 [batch + 1]), [total_new, num_kv_heads, head_dim]. float8_e4m3fn requires a cache of
            the same dtype and is stored unchanged. Other dtypes are divided by the cache's scales.
        rotary_cos, rotary_sin: [max_position, rotary_dim / 2]. k is rotated from position cache_seqlens on, or from
            rotary_seqlens if given, before it is written. q is rotated in the same way if causal or windowed;
            otherwise all of q takes the first position.
        cache_seqlens: int32 [batch], or one length for all. None for the whole cache, without k and v.
        cache_batch_idx: int32 or int64 [batch], rows of block_table, or of a cache without one; None for
            0, 1, ...
        cache_leftpad: int32 [batch], number of keys at the start of each sequence that no query sees.
        block_table (page_table): int32 [batch, max_blocks_per_seq]; any number of rows with cache_batch_idx.

        For other arguments see `flash_attn_varlen_func`.

    Returns:
        out like q. With return_softmax_lse also the log-sum-exp, float32 [batch, num_q_heads, seqlen_q] or
        [num_q_heads, total_q].

    Raises:
        InvalidInputError: k without v, new keys without lengths, rotation without new keys, or an invalid argument; the
            message names it. The cache is unchanged.
        UnsupportedError: as in `flash_attn_varlen_func`.
    """
    return _attend("flash_attn_with_kvcache", arguments)


def _attend(function: str, arguments: dict[str, Any]) -> Result:
    out, lse = attend(function, arguments)
    if lse is None:
        return out
    if arguments.get("return_attn_probs"):
        return out, lse, None
    return out, lse
