"""Write new keys and values to their slots in the paged cache."""

from __future__ import annotations

import torch

from paged.kernels.cache.ops import ops
from paged.kernels.cache.torch_ops import reshape_and_cache as torch_op
from paged.kernels.common.backend import use_triton
from paged.kernels.common.checks import (
    CACHE_DTYPES,
    FLOAT_DTYPES,
    check_dtype,
    check_last_dim_contiguous,
    check_scale,
    check_shape,
    check_tensor,
    check_writable,
    refuse_gradients,
    scale_stride,
)
from paged.kernels.common.compat import tl, triton
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.fp8 import as_kernel_argument, has_native_e4m3, scaled_cast
from paged.kernels.common.grid import num_warps, tile
from paged.kernels.common.id_checks import Ids, check_all_ids


@triton.jit
def slot_offset(slot, stride_block, stride_slot, KV_BLOCK_SIZE: tl.constexpr):
    """Elements between the start of a cache and its slot; `slot` is int64, so that no product overflows."""
    return slot // KV_BLOCK_SIZE * stride_block + slot % KV_BLOCK_SIZE * stride_slot


@triton.jit
def load_inverse_scale(scale_ptr, heads, stride_head, mask):
    """1 / scale of `heads`; None where there is no scale. The correctly rounded division spills on sm_100."""
    inverse = None
    if scale_ptr is not None:
        inverse = 1.0 / tl.load(scale_ptr + heads * stride_head, mask=mask, other=1.0)
    return inverse


@triton.jit
def _reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    value_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_HEADS, HEAD_DIM]
    v_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_HEADS, HEAD_DIM]
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    k_scale_ptr,  # float32, one value or [NUM_HEADS], or None
    v_scale_ptr,  # float32, one value or [NUM_HEADS], or None
    num_tokens,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_k_cache_block,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_block,
    stride_v_cache_slot,
    stride_v_cache_head,
    stride_k_scale_head,  # 0 where one scale serves all heads
    stride_v_scale_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One program copies BLOCK_ROWS rows, a row being one head of one token."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = (rows // NUM_HEADS)[:, None], (rows % NUM_HEADS)[:, None]
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (slots >= 0) & (dims < HEAD_DIM)
    key = tl.load(key_ptr + tokens * stride_key_token + heads * stride_key_head + dims, mask=mask)
    value = tl.load(value_ptr + tokens * stride_value_token + heads * stride_value_head + dims, mask=mask)
    k_offsets = slot_offset(slots, stride_k_cache_block, stride_k_cache_slot, KV_BLOCK_SIZE)
    v_offsets = slot_offset(slots, stride_v_cache_block, stride_v_cache_slot, KV_BLOCK_SIZE)
    k_ptrs = k_cache_ptr + k_offsets + heads * stride_k_cache_head + dims
    v_ptrs = v_cache_ptr + v_offsets + heads * stride_v_cache_head + dims
    k_inverse = load_inverse_scale(k_scale_ptr, heads, stride_k_scale_head, slots >= 0)
    v_inverse = load_inverse_scale(v_scale_ptr, heads, stride_v_scale_head, slots >= 0)
    tl.store(k_ptrs, scaled_cast(key, k_inverse, k_cache_ptr.dtype.element_ty, NATIVE_FP8), mask=mask)
    tl.store(v_ptrs, scaled_cast(value, v_inverse, v_cache_ptr.dtype.element_ty, NATIVE_FP8), mask=mask)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write row t of key and value, divided by their scales, to slot slot_mapping[t] of the caches, in their dtype.

    Values round to nearest, ties to even; e4m3 has no infinity, so what lies beyond 448 is stored as 448. The division
    is a product with the reciprocal in float32.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], one dtype (float32, float16, bfloat16 or
            float8_e4m3fn), any strides with the last dimension contiguous.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset inside the caches; negative skips the token.
            Slots are distinct.
        k_scale, v_scale: what a stored value is multiplied by when it is read: float32, above 0, [] or [1] for all
            heads, or [num_kv_heads]. None stands for 1.

    Raises:
        InvalidInputError: shapes, dtypes, devices or strides do not fit, or a slot lies beyond the caches; on a GPU,
            where slots are trusted, the last only with PAGED_CHECK=1.
        UnsupportedError: a gradient is asked for.
    """
    refuse_gradients("reshape_and_cache", key, value, k_cache, v_cache, k_scale, v_scale)
    if torch.compiler.is_dynamo_compiling():
        ops.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    check_cache_write("key", key, "value", value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if not use_triton(key):
        torch_op.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return
    check_all_ids("reshape_and_cache", slots_of(slot_mapping, k_cache), by_triton=True)
    if key.numel() == 0:
        return
    num_tokens, num_heads, head_dim = key.shape
    block_rows, block_dim = tile(num_tokens * num_heads, head_dim)
    _reshape_and_cache_kernel[(triton.cdiv(num_tokens * num_heads, block_rows),)](
        key_ptr=key,
        value_ptr=value,
        k_cache_ptr=as_kernel_argument(k_cache),
        v_cache_ptr=as_kernel_argument(v_cache),
        slot_mapping_ptr=slot_mapping.contiguous(),
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        num_tokens=num_tokens,
        stride_key_token=key.stride(0),
        stride_key_head=key.stride(1),
        stride_value_token=value.stride(0),
        stride_value_head=value.stride(1),
        stride_k_cache_block=k_cache.stride(0),
        stride_k_cache_slot=k_cache.stride(1),
        stride_k_cache_head=k_cache.stride(2),
        stride_v_cache_block=v_cache.stride(0),
        stride_v_cache_slot=v_cache.stride(1),
        stride_v_cache_head=v_cache.stride(2),
        stride_k_scale_head=scale_stride(k_scale),
        stride_v_scale_head=scale_stride(v_scale),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        KV_BLOCK_SIZE=k_cache.shape[1],
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        NATIVE_FP8=has_native_e4m3(key.device),
        num_warps=num_warps(2 * block_rows * block_dim),
    )


def check_cache_write(
    k_name: str,
    key: torch.Tensor,
    v_name: str,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Checks of every operation that writes keys and values to the caches; the names are those of its arguments."""
    check_shape(k_name, key, ("num_tokens", "num_kv_heads", "head_dim"))
    check_dtype(k_name, key, *FLOAT_DTYPES)
    check_tensor(v_name, value, key.shape, (key.dtype,), key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    check_tensor("k_cache", k_cache, ("num_blocks", "block_size", num_kv_heads, head_dim), CACHE_DTYPES, key.device)
    check_tensor("v_cache", v_cache, k_cache.shape, (k_cache.dtype,), key.device)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), key.device)
    for name, tensor in ((k_name, key), (v_name, value), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_dim_contiguous(name, tensor)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, num_kv_heads, key.device)
    if k_cache.shape[1] == 0:
        raise InvalidInputError("k_cache: block_size 0, expected at least 1")
    check_writable("k_cache", k_cache)
    check_writable("v_cache", v_cache)


def slots_of(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> Ids:
    """What slots must be: those of a cache, or negative."""
    return Ids("slot_mapping", slot_mapping, None, k_cache.shape[0] * k_cache.shape[1] - 1)
