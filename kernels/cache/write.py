"""Keys and values on their way into the paged cache: the arguments, checks and device functions of every writer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paged.kernels.common.checks import (
    CACHE_DTYPES,
    FLOAT_DTYPES,
    check_last_dim_contiguous,
    check_scale,
    check_tensor,
    check_writable,
    scale_stride,
)
from paged.kernels.common.compat import tl, triton
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.fp8 import as_kernel_argument, has_native_e4m3
from paged.kernels.common.id_checks import Ids
from paged.kernels.common.launch import strides


class CacheWrite(NamedTuple):
    """Keys and values, the caches, and where in them they go; see `reshape_and_cache`."""

    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def check(self, k_name: str = "key", v_name: str = "value") -> None:
        """Raise InvalidInputError unless all of it fits together; the names are those of the caller's arguments."""
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale = self
        check_tensor(k_name, key, ("num_tokens", "num_kv_heads", "head_dim"), FLOAT_DTYPES)
        check_tensor(v_name, value, (*key.shape[:2], "v_head_dim"), (key.dtype,), key.device)
        num_tokens, num_kv_heads, head_dim = key.shape
        check_tensor("k_cache", k_cache, ("num_blocks", "block_size", num_kv_heads, head_dim), CACHE_DTYPES, key.device)
        check_tensor("v_cache", v_cache, (*k_cache.shape[:3], value.shape[2]), (k_cache.dtype,), key.device)
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), key.device)
        for name, tensor in ((k_name, key), (v_name, value), ("k_cache", k_cache), ("v_cache", v_cache)):
            check_last_dim_contiguous(name, tensor)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_scale(name, scale, num_kv_heads, key.device)
        if k_cache.shape[1] == 0:
            raise InvalidInputError("k_cache: block_size 0, expected at least 1")
        check_writable("k_cache", k_cache)
        check_writable("v_cache", v_cache)

    @property
    def slots(self) -> Ids:
        """What slots must be: those of a cache, or negative."""
        num_blocks, block_size = self.k_cache.shape[:2]
        return Ids("slot_mapping", self.slot_mapping, None, num_blocks * block_size - 1)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors that a kernel takes which writes: all that concerns the caches."""
        return {
            "k_cache_ptr": as_kernel_argument(self.k_cache),
            "v_cache_ptr": as_kernel_argument(self.v_cache),
            "slot_mapping_ptr": self.slot_mapping.contiguous(),
            "k_scale_ptr": self.k_scale,
            "v_scale_ptr": self.v_scale,
        }

    def arguments(self) -> dict[str, Any]:
        """The other arguments of such a kernel."""
        return {
            **strides("block slot head", k_cache=self.k_cache, v_cache=self.v_cache),
            "stride_k_scale_head": scale_stride(self.k_scale),
            "stride_v_scale_head": scale_stride(self.v_scale),
            "KV_BLOCK_SIZE": self.k_cache.shape[1],
            "NATIVE_FP8": has_native_e4m3(self.key.device),
        }


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
