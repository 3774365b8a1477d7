"""Choose the keys that each query attends to in sparse attention: an indexer's scores, and the best of them."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.latent_cache import check_index_cache, index_parts
from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_sequences_fit, check_tensor
from ..core.compat import dot, tl, triton
from ..core.device import use_triton
from ..core.dtypes import as_kernel_argument, decode_e4m3, has_native_e4m3
from ..core.errors import InvalidInputError, as_int
from ..core.ids import Sequences, check_sequences
from ..core.launch import Launch, strides, wait_for_inputs
from ..core.operation import Run, operation
from . import latent_definition
from .latent_definition import best_keys
from .plan import AttentionPlan, check_plan

# Most float32 scores in memory at once: a step of 1,024 tokens over 128k keys.
_MAX_SCORES = 1 << 27
# Keys that a program scores. It reads the heads of a query once for all of them, see limits.md.
_KEYS_PER_PROGRAM = 1024


@triton.jit
def locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr):
    """Return a token's sequence (int64), and one past the last position that it sees (int32), 0 for padding."""
    low = num_seqs * 0
    high = low + num_seqs
    while low < high:  # finds the last sequence that begins at or before the token
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens_q_ptr + middle + 1) <= token
        low = tl.where(begins, middle + 1, low)
        high = tl.where(begins, high, middle)
    seq = tl.minimum(low, num_seqs - 1).to(tl.int64)
    # A row of padding comes after every sequence and sees no key.
    end_key = (tl.load(seq_lens_ptr + seq) - tl.load(cu_seqlens_q_ptr + seq + 1) + token + 1).to(tl.int32)
    return seq, tl.where(low < num_seqs, end_key, 0)


