"""Rotary position embedding."""

from __future__ import annotations

import functools

import torch

from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor, check_writable
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.errors import as_bool
from ..core.ids import check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, strides, wait_for_inputs
from ..core.operation import Run, operation
from ..core.rotation import check_rotary, locate_token, positions_of, rotate_heads, rotation_launch
from . import definition


@triton.jit
def _rotary_embedding_kernel(
    positions_ptr,  # int64 [num_tokens]
    query_ptr,  # [num_tokens, NUM_Q_HEADS, head_dim]
    key_ptr,  # [num_tokens, NUM_KV_HEADS, head_dim], or None
    cos_sin_cache_ptr,  # float32 [max_position, ROTARY_DIM]
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_cos_sin_position,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of a token in place: the first programs take the query, the others the key."""
    wait_for_inputs()
    token, head_block, cos_sin_ptr, offs_head = locate_token(
        positions_ptr, cos_sin_cache_ptr, stride_cos_sin_position, BLOCK_HEADS
    )
    q_blocks: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    # HEAD_DIM is ROTARY_DIM here, so that elements beyond ROTARY_DIM stay unchanged.
    if head_block < q_blocks:
        heads = (head_block * BLOCK_HEADS + offs_head)[:, None]
        ptrs = query_ptr + token * stride_query_token + heads * stride_query_head
        rotate_heads(
            ptrs, ptrs, heads < NUM_Q_HEADS, None, cos_sin_ptr, None, 0.0, ROTARY_DIM, ROTARY_DIM, INTERLEAVED,
            BLOCK_PAIRS, 0,
        )  # fmt: skip
    elif key_ptr is not None:
        heads = ((head_block - q_blocks) * BLOCK_HEADS + offs_head)[:, None]
        ptrs = key_ptr + token * stride_key_token + heads * stride_key_head
        rotate_heads(
            ptrs, ptrs, heads < NUM_KV_HEADS, None, cos_sin_ptr, None, 0.0, ROTARY_DIM, ROTARY_DIM, INTERLEAVED,
            BLOCK_PAIRS, 0,
        )  # fmt: skip


@operation(mutates=("query", "key"), finish=lambda arguments, _: (arguments["query"], arguments["key"]))
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> Run[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rotate query and key by their positions (Su et al., 2021), in place, and return both.

    Pair i of a head is (x[i], x[i + rotary_dim / 2]), or (x[2i], x[2i + 1]) if interleaved. It becomes (x1 cos - x2
    sin, x2 cos + x1 sin), in float32, rounded once. Elements beyond rotary_dim do not change.

    Args:
        positions: int64 [num_tokens], rows of cos_sin_cache.
        query: [num_tokens, num_q_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous.
        key: [num_tokens, num_kv_heads, head_dim], dtype of query, last dimension contiguous; or None.
        cos_sin_cache: float32 [max_position, rotary_dim], last dimension contiguous: rotary_dim / 2 cosines, then as
            many sines.
        interleaved: whether the elements of a pair are neighbours.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a position is out of range. On a GPU
            positions are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    interleaved = as_bool("interleaved", interleaved)
    check_tensor("query", query, ("num_tokens", "num_q_heads", "head_dim"), FLOAT_DTYPES)
    check_last_dim_contiguous("query", query)
    check_writable("query", query)
    if key is not None:
        check_tensor("key", key, (len(query), "num_kv_heads", query.shape[2]), (query.dtype,), query.device)
        check_last_dim_contiguous("key", key)
        check_writable("key", key)
    check_rotary(positions, cos_sin_cache, query)
    if not use_triton(query):
        return _by_definition
    (num_tokens, num_q_heads, _), rotary_dim = query.shape, cos_sin_cache.shape[1]
    num_kv_heads = 0 if key is None else key.shape[1]
    launch: Compute = nothing
    checks = checks_ids(positions)
    if num_tokens * (num_q_heads + num_kv_heads) * rotary_dim > 0:
        grid, arguments = rotation_launch(num_tokens, num_q_heads, num_kv_heads, rotary_dim, cos_sin_cache, interleaved)
        launch = Launch(_rotary_embedding_kernel, grid, arguments | strides("token head", query=query, key=key))

    def run(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, cos_sin_cache: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if checks:
            check_all_ids("rotary_embedding", positions_of(positions, cos_sin_cache), by_triton=True)
        tensors = {"query_ptr": query, "key_ptr": key, "cos_sin_cache_ptr": cos_sin_cache}
        launch({**tensors, "positions_ptr": positions.contiguous()})
        return query, key

    return run


def _by_definition(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rotate = functools.partial(definition.rotate, interleaved=interleaved, compute=torch.float32)
    rotated = [rotate(x, positions, cos_sin_cache) for x in (query, key) if x is not None]
    query.copy_(rotated[0])
    if key is not None:
        key.copy_(rotated[1])
    return query, key
