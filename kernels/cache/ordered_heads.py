"""Norm, rotation, Hadamard transform and write of heads whose elements stay in order.

The kernel of `qk_norm_rope_and_cache` holds the two halves of a rotated head apart. A Hadamard transform needs the
neighbours of an element, and so do caches with two numbers a byte. Here each element is loaded with its partner in the
rotation, which costs a second load of the same cache lines.
"""

from __future__ import annotations

import torch

from ..core.compat import tl, triton
from ..core.errors import InvalidInputError
from ..core.launch import Launch, strides, wait_for_inputs
from ..core.rotation import locate_token, rotation_launch
from .write import CacheWrite, scale_pointers, slot_offset, store_rows

# A transform of fewer elements leaves most of an outlier where it is.
SMALLEST_HADAMARD = 16


def hadamard_size(name: str, head_dim: int) -> int:
    """Return the elements that a Hadamard transform of a head mixes: the largest power of two that divides head_dim.

    Raises:
        InvalidInputError: head_dim is not a multiple of 16. name: argument that is named.
    """
    if head_dim % SMALLEST_HADAMARD:
        raise InvalidInputError(
            f"{name}: heads of {head_dim}, expected a multiple of {SMALLEST_HADAMARD} for a Hadamard transform"
        )
    return head_dim & -head_dim


