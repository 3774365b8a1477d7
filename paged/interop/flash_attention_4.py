"""FlashAttention 4's functions (`flash_attn.cute`) with its order of arguments, the same as in `flash_attention`.

Both return (out, lse), lse None unless return_lse.
"""

from __future__ import annotations

from typing import Any

import torch

from paged.interop.arguments import ordered
from paged.interop.attention import attend
from paged.interop.flash_attention import PACKED

Result = tuple[torch.Tensor, torch.Tensor | None]
_OPTIONS: dict[str, Any] = {"softmax_scale": None, "causal": False, "window_size": (None, None), "learnable_sink": None}
_OPTIONS |= {"softcap": 0.0, "num_splits": 1, "pack_gqa": None, "deterministic": False}
_OPTIONS |= dict.fromkeys(("score_mod", "score_mod_bwd", "mask_mod"))
_AUXILIARY = dict.fromkeys(("aux_tensors", "aux_scalars"))


@ordered(
    "q k v",
    dict.fromkeys(("qv", "gather_kv_indices"))
    | _OPTIONS
    | _AUXILIARY
    | dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd"))
    | {"return_lse": False},
)
def flash_attn_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of one length."""
    attention = attend("flash_attn_func", given)
    return attention.out, attention.lse


@ordered(
    "q k v",
    dict.fromkeys(("qv", *PACKED, "min_seqlen_k", "seqused_q", "seqused_k", "gather_kv_indices", "page_table"))
    | _OPTIONS
    | {"block_sparse_tensors": None}
    | _AUXILIARY
    | {"return_lse": False},
)
def flash_attn_varlen_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of different lengths.

    q and k may also be [batch, seqlen, num_heads, head_dim], without their cu_seqlens. The longest lengths are all rows
    where not given.
    """
    attention = attend("flash_attn_varlen_func", given)
    return attention.out, attention.lse
