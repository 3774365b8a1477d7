"""Write new keys and values to their slots in the paged cache."""

from __future__ import annotations

import torch

from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import as_kernel_argument, scale_argument
from ..core.ids import check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, num_warps, strides, tile, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .write import SCALE_CACHES, WRITES_SCALES, CacheWrite, scale_pointers, slot_offset, slots_of, store_rows


@triton.jit(do_not_specialize=["num_tokens"])
def _reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    value_ptr,  # [num_tokens, NUM_HEADS, V_HEAD_DIM]
    k_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_HEADS, HEAD_DIM], HEAD_DIM / 2 bytes a row with two numbers a byte
    v_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_HEADS, V_HEAD_DIM], as k_cache_ptr
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    # float32, one value or [NUM_HEADS], or None; for caches with scales see `KvKind.scales_shape`
    k_scale_ptr,
    v_scale_ptr,  # as k_scale_ptr
    k_table_scale_ptr,  # float32 [1], or None
    v_table_scale_ptr,
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
    stride_k_scale_block,  # 0 unless every row has a scale
    stride_k_scale_slot,
    stride_k_scale_head,  # 0 if all heads share one scale
    stride_v_scale_block,
    stride_v_scale_slot,
    stride_v_scale_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # at least HEAD_DIM and V_HEAD_DIM
    K_KIND: tl.constexpr,  # name of a `KvKind`
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Copy BLOCK_ROWS rows a program. A row is one head of one token."""
    wait_for_inputs()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = (rows // NUM_HEADS)[:, None], (rows % NUM_HEADS)[:, None]
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    k_mask = (slots >= 0) & (dims < HEAD_DIM)
    v_mask = (slots >= 0) & (dims < V_HEAD_DIM)
    key = tl.load(key_ptr + tokens * stride_key_token + heads * stride_key_head + dims, mask=k_mask)
    value = tl.load(value_ptr + tokens * stride_value_token + heads * stride_value_head + dims, mask=v_mask)
    k_offsets = slot_offset(slots, stride_k_cache_block, stride_k_cache_slot, KV_BLOCK_SIZE)
    v_offsets = slot_offset(slots, stride_v_cache_block, stride_v_cache_slot, KV_BLOCK_SIZE)
    k_ptrs = k_cache_ptr + k_offsets + heads * stride_k_cache_head
    v_ptrs = v_cache_ptr + v_offsets + heads * stride_v_cache_head
    k_scale_ptrs = scale_pointers(
        k_scale_ptr, slots, heads, stride_k_scale_block, stride_k_scale_slot, stride_k_scale_head, KV_BLOCK_SIZE, K_KIND
    )
    v_scale_ptrs = scale_pointers(
        v_scale_ptr, slots, heads, stride_v_scale_block, stride_v_scale_slot, stride_v_scale_head, KV_BLOCK_SIZE, V_KIND
    )
    store_rows(key, k_ptrs, k_scale_ptrs, k_table_scale_ptr, slots >= 0, HEAD_DIM, K_KIND, NATIVE_FP8)
    store_rows(value, v_ptrs, v_scale_ptrs, v_table_scale_ptr, slots >= 0, V_HEAD_DIM, V_KIND, NATIVE_FP8)


@operation(mutates=("k_cache", "v_cache", *SCALE_CACHES), **WRITES_SCALES)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
) -> Run[None]:
    """Write row t of key and value to slot slot_mapping[t] of the caches, in the caches' dtype.

    Rows are divided by their scales, as float32 products with the reciprocal. Values round to nearest, ties to even. In
    an 8-bit float cache, larger values, infinity included, are stored as the largest number: 448 for e4m3fn, 57344 for
    e5m2.

    In an int8 cache each row (one head of one token) gets its own scale: its largest magnitude / 127, or NaN if the row
    holds NaN or infinity. Magnitudes below 2^-100 may read back smaller. So does it in a `torch.bits8` cache, which
    holds e4m3fn codes: its largest magnitude / 448.

    In an int4 cache 32 numbers of a row share a scale: their number of largest magnitude / -8, rounded towards 0, or
    NaN if one of them is NaN or infinite. A number is (nibble - 8) * scale. Number 2i is in the low bits of element i,
    number 2i + 1 in the high bits.

    An NVFP4 cache holds e2m1 numbers in this order. Rows are divided by the table scale, and 16 numbers share an e4m3fn
    scale: their largest magnitude / 6, at most 448, or NaN. Below 2^-10 the scale and its numbers become 0.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous. Their
            head_dim may differ.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of key and value, both float32, float16,
            bfloat16, float8_e4m3fn, float8_e5m2, int8 or bits8; any strides with the last dimension contiguous. int4
            caches are `torch.bits4x2` [..., head_dim / 2], NVFP4 caches `torch.float4_e2m1fn_x2` likewise; head_dim is
            even. Their dtypes may differ.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; negative to skip the token. Slots are
            distinct.
        k_scale, v_scale: a stored value times its scale is the original value. float32, above 0: [] or [1] for all
            heads, or [num_kv_heads]; None for 1. With int8 and bits8 they are required and written: float32
            [num_blocks, block_size, num_kv_heads], any strides. So they are with int4: bfloat16 [num_blocks,
            block_size, num_kv_heads, head_dim / 32], rounded up, last dimension contiguous; with NVFP4: float8_e4m3fn
            [..., head_dim / 16].
        k_table_scale, v_table_scale: float32 [] or [1], above 0, for NVFP4 caches only; None for 1. The largest
            magnitude / 2688 lets the scales of groups span all e4m3 numbers.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a slot lies beyond the caches. On a GPU
            slots are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    write = CacheWrite(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_table_scale, v_table_scale)
    write.check()
    by_triton = use_triton(key)
    checks = by_triton and checks_ids(key)
    launch: Compute | None = None
    if by_triton and key.numel() + value.numel() == 0:
        launch = nothing
    elif by_triton:
        launch = launch_for(write)
    elif takes_numba(key, value):
        from ..cpu.cache import reshape_and_cache as numba_write

        launch = numba_write.launch_for(write)
    if launch is None:
        return definition.write

    def run(
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
    ) -> None:
        if checks:
            check_all_ids("reshape_and_cache", slots_of(slot_mapping, k_cache), by_triton=True)
        tensors = {
            "key_ptr": key,
            "value_ptr": value,
            "k_cache_ptr": as_kernel_argument(k_cache),
            "v_cache_ptr": as_kernel_argument(v_cache),
            "slot_mapping_ptr": slot_mapping.contiguous(),
            "k_scale_ptr": scale_argument(k_scale),
            "v_scale_ptr": scale_argument(v_scale),
            "k_table_scale_ptr": k_table_scale,
            "v_table_scale_ptr": v_table_scale,
        }
        if launch(tensors):  # the numba kernel has found a slot out of range
            check_all_ids("reshape_and_cache", slots_of(slot_mapping, k_cache), by_triton=False)

    return run


def launch_for(write: CacheWrite) -> Launch:
    """Return the launch of the kernel for writes like this one."""
    num_tokens, num_heads, head_dim = write.key.shape
    v_head_dim = write.value.shape[2]
    block_rows, block_dim = tile(num_tokens * num_heads, max(head_dim, v_head_dim))
    return Launch(
        _reshape_and_cache_kernel,
        (triton.cdiv(num_tokens * num_heads, block_rows),),
        {
            **write.arguments(),
            "num_tokens": num_tokens,
            **strides("token head", key=write.key, value=write.value),
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_ROWS": block_rows,
            "BLOCK_DIM": block_dim,
        },
        num_warps=num_warps(2 * block_rows * block_dim),
    )
