"""vLLM's cache write and fused experts on the operations here, with the arguments of its version 0.33."""

from __future__ import annotations

from typing import Any

import torch

from paged.errors import UnsupportedError
from paged.kernels.fused_moe import fused_moe
from paged.kernels.reshape_and_cache import reshape_and_cache

PLAIN_CACHES = ("auto", "float16", "bfloat16")
E4M3_CACHES = ("fp8", "fp8_e4m3")
# vLLM's names of gpt-oss's activation: rows of w1 that alternate, or all gate rows first.
_SWIGLU = {"swigluoai": True, "swigluoai_uninterleave": False}


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """`vllm._custom_ops.reshape_and_cache_flash`: `reshape_and_cache` of the first len(slot_mapping) rows.

    Args:
        key, value: [at least num_tokens, num_kv_heads, head_dim]; rows beyond num_tokens are padding.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; uint8 stands for e4m3.
        slot_mapping: int64 [num_tokens], negative to skip.
        kv_cache_dtype: "auto", "float16" and "bfloat16" store values as they are, whatever the scales; "fp8" and
            "fp8_e4m3" divide them by their scales.
        k_scale, v_scale: float32, one value or [num_kv_heads].

    Raises:
        UnsupportedError: another kv_cache_dtype.
        InvalidInputError: as in `reshape_and_cache`.
    """
    if kv_cache_dtype not in PLAIN_CACHES + E4M3_CACHES:
        known = ", ".join(map(repr, PLAIN_CACHES + E4M3_CACHES))
        raise UnsupportedError(f"kv_cache_dtype: {kv_cache_dtype!r}, known are {known}")
    if kv_cache_dtype in PLAIN_CACHES:
        k_scale = v_scale = None
    elif key_cache.dtype == torch.uint8:
        key_cache, value_cache = (cache.view(torch.float8_e4m3fn) for cache in (key_cache, value_cache))
    num_tokens = slot_mapping.shape[0]
    reshape_and_cache(
        key[:num_tokens],
        value[:num_tokens],
        key_cache,
        value_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    quant_config: Any = None,
    *,
    inplace: bool = False,
) -> torch.Tensor:
    """`vllm...fused_moe.fused_experts`: `fused_moe` with the router's weights and ids of any float and integer dtype.

    Args:
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" (w1's gate and up rows alternate) or
            "swigluoai_uninterleave", or the member of vLLM's enumeration with that value.
        global_num_experts: experts that expert_map speaks of; its length says so.
        quant_config: None, or vLLM's configuration of weights that are not quantised, whose biases are taken.
        inplace: the result goes to hidden_states.

    Raises:
        UnsupportedError: another activation, router weights on the input, or quantised experts.
        InvalidInputError: as in `fused_moe`.
    """
    if apply_router_weight_on_input:
        raise UnsupportedError("apply_router_weight_on_input: True, router weights multiply the results here")
    for name in ("quant_dtype", "weight_quant_dtype"):
        if (value := getattr(quant_config, name, None)) is not None:
            raise UnsupportedError(f"quant_config: its {name} is {value}, expected None")
    activation = getattr(activation, "value", activation)
    return fused_moe(
        hidden_states,
        w1,
        w2,
        topk_weights.float().contiguous(),
        topk_ids.to(torch.int32).contiguous(),
        activation="swiglu_oai" if activation in _SWIGLU else activation,
        interleaved=_SWIGLU.get(activation, False),
        w1_bias=getattr(quant_config, "w1_bias", None),
        w2_bias=getattr(quant_config, "w2_bias", None),
        expert_map=expert_map,
        out=hidden_states if inplace else None,
    )