@triton.jit(do_not_specialize=["first_token", "num_seqs", "stride_table_seq"])
def _index_scores_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    weights_ptr,  # float32 [num_tokens, NUM_HEADS]
    key_ptr,  # [num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    scales_ptr,  # [num_blocks, KV_BLOCK_SIZE, 1], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    out_ptr,  # float32 [tokens of this launch, max_keys], which the caller fills with -inf
    first_token,
    num_seqs,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_key_block,
    stride_key_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_table_seq,
    stride_out_token,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of BLOCK_N keys in a program
    NATIVE_FP8: tl.constexpr,
):
    """Score one token's query against BLOCKS blocks of keys in a program."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token = row + first_token
    seq, end_key = locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr)

    offs_h = tl.arange(0, HEADS_PADDED)
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    q_ptrs = q_ptr + token * stride_q_token + offs_h[:, None] * stride_q_head + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_h < NUM_HEADS)[:, None] & in_dim[None, :], other=0.0)
    weights = tl.load(weights_ptr + token * stride_weights_token + offs_h, mask=offs_h < NUM_HEADS, other=0.0)
    first = tl.program_id(1) * BLOCKS
    last = tl.minimum(first + BLOCKS, (end_key + BLOCK_N - 1) // BLOCK_N)
    for index in range(first, last):
        keys = index * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = keys < end_key
        block = tl.load(block_table_ptr + seq * stride_table_seq + keys // KV_BLOCK_SIZE, mask=mask, other=0)
        block = block.to(tl.int64)
        slot = keys % KV_BLOCK_SIZE
        rows = block * stride_key_block + slot * stride_key_slot
        key = tl.load(key_ptr + rows[:, None] + offs_d[None, :], mask=mask[:, None] & in_dim[None, :], other=0)
        if scales_ptr is not None:
            key = decode_e4m3(key, NATIVE_FP8).to(q.dtype)
        products = dot(q, tl.trans(key), tl.zeros([HEADS_PADDED, BLOCK_N], tl.float32))
        products = tl.where(products < 0, 0.0, products)  # keeps NaN
        scores = tl.sum(products * weights[:, None], 0)
        if scales_ptr is not None:
            scores *= tl.load(
                scales_ptr + block * stride_scales_block + slot * stride_scales_slot, mask=mask, other=0.0
            )
        tl.store(out_ptr + row * stride_out_token + keys, scores, mask=mask)


def index_tile(element_size: int) -> tuple[int, int]:
    """Return keys in a block, and warps.

    With 64 keys three programs share an SM. 128 keys leave two and spill registers, see limits.md.
    """
    if element_size == 4:
        return 32, 8
    return 64, 4


def _new_indices(q: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor, top_k: int, **_: object) -> Any:
    return torch.empty(_shape(q, key_cache, block_table, top_k), dtype=torch.int32, device=q.device)


def _shape(q: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor, top_k: int) -> tuple[int, int]:
    return len(q), min(top_k, block_table.shape[1] * key_cache.shape[1])


def _run_definition(
    q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, plan: object = None, **options: Any
) -> torch.Tensor:
    return latent_definition.choose_keys(q, weights, key_cache, compute=torch.float32, **options)


@operation(_new_indices, arguments={"plan": ""})
def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    plan: AttentionPlan | None = None,
) -> Run[torch.Tensor]:
    """Return the keys with the highest scores of an indexer, for `indices` of `paged_mla_attention`.

    The score of a query and a key is sum_h weights[h] * max(q[h] . key, 0) (DeepSeek-AI, "DeepSeek-V3.2", 2025, eq. 1),
    in float32. A query at position p sees keys 0 to p. The host does not wait for the device.

    Args:
        q: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous; 1 to 128 heads of
            16 to 256 dimensions.
        weights: float32 [num_tokens, num_heads], last dimension contiguous.
        key_cache: [num_blocks, block_size, head_dim] in the dtype of q; or uint8 [num_blocks, block_size, head_dim +
            4]: e4m3 numbers, then a float32 that multiplies them. See `write_index_keys`.
        block_table, cu_seqlens_q, seq_lens: as in `paged_mla_attention`.
        top_k: keys of a query, at least 1.
        plan: the step's `AttentionPlan`; layers that share it are bound once a step.

    Returns:
        int32 [num_tokens, min(top_k, max_blocks_per_seq * block_size)], ascending. If a query sees fewer keys, the row
        begins with -1.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("q", q, ("num_tokens", "num_heads", "head_dim"), FLOAT_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    if not (1 <= num_heads <= 128 and 16 <= head_dim <= 256):
        raise InvalidInputError(f"q: {num_heads} heads of {head_dim}, expected 1 to 128 of 16 to 256")
    check_tensor("weights", weights, (num_tokens, num_heads), (torch.float32,), q.device)
    check_index_cache(key_cache, head_dim, q.dtype, q.device)
    check_sequences_fit(block_table, cu_seqlens_q, seq_lens, q.device)
    for name, tensor in (("q", q), ("weights", weights)):
        check_last_dim_contiguous(name, tensor)
    check_plan(plan, cu_seqlens_q, seq_lens, 0)
    num_seqs, top_k = len(seq_lens), as_int("top_k", top_k, 1)
    shape = _shape(q, key_cache, block_table, top_k)
    numbers = num_tokens, *key_cache.shape[:2], num_tokens, 1 << 30, 1
    check_sequences(Sequences(block_table, cu_seqlens_q, seq_lens, *numbers))
    if not use_triton(q):
        return _run_definition
    max_keys = block_table.shape[1] * key_cache.shape[1]
    if num_seqs == 0 or 0 in shape:
        return lambda q, *_, **__: torch.full(shape, -1, dtype=torch.int32, device=q.device)
    block_n, num_warps = index_tile(q.element_size())
    key, scales = index_parts(key_cache, head_dim)
    at_once = min(num_tokens, max(1, _MAX_SCORES // max_keys))
    options = {
        "num_seqs": num_seqs,
        **strides("token head", q=q),
        **strides("token", weights=weights),
        **strides("block slot", key=key, scales=scales),
        **strides("seq", table=block_table),
        "stride_out_token": max_keys,
        "NUM_HEADS": num_heads,
        "HEADS_PADDED": max(16, triton.next_power_of_2(num_heads)),
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "KV_BLOCK_SIZE": key_cache.shape[1],
        "BLOCK_N": block_n,
        "BLOCKS": _KEYS_PER_PROGRAM // block_n,
        "NATIVE_FP8": has_native_e4m3(q.device),
        "num_warps": num_warps,
        "num_stages": 2,
    }
    spans = [(first, min(first + at_once, num_tokens)) for first in range(0, num_tokens, at_once)]
    columns = triton.cdiv(max_keys, _KEYS_PER_PROGRAM)
    launches = [
        Launch(_index_scores_kernel, (end - first, columns), {**options, "first_token": first}) for first, end in spans
    ]

    def run(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        key, scales = index_parts(key_cache, head_dim)
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
        tensors = {
            "q_ptr": q,
            "weights_ptr": weights,
            "block_table_ptr": block_table,
            "cu_seqlens_q_ptr": cu_seqlens_q,
            "seq_lens_ptr": seq_lens,
        }
        for (first, end), launch in zip(spans, launches, strict=True):
            scores = torch.full((end - first, max_keys), float("-inf"), device=q.device)
            launch({**tensors, "key_ptr": as_kernel_argument(key), "scales_ptr": scales, "out_ptr": scores})
            indices[first:end] = best_keys(scores, shape[1])
        return indices

    return run
