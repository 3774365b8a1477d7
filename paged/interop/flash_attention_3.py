"""FlashAttention 3's functions with its order of arguments; see `flash_attention` for the arguments.

If the log-sum-exp is requested, the result is (out, lse).
"""

from __future__ import annotations

from typing import Any

import torch

from paged.errors import InvalidInputError
from paged.interop.arguments import takes
from paged.interop.attention import attend
from paged.interop.layouts import with_contiguous_rows
from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.core.checks import FLOAT_DTYPES, check_is_tensor, check_tensor, refuse_gradients

Result = torch.Tensor | tuple[torch.Tensor | None, ...]


@takes("q k v", lambda
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False: None
)  # fmt: skip
def flash_attn_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of equal length."""
    return _attend("flash_attn_func", arguments)


@takes("qkv", lambda
    softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False: None
)  # fmt: skip
def flash_attn_qkvpacked_func(arguments: dict[str, Any]) -> Result:
    """Run `flash_attn_func` with packed qkv.

    qkv: [batch, seqlen, 3, num_heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim] with the
        heads of q, then k, then v.
    """
    return _attend("flash_attn_qkvpacked_func", arguments)


@takes("q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k", lambda
    seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, sm_margin=0, return_attn_probs=False: None
)  # fmt: skip
def flash_attn_varlen_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of different lengths."""
    return _attend("flash_attn_varlen_func", arguments)


@takes("q k_cache v_cache", lambda
    k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
    num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False: None
)  # fmt: skip
def flash_attn_with_kvcache(arguments: dict[str, Any]) -> Result:
    """Write new keys and values to a KV cache and attend to it.

    Returns:
        out; with return_softmax_lse (out, lse, None, None). FlashAttention 3 returns partial results as the last two.
    """
    return _attend("flash_attn_with_kvcache", arguments, None, None)


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, cu_seqlens: Any = None, seqused: Any = None, varlen_batch_idx: Any = None,
    return_lse: bool = True, *, virtual_batch_idx: Any = None, max_seqlen_q: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Combine attention over parts of the keys into attention over all keys.

    Args:
        out_partial: float32, float16 or bfloat16 [num_parts, batch, seqlen, num_heads, head_dim], or [num_parts,
            total_q, num_heads, head_dim].
        lse_partial: float32 [num_parts, ..., num_heads], natural log; -inf and inf mark a part without keys.
        out: output with the shape of one part, written in place.
        out_dtype: dtype of the result; None for the dtype of out, or of out_partial without out.
        return_lse: argument of version 4. The other arguments of version 4 are ignored, so rows beyond seqused are
            computed as well.

    Returns:
        out with the shape of one part, and its log-sum-exp, float32 [..., num_heads]; None without return_lse.

    Raises:
        InvalidInputError: a shape, dtype or device is invalid.
        UnsupportedError: a tensor requires a gradient.
    """
    check_is_tensor("out_partial", out_partial)
    leading = ("num_parts", "batch", "seqlen") if out_partial.dim() == 5 else ("num_parts", "total_q")
    check_tensor("out_partial", out_partial, (*leading, "num_heads", "head_dim"), FLOAT_DTYPES)
    check_tensor("lse_partial", lse_partial, out_partial.shape[:-1], (torch.float32,), out_partial.device)
    refuse_gradients("flash_attn_combine", out_partial, lse_partial)
    dtype = out_dtype or out_partial.dtype
    if out_dtype is None and out is not None:
        dtype = out.dtype
    if dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"out_dtype: {dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if out is not None:
        check_tensor("out", out, out_partial.shape[1:], (dtype,), out_partial.device)
    rows = out_partial.new_zeros(out_partial.shape[1:], dtype=torch.float32).flatten(0, -3)
    lse = lse_partial.new_full(rows.shape[1::-1], -torch.inf)
    for part, lse_of_part in zip(out_partial, lse_partial, strict=True):
        part = with_contiguous_rows(part.float()).flatten(0, -3)
        rows, lse = merge_attn_states(rows, lse, part, lse_of_part.flatten(0, -2).T)
    merged = rows.view(out_partial.shape[1:])
    if out is None:
        out = merged.to(dtype)
    else:
        out.copy_(merged)
    if not return_lse:
        return out, None
    return out, lse.T.reshape(out.shape[:-1])


@takes("batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens", lambda
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0: None
)  # fmt: skip
def get_scheduler_metadata(arguments: dict[str, Any]) -> torch.Tensor:
    """Return a dummy int32 tensor for scheduler_metadata, which has no effect here."""
    check_is_tensor("cache_seqlens", arguments["cache_seqlens"])
    return torch.zeros(1, dtype=torch.int32, device=arguments["cache_seqlens"].device)


def _attend(function: str, arguments: dict[str, Any], *partial: None) -> Result:
    out, lse = attend(function, arguments)
    if lse is None:
        return out
    return (out, lse, *partial)