@triton.jit
def _transform(x, STAGES: tl.constexpr):
    """Rows x [rows, dims] times Sylvester's matrix of size 2^STAGES, block by block.

    A stage replaces neighbours by sums and differences, and places a block's differences behind its sums. After STAGES
    stages each bit of an index has been the lowest once, and the order is the old one.
    """
    SIZE: tl.constexpr = 2**STAGES
    NUM_BLOCKS: tl.constexpr = x.shape[0] * x.shape[1] // SIZE
    blocks = x.reshape(NUM_BLOCKS, SIZE)
    for _ in tl.static_range(STAGES):
        a, b = tl.split(blocks.reshape(NUM_BLOCKS, SIZE // 2, 2))
        blocks = tl.permute(tl.join(a + b, a - b), (0, 2, 1)).reshape(NUM_BLOCKS, SIZE)
    return blocks.reshape(x.shape[0], x.shape[1])


@triton.jit
def _rotated_heads(
    x_ptrs,  # [heads, 1], the first element of each head of a token
    in_heads,  # [heads, 1], which of the heads exist
    weight_ptr,  # [HEAD_DIM], weight of the RMS norm before the rotation, or None
    cos_sin_ptr,  # [ROTARY_DIM], cosines and sines of the token's position
    signs_ptr,  # [HEAD_DIM], or None without a transform
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    HADAMARD_SCALE: tl.constexpr,
):
    """Some heads of a token after norm, rotation and transform, float32 [heads, BLOCK_DIM], 0 from HEAD_DIM on."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, BLOCK_DIM)
    in_head, is_rotated = dims < HEAD_DIM, dims < ROTARY_DIM
    if INTERLEAVED:
        pairs, partners, is_second = dims // 2, dims ^ 1, dims % 2 == 1
    else:
        is_second = dims >= HALF
        pairs = tl.where(is_second, dims - HALF, dims)
        partners = tl.where(is_second, dims - HALF, dims + HALF)
    x = tl.load(x_ptrs + dims[None, :], mask=in_heads & in_head[None, :], other=0.0).to(tl.float32)
    partner = tl.load(x_ptrs + partners[None, :], mask=in_heads & is_rotated[None, :], other=0.0).to(tl.float32)
    if weight_ptr is not None:
        root = tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x / root * tl.load(weight_ptr + dims, mask=in_head, other=0.0).to(tl.float32)[None, :]
        partner = partner / root * tl.load(weight_ptr + partners, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
    # In place, no warp may store before all warps have loaded.
    tl.debug_barrier()
    cos = tl.load(cos_sin_ptr + pairs, mask=is_rotated, other=1.0)
    sin = tl.load(cos_sin_ptr + HALF + pairs, mask=is_rotated, other=0.0)
    rotated = x * cos[None, :] + partner * tl.where(is_second, sin, -sin)[None, :]
    if signs_ptr is not None:
        signs = tl.load(signs_ptr + dims, mask=in_head, other=0.0) * HADAMARD_SCALE
        rotated = _transform(rotated * signs[None, :], STAGES)
    return rotated


@triton.jit
def _ordered_heads_kernel(
    q_ptr,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    k_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_tokens, NUM_KV_HEADS, V_HEAD_DIM]
    k_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], HEAD_DIM / 2 bytes with two numbers a byte
    v_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM], as k_cache_ptr
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    positions_ptr,  # int64 [num_tokens]
    cos_sin_cache_ptr,  # float32 [max_position, ROTARY_DIM]
    q_weight_ptr,  # [HEAD_DIM], or None
    k_weight_ptr,  # [HEAD_DIM], or None
    signs_ptr,  # float32 [HEAD_DIM], or None
    k_scale_ptr,  # as in `reshape_and_cache`
    v_scale_ptr,
    k_table_scale_ptr,  # float32 [1], or None
    v_table_scale_ptr,
    eps,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_cache_block,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_block,
    stride_v_cache_slot,
    stride_v_cache_head,
    stride_k_scale_block,
    stride_k_scale_slot,
    stride_k_scale_head,
    stride_v_scale_block,
    stride_v_scale_slot,
    stride_v_scale_head,
    stride_cos_sin_position,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    HADAMARD_SCALE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Process BLOCK_HEADS heads of a token: the first programs take the query, the others key and value."""
    wait_for_inputs()
    token, head_block, cos_sin_ptr, offs_head = locate_token(
        positions_ptr, cos_sin_cache_ptr, stride_cos_sin_position, BLOCK_HEADS
    )
    q_blocks: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if head_block < q_blocks:
        heads = (head_block * BLOCK_HEADS + offs_head)[:, None]
        in_heads = heads < NUM_Q_HEADS
        q_ptrs = q_ptr + token * stride_q_token + heads * stride_q_head
        query = _rotated_heads(
            q_ptrs, in_heads, q_weight_ptr, cos_sin_ptr, signs_ptr, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_DIM,
            STAGES, HADAMARD_SCALE,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        tl.store(q_ptrs + dims, query.to(q_ptr.dtype.element_ty), mask=in_heads & (dims < HEAD_DIM))
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = ((head_block - q_blocks) * BLOCK_HEADS + offs_head)[:, None]
            in_heads = heads < NUM_KV_HEADS
            key = _rotated_heads(
                k_ptr + token * stride_k_token + heads * stride_k_head, in_heads, k_weight_ptr, cos_sin_ptr, signs_ptr,
                eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_DIM, STAGES, HADAMARD_SCALE,
            )  # fmt: skip
            k_row_ptr = k_cache_ptr + slot_offset(slot, stride_k_cache_block, stride_k_cache_slot, KV_BLOCK_SIZE)
            k_scale_ptrs = scale_pointers(
                k_scale_ptr, slot, heads, stride_k_scale_block, stride_k_scale_slot, stride_k_scale_head,
                KV_BLOCK_SIZE, K_KIND,
            )  # fmt: skip
            k_ptrs = k_row_ptr + heads * stride_k_cache_head
            store_rows(key, k_ptrs, k_scale_ptrs, k_table_scale_ptr, in_heads, HEAD_DIM, K_KIND, NATIVE_FP8)
            dims = tl.arange(0, BLOCK_V)[None, :]
            mask = in_heads & (dims < V_HEAD_DIM)
            value = tl.load(v_ptr + token * stride_v_token + heads * stride_v_head + dims, mask=mask)
            v_row_ptr = v_cache_ptr + slot_offset(slot, stride_v_cache_block, stride_v_cache_slot, KV_BLOCK_SIZE)
            v_scale_ptrs = scale_pointers(
                v_scale_ptr, slot, heads, stride_v_scale_block, stride_v_scale_slot, stride_v_scale_head,
                KV_BLOCK_SIZE, V_KIND,
            )  # fmt: skip
            v_ptrs = v_row_ptr + heads * stride_v_cache_head
            store_rows(value, v_ptrs, v_scale_ptrs, v_table_scale_ptr, in_heads, V_HEAD_DIM, V_KIND, NATIVE_FP8)


def launch_for(
    q: torch.Tensor,
    write: CacheWrite,
    cos_sin_cache: torch.Tensor,
    eps: float,
    interleaved: bool,
    hadamard_signs: torch.Tensor | None,
) -> Launch:
    """Return the launch for checked arguments of `qk_norm_rope_and_cache`."""
    num_tokens, num_kv_heads, head_dim = write.key.shape
    v_head_dim = write.value.shape[2]
    widest = max(head_dim, v_head_dim)
    grid, arguments = rotation_launch(num_tokens, q.shape[1], num_kv_heads, widest, cos_sin_cache, interleaved)
    del arguments["BLOCK_PAIRS"]  # a block holds the whole head
    size = 1
    if hadamard_signs is not None:
        size = hadamard_size("hadamard_signs", head_dim)
    return Launch(
        _ordered_heads_kernel,
        grid,
        {
            "eps": eps,
            **strides("token head", q=q, k=write.key, v=write.value),
            **write.arguments(),
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_DIM": triton.next_power_of_2(head_dim),
            "BLOCK_V": triton.next_power_of_2(v_head_dim),
            "STAGES": size.bit_length() - 1,
            "HADAMARD_SCALE": size**-0.5,
            **arguments,
        },
    )
