"""Pool the keys of an indexer: one key for each pool of consecutive tokens, a softmax of the tokens' own gates."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_sequences_fit, check_tensor
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_int
from ..core.ids import Sequences, check_sequences
from ..core.launch import Launch, strides, wait_for_inputs
from ..core.operation import Run, operation
from . import latent_definition
from .choose_keys import locate_token

MAX_POOL_SIZE = 256
# A program holds POOL_PADDED * DIM_PADDED keys and as many gates: for GLM-5.3's 16 x 128 these are 32 registers of a
# thread in 4 warps.
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_seqs", "stride_table_seq"])
def _pool_keys_kernel(
    row_ptr,  # [num_blocks, KV_BLOCK_SIZE, 2 * HEAD_DIM]
    bias_ptr,  # [POOL_SIZE, HEAD_DIM]
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    out_ptr,  # [num_tokens, HEAD_DIM], contiguous
    num_seqs,
    stride_row_block,
    stride_row_slot,
    stride_bias_position,
    stride_table_seq,
    POOL_SIZE: tl.constexpr,
    POOL_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
):
    """Write the key of the pool that one token closes, or zeros."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    seq, end_key = locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr)
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    key = tl.zeros([DIM_PADDED], tl.float32)
    if (end_key > 0) & (end_key % POOL_SIZE == 0):
        offs_p = tl.arange(0, POOL_PADDED)
        in_pool = offs_p < POOL_SIZE
        mask = in_pool[:, None] & in_dim[None, :]
        positions = end_key - POOL_SIZE + offs_p
        block = tl.load(block_table_ptr + seq * stride_table_seq + positions // KV_BLOCK_SIZE, mask=in_pool, other=0)
        rows = block.to(tl.int64) * stride_row_block + positions % KV_BLOCK_SIZE * stride_row_slot
        row_ptrs = row_ptr + rows[:, None] + offs_d[None, :]
        gates = tl.load(row_ptrs + HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
        bias_ptrs = bias_ptr + offs_p[:, None] * stride_bias_position + offs_d[None, :]
        gates += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
        gates = tl.where(in_pool[:, None], gates, float("-inf"))
        weights = tl.exp(gates - tl.max(gates, 0)[None, :])
        keys = tl.load(row_ptrs, mask=mask, other=0.0).to(tl.float32)
        key = tl.sum(weights * keys, 0) / tl.sum(weights, 0)
    tl.store(out_ptr + token * HEAD_DIM + offs_d, key.to(out_ptr.dtype.element_ty), mask=in_dim)


def _new_keys(row_cache: torch.Tensor, position_bias: torch.Tensor, num_tokens: int, **_: object) -> Any:
    return torch.empty(num_tokens, position_bias.shape[1], dtype=row_cache.dtype, device=row_cache.device)


def _run_definition(row_cache: torch.Tensor, position_bias: torch.Tensor, **options: Any) -> torch.Tensor:
    pooled = latent_definition.pool_keys(row_cache, position_bias, compute=torch.float32, **options)
    return pooled.to(row_cache.dtype)


@operation(_new_keys)
def pool_keys(
    row_cache: torch.Tensor,
    position_bias: torch.Tensor,
    *,
    num_tokens: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Run[torch.Tensor]:
    """Return the key of the pool that each token of a step closes, or zeros if it closes none.

    Pool i of a sequence is its positions i * pool_size to (i + 1) * pool_size - 1. Its key is, for every channel, the
    sum over its tokens j of softmax_j(gate_j + position_bias_j) * key_j (KPool of GLM-5.3, Z.ai, 2026), in float32.

    Args:
        row_cache: [num_blocks, block_size, 2 * head_dim], float32, float16 or bfloat16, last dimension contiguous. A
            row is a token's key, then its gate. The rows of the step's tokens are written already.
        position_bias: [pool_size, head_dim], any float dtype, last dimension contiguous; pool_size up to 256, head_dim
            up to 256.
        num_tokens: tokens of the step, padding behind cu_seqlens_q[-1] included.
        block_table: int32 [num_seqs, max_blocks_per_seq]. Only the blocks of pools that the step closes are read.
        cu_seqlens_q, seq_lens: as in `paged_attention`.

    Returns:
        [num_tokens, head_dim], dtype of row_cache.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("row_cache", row_cache, ("num_blocks", "block_size", "2 * head_dim"), FLOAT_DTYPES)
    check_tensor("position_bias", position_bias, ("pool_size", "head_dim"), FLOAT_DTYPES, row_cache.device)
    pool_size, head_dim = position_bias.shape
    if not (1 <= pool_size <= MAX_POOL_SIZE and 1 <= head_dim <= 256):
        expected = f"1 to {MAX_POOL_SIZE} positions of 1 to 256"
        raise InvalidInputError(f"position_bias: {pool_size} positions of {head_dim}, expected {expected}")
    check_tensor("row_cache", row_cache, (*row_cache.shape[:2], 2 * head_dim), FLOAT_DTYPES)
    for name, tensor in (("row_cache", row_cache), ("position_bias", position_bias)):
        check_last_dim_contiguous(name, tensor)
    num_blocks, block_size, _ = row_cache.shape
    if block_size == 0:
        raise InvalidInputError("row_cache: block_size 0, expected at least 1")
    num_tokens = as_int("num_tokens", num_tokens)
    check_sequences_fit(block_table, cu_seqlens_q, seq_lens, row_cache.device)
    check_sequences(
        Sequences(block_table, cu_seqlens_q, seq_lens, num_tokens, num_blocks, block_size, num_tokens, pool_size - 1, 1)
    )
    if not use_triton(row_cache):
        return _run_definition
    if num_tokens == 0 or len(seq_lens) == 0:
        return lambda row_cache, *_, **__: row_cache.new_zeros(num_tokens, head_dim)
    options = {
        "num_seqs": len(seq_lens),
        **strides("block slot", row=row_cache),
        **strides("position", bias=position_bias),
        **strides("seq", table=block_table),
        "POOL_SIZE": pool_size,
        "POOL_PADDED": triton.next_power_of_2(pool_size),
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "KV_BLOCK_SIZE": block_size,
        "num_warps": _NUM_WARPS,
    }
    launch = Launch(_pool_keys_kernel, (num_tokens,), options)

    def run(
        row_cache: torch.Tensor,
        position_bias: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        out = row_cache.new_empty(num_tokens, head_dim)
        launch(
            {
                "row_ptr": row_cache,
                "bias_ptr": position_bias,
                "block_table_ptr": block_table,
                "cu_seqlens_q_ptr": cu_seqlens_q,
                "seq_lens_ptr": seq_lens,
                "out_ptr": out,
            }
        )
        return out

    return run
