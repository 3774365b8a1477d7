"""Arguments of others that the operations here do not have."""

from __future__ import annotations

from typing import Any

import torch

from paged.errors import UnsupportedError

# Arguments of FlashAttention 2 to 4 and of vLLM's fork that would change the result, and the value that does not.
_NEUTRAL: dict[str, Any] = {
    "attention_chunk": 0,
    "aux_tensor_leading_dims": None,
    "aux_tensors": None,
    "block_sparse_tensors": None,
    "cache_leftpad": None,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
    "cp_world_size": 1,
    "cu_seqlens_k_new": None,
    "cu_seqlens_q": None,
    "dropout_p": 0.0,
    "dynamic_causal": None,
    "gather_kv_indices": None,
    "gather_kv_valid_length": None,
    "mask_mod": None,
    "max_seqlen_q": None,
    "output_scale": None,
    "q_descale": None,
    "q_v": None,
    "qv": None,
    "return_attn_probs": False,
    "rotary_seqlens": None,
    "seqused_q": None,
}
# Those that say how to compute it, not what.
_HINTS = {"deterministic", "fa_version", "num_splits", "pack_gqa", "scheduler_metadata", "sm_margin"}


def refuse(function: str, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError by name for the first argument that `function` cannot honour; hints pass."""
    for name, value in arguments.items():
        if name in _HINTS:
            continue
        if name not in _NEUTRAL:
            raise UnsupportedError(f"{name}: {function} has no such argument here")
        if isinstance(value, torch.Tensor) or value != _NEUTRAL[name]:
            raise UnsupportedError(f"{name}: {function} here takes only {_NEUTRAL[name]}")


def one_for_all_sequences(name: str, values: torch.Tensor | None) -> torch.Tensor | None:
    """The row of [num_seqs, num_heads] that stands for every sequence; what has fewer dimensions stays as it is.

    Raises:
        UnsupportedError: the rows are not one in memory, so that they may differ.
    """
    if values is None or values.dim() < 2:
        return values
    if values.shape[0] != 1 and values.stride(0) != 0:
        raise UnsupportedError(
            f"{name}: shape {list(values.shape)}, expected the same row, expanded, for each sequence"
        )
    return values[0]
