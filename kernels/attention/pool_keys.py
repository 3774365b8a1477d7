"""Pool the keys of an indexer: one key for each pool of consecutive tokens, a softmax of the tokens' own gates."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.write import slot_offset
from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.errors import InvalidInputError
from ..core.ids import Ids, check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, strides, wait_for_inputs
from ..core.operation import Run, operation
from . import latent_definition

MAX_POOL_SIZE = 256
# A program holds POOL_PADDED * DIM_PADDED keys and as many gates: for GLM-5.3's 16 x 128 these are 32 registers of a
# thread in 4 warps.
_NUM_WARPS = 4


@triton.jit
def _pool_keys_kernel(
    row_ptr,  # [num_blocks, KV_BLOCK_SIZE, 2 * HEAD_DIM]
    bias_ptr,  # [POOL_SIZE, HEAD_DIM]
    slot_mapping_ptr,  # int64 [num_tokens]
    out_ptr,  # [num_tokens, HEAD_DIM], contiguous
    stride_row_block,
    stride_row_slot,
    stride_bias_position,
    POOL_SIZE: tl.constexpr,
    POOL_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,  # a multiple of POOL_SIZE
):
    """Write the key of the pool that one token closes, or zeros."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    key = tl.zeros([DIM_PADDED], tl.float32)
    if (slot >= 0) & (slot % POOL_SIZE == POOL_SIZE - 1):
        offs_p = tl.arange(0, POOL_PADDED)
        in_pool = offs_p < POOL_SIZE
        mask = in_pool[:, None] & in_dim[None, :]
        first = slot - POOL_SIZE + 1
        rows = slot_offset(first, stride_row_block, stride_row_slot, KV_BLOCK_SIZE) + offs_p * stride_row_slot
        row_ptrs = row_ptr + rows[:, None] + offs_d[None, :]
        gates = tl.load(row_ptrs + HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
        bias_ptrs = bias_ptr + offs_p[:, None] * stride_bias_position + offs_d[None, :]
        gates += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
        gates = tl.where(in_pool[:, None], gates, float("-inf"))
        weights = tl.exp(gates - tl.max(gates, 0)[None, :])
        keys = tl.load(row_ptrs, mask=mask, other=0.0).to(tl.float32)
        key = tl.sum(weights * keys, 0) / tl.sum(weights, 0)
    tl.store(out_ptr + token * HEAD_DIM + offs_d, key.to(out_ptr.dtype.element_ty), mask=in_dim)


def _new_keys(row_cache: torch.Tensor, position_bias: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
    return torch.empty(len(slot_mapping), position_bias.shape[1], dtype=row_cache.dtype, device=row_cache.device)


@operation(_new_keys)
def pool_keys(row_cache: torch.Tensor, position_bias: torch.Tensor, slot_mapping: torch.Tensor) -> Run[torch.Tensor]:
    """Return the key of the pool that each token of a step closes, or zeros if it closes none.

    A pool is pool_size consecutive slots of a block, the last of which closes it. Its key is, for every channel, the
    sum over its tokens j of softmax_j(gate_j + position_bias_j) * key_j (KPool of GLM-5.3, Z.ai, 2026), in float32.

    Args:
        row_cache: [num_blocks, block_size, 2 * head_dim], float32, float16 or bfloat16, last dimension contiguous;
            block_size is a multiple of pool_size. A row is a token's key, then its gate. The rows of the step's tokens
            are written already.
        position_bias: [pool_size, head_dim], any float dtype, last dimension contiguous; pool_size up to 256, head_dim
            up to 256.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; negative for padding.

    Returns:
        [num_tokens, head_dim], dtype of row_cache.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit, or a slot lies beyond the cache. On a GPU slots are
            checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("row_cache", row_cache, ("num_blocks", "block_size", "2 * head_dim"), FLOAT_DTYPES)
    check_tensor("position_bias", position_bias, ("pool_size", "head_dim"), FLOAT_DTYPES, row_cache.device)
    pool_size, head_dim = position_bias.shape
    if not (1 <= pool_size <= MAX_POOL_SIZE and 1 <= head_dim <= 256):
        expected = f"1 to {MAX_POOL_SIZE} positions of 1 to 256"
        raise InvalidInputError(f"position_bias: {pool_size} positions of {head_dim}, expected {expected}")
    num_blocks, block_size, _ = row_cache.shape
    check_tensor("row_cache", row_cache, (num_blocks, block_size, 2 * head_dim))
    for name, tensor in (("row_cache", row_cache), ("position_bias", position_bias)):
        check_last_dim_contiguous(name, tensor)
    if block_size % pool_size or block_size == 0:
        raise InvalidInputError(f"row_cache: block_size {block_size}, expected a multiple of pool_size {pool_size}")
    check_tensor("slot_mapping", slot_mapping, ("num_tokens",), (torch.int64,), row_cache.device)
    highest = num_blocks * block_size - 1
    by_triton, checks = use_triton(row_cache), checks_ids(row_cache)
    launch: Compute = nothing
    if by_triton and len(slot_mapping):
        options = {
            **strides("block slot", row=row_cache),
            **strides("position", bias=position_bias),
            "POOL_SIZE": pool_size,
            "POOL_PADDED": triton.next_power_of_2(pool_size),
            "HEAD_DIM": head_dim,
            "DIM_PADDED": triton.next_power_of_2(head_dim),
            "KV_BLOCK_SIZE": block_size,
            "num_warps": _NUM_WARPS,
        }
        launch = Launch(_pool_keys_kernel, (len(slot_mapping),), options)

    def run(row_cache: torch.Tensor, position_bias: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        if checks or not by_triton:
            check_all_ids("pool_keys", Ids("slot_mapping", slot_mapping, None, highest), by_triton=by_triton)
        if not by_triton:
            pooled = latent_definition.pool_keys(row_cache, position_bias, slot_mapping, compute=torch.float32)
            return pooled.to(row_cache.dtype)
        out = _new_keys(row_cache, position_bias, slot_mapping)
        launch(
            {
                "row_ptr": row_cache,
                "bias_ptr": position_bias,
                "slot_mapping_ptr": slot_mapping.contiguous(),
                "out_ptr": out,
            }
        )
        return out

    return run
