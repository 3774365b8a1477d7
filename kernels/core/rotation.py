"""Rotate heads, with the norm before and the cast after; shared by all operations that rotate."""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_last_dim_contiguous, check_tensor
from .compat import tl, triton
from .dtypes import cast_to_cache, load_inverse_scale, store_row_scales
from .errors import InvalidInputError
from .ids import Ids
from .launch import num_warps, strides


@triton.jit
def locate_token(positions_ptr, cos_sin_cache_ptr, stride_cos_sin_position, BLOCK_HEADS: tl.constexpr):
    """Return a program's token (int64), block of heads, the token's cosines and sines, and the heads (int64)."""
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    cos_sin_ptr = cos_sin_cache_ptr + tl.load(positions_ptr + token) * stride_cos_sin_position
    return token, head_block, cos_sin_ptr, tl.arange(0, BLOCK_HEADS).to(tl.int64)


@triton.jit
def rotate_heads(
    x_ptrs,  # [BLOCK_HEADS, 1], the first element of each head of a token
    out_ptrs,  # [BLOCK_HEADS, 1], may be x_ptrs
    in_heads,  # [BLOCK_HEADS, 1], which of the heads exist
    weight_ptr,  # [HEAD_DIM], weight of the RMS norm before the rotation, or None
    cos_sin_ptr,  # [ROTARY_DIM], cosines and sines of the token's position
    scale_ptrs,  # [BLOCK_HEADS, 1], scales that divide the result; int8 and e4m3_rows write them; or None
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    KIND: tl.constexpr = tl.constexpr(""),  # name of a `KvKind`; Triton 3.6.0 does not wrap a plain string default
    NATIVE_FP8: tl.constexpr = False,
):
    """Normalise (if there is a weight), rotate and scale some heads of a token, in float32, rounded once."""
    OUT: tl.constexpr = out_ptrs.dtype.element_ty
    HALF: tl.constexpr = ROTARY_DIM // 2
    pairs = tl.arange(0, BLOCK_PAIRS)
    in_pairs = pairs < HALF
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + HALF
    inverse_scale = None
    if KIND != "int8" and KIND != "e4m3_rows":
        inverse_scale = load_inverse_scale(scale_ptrs, in_heads)
    mask = in_heads & in_pairs[None, :]
    # Neighbours are loaded and stored together: by themselves, first and second elements would each touch every sector.
    neighbours = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    in_neighbours = in_heads & (neighbours < ROTARY_DIM)
    if INTERLEAVED:
        x = tl.load(x_ptrs + neighbours, mask=in_neighbours, other=0.0)
        x1, x2 = tl.split(x.reshape(x.shape[0], BLOCK_PAIRS, 2))
    else:
        x1 = tl.load(x_ptrs + first[None, :], mask=mask, other=0.0)
        x2 = tl.load(x_ptrs + second[None, :], mask=mask, other=0.0)
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if HEAD_DIM > ROTARY_DIM:
        rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)
        rest_mask = in_heads & (rest < HEAD_DIM)[None, :]
        x3 = tl.load(x_ptrs + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if HEAD_DIM > ROTARY_DIM:
            squares += tl.sum(x3 * x3, axis=1)
        root = tl.sqrt(squares / HEAD_DIM + eps)[:, None]
        x1 = x1 / root * tl.load(weight_ptr + first, mask=in_pairs, other=0.0).to(tl.float32)[None, :]
        x2 = x2 / root * tl.load(weight_ptr + second, mask=in_pairs, other=0.0).to(tl.float32)[None, :]
        if HEAD_DIM > ROTARY_DIM:
            x3 = x3 / root * tl.load(weight_ptr + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    # Warps share the elements of a narrow tile: in place, no warp may store before all warps have loaded.
    tl.debug_barrier()
    cos = tl.load(cos_sin_ptr + pairs, mask=in_pairs, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + HALF + pairs, mask=in_pairs, other=0.0)[None, :]
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if KIND == "int8" or KIND == "e4m3_rows":
        largest = tl.max(tl.maximum(tl.abs(y1), tl.abs(y2)), axis=1)
        not_finite = tl.sum((y1 + y2) * 0.0, axis=1)
        if HEAD_DIM > ROTARY_DIM:
            largest = tl.maximum(largest, tl.max(tl.abs(x3), axis=1))
            not_finite += tl.sum(x3 * 0.0, axis=1)
        inverse_scale = store_row_scales(scale_ptrs, largest[:, None], not_finite[:, None], in_heads, KIND)
    if INTERLEAVED:
        y = tl.join(y1, y2).reshape(y1.shape[0], 2 * BLOCK_PAIRS)
        tl.store(out_ptrs + neighbours, cast_to_cache(y, inverse_scale, OUT, KIND, NATIVE_FP8), mask=in_neighbours)
    else:
        tl.store(out_ptrs + first[None, :], cast_to_cache(y1, inverse_scale, OUT, KIND, NATIVE_FP8), mask=mask)
        tl.store(out_ptrs + second[None, :], cast_to_cache(y2, inverse_scale, OUT, KIND, NATIVE_FP8), mask=mask)
    if HEAD_DIM > ROTARY_DIM:
        tl.store(out_ptrs + rest[None, :], cast_to_cache(x3, inverse_scale, OUT, KIND, NATIVE_FP8), mask=rest_mask)


def check_rotary(positions: torch.Tensor, cos_sin_cache: torch.Tensor, query: torch.Tensor) -> None:
    """Check the rotary arguments of an operation that rotates `query` [num_tokens, num_q_heads, head_dim]."""
    check_tensor("positions", positions, (query.shape[0],), (torch.int64,), query.device)
    check_tensor("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"), (torch.float32,), query.device)
    check_last_dim_contiguous("cos_sin_cache", cos_sin_cache)
    rotary_dim, head_dim = cos_sin_cache.shape[1], query.shape[2]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise InvalidInputError(f"cos_sin_cache: rotary_dim {rotary_dim}, expected an even number up to {head_dim}")


def rotation_launch(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the common arguments of kernels that rotate. A program takes heads of one token, q's or k's.

    head_dim: elements of a head that the program reads.
    """
    rotary_dim, block_dim = cos_sin_cache.shape[1], triton.next_power_of_2(head_dim)
    block_heads = heads_per_program(num_q_heads, num_kv_heads, block_dim)
    grid = (num_tokens, triton.cdiv(num_q_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads))
    return grid, {
        **strides("position", cos_sin=cos_sin_cache),
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_HEADS": block_heads,
        "BLOCK_PAIRS": triton.next_power_of_2(max(rotary_dim // 2, 1)),
        "num_warps": num_warps(block_heads * block_dim),
    }


def positions_of(positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> Ids:
    """Return positions as ids to check, with the rows of the table as their range."""
    return Ids("positions", positions, 0, cos_sin_cache.shape[0] - 1)


def heads_per_program(num_q_heads: int, num_kv_heads: int, block_dim: int) -> int:
    """Return the number of heads that a program rotates: at most 2,048 elements of one token.

    With 4 warps every thread then loads 16 bytes of a 16-bit dtype from each half of a head. The heads of a program
    share one load of the cosines and sines.
    block_dim: elements of a head, padded to a power of two.
    """
    most_heads: int = triton.next_power_of_2(max(num_q_heads, num_kv_heads))
    return min(max(2048 // block_dim, 1), most_heads)
