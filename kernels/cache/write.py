"""Shared by all operations that write keys and values to the paged cache: arguments, checks and device functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..common.cache_kinds import cache_kind, load_inverse_scale, store_row_scales
from ..common.checks import (
    CACHE_DTYPES,
    FLOAT_DTYPES,
    check_last_dim_contiguous,
    check_scale,
    check_tensor,
    check_writable,
    scale_strides,
)
from ..common.compat import tl, triton
from ..common.errors import InvalidInputError
from ..common.fp8 import has_native_e4m3
from ..common.id_checks import Ids
from ..common.launch import strides
from ..common.operation import Arguments


def _split_scales(arguments: Arguments) -> None:
    """Move the scales of int8 to the op's arguments that are written."""
    if arguments["k_cache"].dtype == torch.int8:
        for name in ("k_scale", "v_scale"):
            arguments[f"{name}_cache"] = arguments.pop(name, None)


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
"""For `operation`: scales of int8 are written, and what is only read must not look as if it were."""
SCALE_CACHES = ("k_scale_cache", "v_scale_cache")


class CacheWrite(NamedTuple):
    """Keys, values, the caches and their slots; see `reshape_and_cache`."""

    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def check(self, k_name: str = "key", v_name: str = "value") -> None:
        """Raise InvalidInputError unless everything fits together; the names are those of the caller's arguments."""
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale = self
        check_tensor(k_name, key, ("num_tokens", "num_kv_heads", "head_dim"), FLOAT_DTYPES)
        check_tensor(v_name, value, (*key.shape[:2], "v_head_dim"), (key.dtype,), key.device)
        num_tokens, num_kv_heads, head_dim = key.shape
        check_tensor("k_cache", k_cache, ("num_blocks", "block_size", num_kv_heads, head_dim), CACHE_DTYPES, key.device)
        check_tensor("v_cache", v_cache, (*k_cache.shape[:3], value.shape[2]), (k_cache.dtype,), key.device)
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), key.device)
        for name, tensor in ((k_name, key), (v_name, value), ("k_cache", k_cache), ("v_cache", v_cache)):
            check_last_dim_contiguous(name, tensor)
        if k_cache.shape[1] == 0:
            raise InvalidInputError("k_cache: block_size 0, expected at least 1")
        for prefix, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
            check_scale(f"{prefix}_scale", scale, cache)
            check_writable(f"{prefix}_cache", cache)
            if scale is not None and cache.dtype == torch.int8:
                check_writable(f"{prefix}_scale", scale)

    def arguments(self) -> dict[str, Any]:
        """Return the other arguments of a writing kernel."""
        return {
            **strides("block slot head", k_cache=self.k_cache, v_cache=self.v_cache),
            **scale_strides(k_scale=self.k_scale, v_scale=self.v_scale),
            "KV_BLOCK_SIZE": self.k_cache.shape[1],
            "KIND": cache_kind(self.k_cache.dtype),
            "NATIVE_FP8": has_native_e4m3(self.key.device),
        }


def slots_of(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> Ids:
    """Return slots as ids to check: slots of the cache, or negative."""
    num_blocks, block_size = k_cache.shape[:2]
    return Ids("slot_mapping", slot_mapping, None, num_blocks * block_size - 1)


@triton.jit
def slot_offset(slot, stride_block, stride_slot, KV_BLOCK_SIZE: tl.constexpr):
    """Elements between the start of a cache and its slot; `slot` is int64, so that no product overflows."""
    return slot // KV_BLOCK_SIZE * stride_block + slot % KV_BLOCK_SIZE * stride_slot


@triton.jit
def scale_pointers(
    scale_ptr, slots, heads, stride_block, stride_slot, stride_head, KV_BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr
):
    """Where the scales of `heads` are, or with int8 those of their rows in `slots`; None where there are none."""
    pointers = None
    if KIND == "int8":
        pointers = scale_ptr + slot_offset(slots, stride_block, stride_slot, KV_BLOCK_SIZE) + heads * stride_head
    elif scale_ptr is not None:
        pointers = scale_ptr + heads * stride_head
    return pointers


@triton.jit
def inverse_scales(x, scale_ptrs, row_mask, mask, KIND: tl.constexpr):
    """What rows x [rows, dims] are multiplied by before they are stored, [rows, 1], or None; those of int8, which are
    their own, are stored here.
    """
    if KIND == "int8":
        x = tl.where(mask, x.to(tl.float32), 0.0)
        largest, not_finite = tl.max(tl.abs(x), axis=1), tl.sum(x * 0.0, axis=1)
        inverse = store_row_scales(scale_ptrs, largest[:, None], not_finite[:, None], row_mask)
    else:
        inverse = load_inverse_scale(scale_ptrs, row_mask)
    return inverse
