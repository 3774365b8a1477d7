"""Cache write and fused experts with the arguments of vLLM 0.33, on this project's operations."""

from __future__ import annotations

from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import as_flag
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.checks import check_is_tensor, refuse_gradients
from paged.kernels.core.errors import arguments_named, as_int, shown
from paged.kernels.moe.fused_moe import fused_moe

PLAIN_CACHES = ("auto", "float16", "bfloat16")
E4M3_CACHES = ("fp8", "fp8_e4m3")
# vLLM's names for gpt-oss's activation, and whether gate and up rows of w1 alternate.
_SWIGLU = {"swigluoai": True, "swigluoai_uninterleave": False}
# vLLM's "relu2" has gates, while this project's "relu2" has none.
_OWN_NAMES = {"relu2_no_mul": "relu2", "relu2": "relu2 with gates"}
# Attributes that identify vLLM's configuration of quantised experts.
_QUANT_CONFIG = ("quant_dtype", "weight_quant_dtype", "w1_bias", "w2_bias")
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


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
    """Write new K and V to the cache, like `vllm._custom_ops.reshape_and_cache_flash`.

    Args:
        key, value: [num_tokens or more, num_kv_heads, head_dim]; rows beyond num_tokens are padding.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; uint8 means e4m3.
        slot_mapping: int64 [num_tokens]; a negative slot skips the token.
        kv_cache_dtype: "auto", "float16" and "bfloat16" store values unchanged and ignore the scales; "fp8" and
            "fp8_e4m3" divide values by their scales.
        k_scale, v_scale: float32, one value or [num_kv_heads].

    Raises:
        UnsupportedError: another kv_cache_dtype is given, or a tensor requires a gradient.
        InvalidInputError: see `reshape_and_cache`.
    """
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in PLAIN_CACHES + E4M3_CACHES:
        known = ", ".join(map(repr, PLAIN_CACHES + E4M3_CACHES))
        raise UnsupportedError(f"kv_cache_dtype: {shown(kv_cache_dtype)}, known are {known}")
    arguments = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    _check("reshape_and_cache_flash", {**arguments, "slot_mapping": slot_mapping}, k_scale=k_scale, v_scale=v_scale)
    if slot_mapping.dim() != 1:
        raise InvalidInputError(f"slot_mapping: shape {list(slot_mapping.shape)}, expected [num_tokens]")
    if kv_cache_dtype in PLAIN_CACHES:
        k_scale = v_scale = None
    elif key_cache.dtype == value_cache.dtype == torch.uint8:
        key_cache = key_cache.view(torch.float8_e4m3fn)
        value_cache = value_cache.view(torch.float8_e4m3fn)
    num_tokens = slot_mapping.shape[0]
    if key.dim():
        key = key[:num_tokens]
    if value.dim():
        value = value[:num_tokens]
    with arguments_named(k_cache="key_cache", v_cache="value_cache"):
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


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
    """Run `fused_moe` with the arguments of vLLM's `fused_experts`.

    Args:
        topk_weights, topk_ids: as in `fused_moe`, with any float and integer dtype.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" (w1's gate and up rows alternate),
            "swigluoai_uninterleave" or "relu2_no_mul", or the member of vLLM's enumeration with that value.
        global_num_experts: length of expert_map, or of w1 without one; -1 for either.
        quant_config: None, or vLLM's configuration of plain weights, whose biases are used.
        inplace: whether to write the result to hidden_states.

    Raises:
        UnsupportedError: another activation, router weights applied to the input, quantised experts, or a tensor that
            requires a gradient.
        InvalidInputError: see `fused_moe`.
    """
    arguments = {"hidden_states": hidden_states, "w1": w1, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    _check("fused_experts", arguments, expert_map=expert_map)
    if as_flag("apply_router_weight_on_input", apply_router_weight_on_input):
        raise UnsupportedError("apply_router_weight_on_input: True, fused_experts here takes only None, False or 0")
    num_experts = as_int("global_num_experts", global_num_experts, low=-1)
    known = w1.shape[:1]
    if expert_map is not None:
        known = expert_map.shape[:1]
    if num_experts not in (-1, *known):
        raise InvalidInputError(f"global_num_experts: {num_experts}, expected -1 or {list(known)}")
    if topk_ids.dtype not in _INTEGERS:
        raise InvalidInputError(f"topk_ids: dtype {topk_ids.dtype}, expected an integer dtype")
    if topk_ids.dtype == torch.int64:  # clamp, so that ids beyond int32 stay invalid
        topk_ids = topk_ids.clamp(-1, torch.iinfo(torch.int32).max)
    if quant_config is not None and not any(hasattr(quant_config, name) for name in _QUANT_CONFIG):
        raise UnsupportedError(f"quant_config: {shown(quant_config)}, expected None or vLLM's")
    for name in ("quant_dtype", "weight_quant_dtype"):
        if (value := getattr(quant_config, name, None)) is not None:
            raise UnsupportedError(f"quant_config: its {name} is {value}, expected None")
    activation = getattr(activation, "value", activation)
    if not isinstance(activation, str):
        raise UnsupportedError(f"activation: {shown(activation)}, expected a name")
    interleaved = _SWIGLU.get(activation, False)
    if activation in _SWIGLU:
        activation = "swiglu_oai"
    out = None
    if as_flag("inplace", inplace):
        out = hidden_states
    return fused_moe(
        hidden_states,
        w1,
        w2,
        topk_weights.float().contiguous(),
        topk_ids.to(torch.int32).contiguous(),
        activation=_OWN_NAMES.get(activation, activation),
        interleaved=interleaved,
        w1_bias=getattr(quant_config, "w1_bias", None),
        w2_bias=getattr(quant_config, "w2_bias", None),
        expert_map=expert_map,
        out=out,
    )


def _check(function: str, required: dict[str, torch.Tensor], **optional: torch.Tensor | None) -> None:
    for name, tensor in (required | optional).items():
        if name in required or tensor is not None:
            check_is_tensor(name, tensor)
            refuse_gradients(f"{name}: requires a gradient, {function} here", tensor)
