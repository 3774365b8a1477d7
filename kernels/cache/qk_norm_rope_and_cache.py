"""Norm of query and key, rotary embedding and cache write of an attention layer, in one launch."""

from __future__ import annotations

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_contiguous,
    check_eps,
    check_last_dim_contiguous,
    check_tensor,
    check_writable,
)
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import as_kernel_argument, kv_kind, scale_argument
from ..core.errors import InvalidInputError, as_bool
from ..core.ids import check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, strides, wait_for_inputs
from ..core.operation import Run, operation
from ..core.rotation import check_rotary, locate_token, positions_of, rotate_heads, rotation_launch
from . import definition, ordered_heads
from .write import SCALE_CACHES, WRITES_SCALES, CacheWrite, scale_pointers, slot_offset, slots_of, store_rows


@triton.jit
def _qk_norm_rope_and_cache_kernel(
    q_ptr,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    k_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_tokens, NUM_KV_HEADS, V_HEAD_DIM]
    k_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM]
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    positions_ptr,  # int64 [num_tokens]
    cos_sin_cache_ptr,  # float32 [max_position, ROTARY_DIM]
    q_weight_ptr,  # [HEAD_DIM], or None
    k_weight_ptr,  # [HEAD_DIM], or None
    k_scale_ptr,  # float32, one value or [NUM_KV_HEADS], or None; with int8 [num_blocks, KV_BLOCK_SIZE, NUM_KV_HEADS]
    v_scale_ptr,  # as k_scale_ptr
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
    stride_k_scale_block,  # 0 unless every row has a scale
    stride_k_scale_slot,
    stride_k_scale_head,  # 0 if all heads share one scale
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
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_KIND: tl.constexpr,  # name of a `KvKind`
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
        q_ptrs = q_ptr + token * stride_q_token + heads * stride_q_head
        rotate_heads(
            q_ptrs, q_ptrs, heads < NUM_Q_HEADS, q_weight_ptr, cos_sin_ptr, None, eps, HEAD_DIM, ROTARY_DIM,
            INTERLEAVED, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = ((head_block - q_blocks) * BLOCK_HEADS + offs_head)[:, None]
            in_heads = heads < NUM_KV_HEADS
            k_row_ptr = k_cache_ptr + slot_offset(slot, stride_k_cache_block, stride_k_cache_slot, KV_BLOCK_SIZE)
            k_scale_ptrs = scale_pointers(
                k_scale_ptr, slot, heads, stride_k_scale_block, stride_k_scale_slot, stride_k_scale_head,
                KV_BLOCK_SIZE, K_KIND,
            )  # fmt: skip
            rotate_heads(
                k_ptr + token * stride_k_token + heads * stride_k_head, k_row_ptr + heads * stride_k_cache_head,
                in_heads, k_weight_ptr, cos_sin_ptr, k_scale_ptrs, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS,
                BLOCK_REST, K_KIND, NATIVE_FP8,
            )  # fmt: skip
            dims = tl.arange(0, BLOCK_V)[None, :]
            mask = in_heads & (dims < V_HEAD_DIM)
            value = tl.load(v_ptr + token * stride_v_token + heads * stride_v_head + dims, mask=mask)
            v_row_ptr = v_cache_ptr + slot_offset(slot, stride_v_cache_block, stride_v_cache_slot, KV_BLOCK_SIZE)
            v_scale_ptrs = scale_pointers(
                v_scale_ptr, slot, heads, stride_v_scale_block, stride_v_scale_slot, stride_v_scale_head,
                KV_BLOCK_SIZE, V_KIND,
            )  # fmt: skip
            v_ptrs = v_row_ptr + heads * stride_v_cache_head
            store_rows(value, v_ptrs, v_scale_ptrs, None, in_heads, V_HEAD_DIM, V_KIND, NATIVE_FP8)


@operation(
    mutates=("q", "k_cache", "v_cache", *SCALE_CACHES), **WRITES_SCALES, finish=lambda arguments, _: arguments["q"]
)
def qk_norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    hadamard_signs: torch.Tensor | None = None,
) -> Run[torch.Tensor]:
    """Apply `rms_norm` to every head of q and k, then `rotary_embedding` and `reshape_and_cache`, in one pass.

    q changes in place and is returned. The rotated k and the plain v are divided by their scales and written to the
    caches; k and v themselves do not change. Everything is computed in float32 and rounded once.

    Args:
        q: [num_tokens, num_q_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim], dtype of q, last dimension contiguous; v may have another head_dim.
        k_cache, v_cache, slot_mapping, k_scale, v_scale, k_table_scale, v_table_scale: as in `reshape_and_cache`.
        positions, cos_sin_cache, interleaved: as in `rotary_embedding`.
        q_weight, k_weight: [head_dim], weights of the norms; both None for models without these norms.
        eps: added to the mean square of a head; at least 0.
        hadamard_signs: float32 [head_dim], contiguous, 1 or -1: rotated queries and keys become H (signs x), so that
            outliers of a channel spread over the head, and scores stay. H is Sylvester's matrix of the largest power of
            two that divides head_dim, over the root of its size, for each block of this size. head_dim is a multiple of
            16. None for no transform.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, only one weight is given, or a slot or
            position is out of range. On a GPU slots and positions are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    write = CacheWrite(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_table_scale, v_table_scale)
    eps, interleaved = check_eps(eps), as_bool("interleaved", interleaved)
    write.check("k", "v")
    num_tokens, _, head_dim = k.shape
    check_tensor("q", q, (num_tokens, "num_q_heads", head_dim), (k.dtype,), k.device)
    check_last_dim_contiguous("q", q)
    check_writable("q", q)
    check_rotary(positions, cos_sin_cache, q)
    if (q_weight is None) != (k_weight is None):
        raise InvalidInputError("q_weight, k_weight: one of them is None, expected both or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(name, weight, (head_dim,), FLOAT_DTYPES, q.device)
    if hadamard_signs is not None:
        ordered_heads.hadamard_size("hadamard_signs", head_dim)
        check_tensor("hadamard_signs", hadamard_signs, (head_dim,), (torch.float32,), q.device)
        check_contiguous("hadamard_signs", hadamard_signs)
    by_triton = use_triton(q)
    checks = by_triton and checks_ids(q)
    launch: Compute | None = None
    if by_triton and num_tokens * (q.shape[1] + k.shape[1]) * head_dim == 0:
        launch = nothing
    elif by_triton and (hadamard_signs is not None or _are_packed(k_cache, v_cache)):
        launch = ordered_heads.launch_for(q, write, cos_sin_cache, eps, interleaved, hadamard_signs)
    elif by_triton:
        launch = _launch_for(q, write, cos_sin_cache, eps, interleaved)
    elif takes_numba(q, k, v, weights=(q_weight, k_weight)):
        from ..cpu.cache import qk_norm_rope_and_cache as numba_write

        launch = numba_write.launch_for(q, write, cos_sin_cache, q_weight, eps=eps, interleaved=interleaved)
    if launch is None:
        return definition.write_rotated

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
        hadamard_signs: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        if checks:
            _check_ids(k_cache, slot_mapping, positions, cos_sin_cache, by_triton=True)
        if q_weight is not None:
            q_weight = q_weight.contiguous()
        if k_weight is not None:
            k_weight = k_weight.contiguous()
        tensors = {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "k_cache_ptr": as_kernel_argument(k_cache),
            "v_cache_ptr": as_kernel_argument(v_cache),
            "slot_mapping_ptr": slot_mapping.contiguous(),
            "k_scale_ptr": scale_argument(k_scale),
            "v_scale_ptr": scale_argument(v_scale),
            "k_table_scale_ptr": k_table_scale,
            "v_table_scale_ptr": v_table_scale,
            "positions_ptr": positions.contiguous(),
            "cos_sin_cache_ptr": cos_sin_cache,
            "q_weight_ptr": q_weight,
            "k_weight_ptr": k_weight,
            "v_weight_ptr": None,
            "signs_ptr": hadamard_signs,
        }
        if launch(tensors):  # the numba kernel has found an id out of range
            _check_ids(k_cache, slot_mapping, positions, cos_sin_cache, by_triton=False)
        return q

    return run


def _check_ids(
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    by_triton: bool,
) -> None:
    ids = slots_of(slot_mapping, k_cache), positions_of(positions, cos_sin_cache)
    check_all_ids("qk_norm_rope_and_cache", *ids, by_triton=by_triton)


def _are_packed(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether several numbers share a scale and a byte in one of the caches."""
    return bool(kv_kind(k_cache.dtype).group_size or kv_kind(v_cache.dtype).group_size)


def _launch_for(
    q: torch.Tensor, write: CacheWrite, cos_sin_cache: torch.Tensor, eps: float, interleaved: bool
) -> Launch:
    num_tokens, num_kv_heads, head_dim = write.key.shape
    v_head_dim = write.value.shape[2]
    widest = max(head_dim, v_head_dim)
    grid, arguments = rotation_launch(num_tokens, q.shape[1], num_kv_heads, widest, cos_sin_cache, interleaved)
    return Launch(
        _qk_norm_rope_and_cache_kernel,
        grid,
        {
            "eps": eps,
            **strides("token head", q=q, k=write.key, v=write.value),
            **write.arguments(),
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_REST": triton.next_power_of_2(max(head_dim - cos_sin_cache.shape[1], 1)),
            "BLOCK_V": triton.next_power_of_2(v_head_dim),
            **arguments,
        },
    )
