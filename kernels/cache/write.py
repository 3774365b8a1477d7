"""Arguments, checks and device functions that all writes of keys and values to the paged cache share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_cache,
    check_last_dim_contiguous,
    check_scale,
    check_table_scale,
    check_tensor,
    check_writable,
    scale_strides,
)
from ..core.compat import tl, triton
from ..core.custom_ops import Arguments
from ..core.dtypes import (
    KV_KINDS,
    cast_to_cache,
    encode_int4,
    encode_nvfp4,
    has_native_e4m3,
    kv_kind,
    load_inverse_scale,
    store_row_scales,
)
from ..core.errors import InvalidInputError
from ..core.ids import Ids
from ..core.launch import strides


def _split_scales(arguments: Arguments) -> None:
    """Move scales that are written with their rows to the op's arguments that are written."""
    for prefix in ("k", "v"):
        if kv_kind(arguments[f"{prefix}_cache"].dtype).has_scales:
            arguments[f"{prefix}_scale_cache"] = arguments.pop(f"{prefix}_scale", None)


def _join_scales(arguments: Arguments) -> None:
    """Undo `_split_scales`."""
    for name in ("k_scale", "v_scale"):
        scale = arguments.pop(f"{name}_cache", None)
        if scale is not None:
            arguments[name] = scale


WRITES_SCALES: dict[str, Any] = {
    "arguments": {name: f"Tensor? {name}=None, Tensor? {name}_cache=None" for name in ("k_scale", "v_scale")},
    "encode": _split_scales,
    "decode": _join_scales,
}
"""Arguments of `operation`: it declares scales of rows as written, and only these."""
SCALE_CACHES = ("k_scale_cache", "v_scale_cache")


class CacheWrite(NamedTuple):
    """Arguments of `reshape_and_cache`: keys, values, the caches and their slots."""

    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_table_scale: torch.Tensor | None = None
    v_table_scale: torch.Tensor | None = None

    def check(self, k_name: str = "key", v_name: str = "value") -> None:
        """Raise InvalidInputError unless all arguments fit together. Messages name the caller's arguments."""
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_table_scale, v_table_scale = self
        check_tensor(k_name, key, ("num_tokens", "num_kv_heads", "head_dim"), FLOAT_DTYPES)
        check_tensor(v_name, value, (*key.shape[:2], "v_head_dim"), (key.dtype,), key.device)
        num_tokens, num_kv_heads, head_dim = key.shape
        cache_shape, cache_dtypes = ("num_blocks", "block_size", num_kv_heads), (*FLOAT_DTYPES, *KV_KINDS)
        check_cache("k_cache", k_cache, cache_shape, head_dim, cache_dtypes, key.device)
        check_cache("v_cache", v_cache, k_cache.shape[:3], value.shape[2], cache_dtypes, key.device)
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), key.device)
        for name, tensor in ((k_name, key), (v_name, value), ("k_cache", k_cache), ("v_cache", v_cache)):
            check_last_dim_contiguous(name, tensor)
        if k_cache.shape[1] == 0:
            raise InvalidInputError("k_cache: block_size 0, expected at least 1")
        for prefix, cache, scale, table_scale in (
            ("k", k_cache, k_scale, k_table_scale),
            ("v", v_cache, v_scale, v_table_scale),
        ):
            check_scale(f"{prefix}_scale", scale, cache)
            check_table_scale(f"{prefix}_table_scale", table_scale, cache)
            check_writable(f"{prefix}_cache", cache)
            if scale is not None and kv_kind(cache.dtype).has_scales:
                check_writable(f"{prefix}_scale", scale)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a writing kernel that are not tensors."""
        return {
            **strides("block slot head", k_cache=self.k_cache, v_cache=self.v_cache),
            **scale_strides(k_scale=self.k_scale, v_scale=self.v_scale),
            "KV_BLOCK_SIZE": self.k_cache.shape[1],
            "K_KIND": kv_kind(self.k_cache.dtype).name,
            "V_KIND": kv_kind(self.v_cache.dtype).name,
            "NATIVE_FP8": has_native_e4m3(self.key.device),
        }


def slots_of(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> Ids:
    """Return slots as ids to check. Negative slots are valid, because they are skipped."""
    num_blocks, block_size = k_cache.shape[:2]
    return Ids("slot_mapping", slot_mapping, None, num_blocks * block_size - 1)


@triton.jit
def slot_offset(slot, stride_block, stride_slot, KV_BLOCK_SIZE: tl.constexpr):
    """Elements from the start of a cache to its slot; `slot` is int64, so that no product overflows."""
    return slot // KV_BLOCK_SIZE * stride_block + slot % KV_BLOCK_SIZE * stride_slot


@triton.jit
def scale_pointers(
    scale_ptr, slots, heads, stride_block, stride_slot, stride_head, KV_BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr
):
    """Pointers to the scales of `heads`, or of their rows in `slots` if the cache holds them; None without scales."""
    pointers = None
    if KIND == "int8" or KIND == "e4m3_rows" or KIND == "int4" or KIND == "nvfp4":
        pointers = scale_ptr + slot_offset(slots, stride_block, stride_slot, KV_BLOCK_SIZE) + heads * stride_head
    elif scale_ptr is not None:
        pointers = scale_ptr + heads * stride_head
    return pointers


@triton.jit
def inverse_scales(x, scale_ptrs, row_mask, mask, KIND: tl.constexpr):
    """The factor that rows x [rows, dims] are multiplied by before they are stored, [rows, 1], or None.

    With int8 and e4m3_rows, each row gets its own scale, which is stored here.
    """
    if KIND == "int8" or KIND == "e4m3_rows":
        x = tl.where(mask, x.to(tl.float32), 0.0)
        largest, not_finite = tl.max(tl.abs(x), axis=1), tl.sum(x * 0.0, axis=1)
        inverse = store_row_scales(scale_ptrs, largest[:, None], not_finite[:, None], row_mask, KIND)
    else:
        inverse = load_inverse_scale(scale_ptrs, row_mask)
    return inverse


@triton.jit
def store_rows(
    x,  # [rows, dims]
    row_ptrs,  # [rows, 1], the first element of each row
    scale_ptrs,  # [rows, 1], the first scale of each row, or None
    table_scale_ptr,  # one value for all rows, or None
    row_mask,
    WIDTH: tl.constexpr,  # dims that exist
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Store rows in a cache."""
    DIM: tl.constexpr = x.shape[1]
    dims = tl.arange(0, DIM)[None, :]
    mask = row_mask & (dims < WIDTH)
    if KIND == "int4" or KIND == "nvfp4":
        wide = tl.where(mask, x.to(tl.float32), 0.0)
        if KIND == "int4":
            packed = encode_int4(wide, scale_ptrs, row_mask, WIDTH)
        else:
            inverse = None
            if table_scale_ptr is not None:
                inverse = 1.0 / tl.load(table_scale_ptr)
            packed = encode_nvfp4(wide, scale_ptrs, inverse, row_mask, WIDTH, NATIVE_FP8)
        pairs = tl.arange(0, DIM // 2)[None, :]
        tl.store(row_ptrs + pairs, packed, mask=row_mask & (pairs < WIDTH // 2))
    else:
        inverse = inverse_scales(x, scale_ptrs, row_mask, mask, KIND)
        tl.store(row_ptrs + dims, cast_to_cache(x, inverse, row_ptrs.dtype.element_ty, KIND, NATIVE_FP8), mask=mask)
