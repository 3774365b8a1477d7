"""Merge attention over two disjoint key sets into attention over their union."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.launch import Launch, nothing, num_warps, strides, tile, wait_for_inputs
from ..core.operation import Run, by_definition, like_the_first, operation
from . import definition


@triton.jit(do_not_specialize=["num_tokens", "stride_lse_a_head", "stride_lse_b_head", "stride_lse_head"])
def _merge_attn_states_kernel(
    out_a_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_a_ptr,  # [NUM_HEADS, num_tokens]
    out_b_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_b_ptr,  # [NUM_HEADS, num_tokens]
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_ptr,  # [NUM_HEADS, num_tokens]
    num_tokens,
    stride_out_a_token,
    stride_out_a_head,
    stride_lse_a_head,
    stride_lse_a_token,
    stride_out_b_token,
    stride_out_b_head,
    stride_lse_b_head,
    stride_lse_b_token,
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    stride_lse_token,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program merges BLOCK_ROWS rows, a row being one head of one token."""
    wait_for_inputs()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = (rows // NUM_HEADS)[:, None], (rows % NUM_HEADS)[:, None]
    in_rows = tokens < num_tokens
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    mask = in_rows & (dims < HEAD_DIM)
    lse_a = tl.load(lse_a_ptr + heads * stride_lse_a_head + tokens * stride_lse_a_token, mask=in_rows, other=0.0)
    lse_b = tl.load(lse_b_ptr + heads * stride_lse_b_head + tokens * stride_lse_b_token, mask=in_rows, other=0.0)
    out_a = tl.load(out_a_ptr + tokens * stride_out_a_token + heads * stride_out_a_head + dims, mask=mask, other=0.0)
    # FlashAttention writes inf for a row without keys; kernels here write -inf.
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    out_b = tl.load(out_b_ptr + tokens * stride_out_b_token + heads * stride_out_b_head + dims, mask=mask, other=0.0)
    largest = tl.maximum(lse_a, lse_b)
    # -inf - -inf is NaN. If both sides are empty, any finite shift gives both the weight exp(-inf) = 0.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(lse_a - shift)
    weight_b = tl.exp(lse_b - shift)
    total = weight_a + weight_b
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    # 0 * NaN is NaN, so an empty side is left out, not weighted.
    out = tl.where(weight_a == 0.0, 0.0, out_a.to(tl.float32) * (weight_a / total))
    out += tl.where(weight_b == 0.0, 0.0, out_b.to(tl.float32) * (weight_b / total))
    lse = tl.where(is_empty, float("-inf"), shift + tl.log(total))
    tl.store(
        out_ptr + tokens * stride_out_token + heads * stride_out_head + dims, out.to(out_ptr.dtype.element_ty), mask
    )
    tl.store(lse_ptr + heads * stride_lse_head + tokens * stride_lse_token, lse, mask=in_rows)


def _new(out_a: torch.Tensor, lse_a: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return like_the_first(out_a), like_the_first(lse_a)


@operation(_new, results="Tensor out, Tensor lse")
def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Run[tuple[torch.Tensor, torch.Tensor]]:
    """Merge attention over two disjoint key sets into attention over their union.

    lse = log(exp(lse_a) + exp(lse_b)) and out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b (Milakov and
    Gimelshein, 2018), in float32; out is rounded once. A side with lse -inf, or inf as FlashAttention writes it, is
    empty: it adds nothing, even if its output holds NaN. If both are empty, the result is 0 and -inf.

    Args:
        out_a, out_b: [num_tokens, num_heads, head_dim], both float32, float16 or bfloat16, last dimension contiguous.
        lse_a, lse_b: float32 [num_heads, num_tokens], natural log, any strides.

    Returns:
        out like out_a and lse like lse_a, new and contiguous.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("out_a", out_a, ("num_tokens", "num_heads", "head_dim"), FLOAT_DTYPES)
    check_tensor("out_b", out_b, out_a.shape, (out_a.dtype,), out_a.device)
    num_tokens, num_heads, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, (num_heads, num_tokens), (torch.float32,), out_a.device)
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        check_last_dim_contiguous(name, tensor)
    if not use_triton(out_a):
        return by_definition(definition.merge_attn_states, out_a.dtype)
    launch: Callable[..., None] = nothing
    if out_a.numel():
        launch = _launch_for(out_a, lse_a, out_b, lse_b)

    def run(
        out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _new(out_a, lse_a)
        states = {"out_a_ptr": out_a, "lse_a_ptr": lse_a, "out_b_ptr": out_b, "lse_b_ptr": lse_b}
        launch({**states, "out_ptr": out, "lse_ptr": lse})
        return out, lse

    return run


def _launch_for(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Launch:
    num_tokens, num_heads, head_dim = out_a.shape
    block_rows, block_dim = tile(num_tokens * num_heads, head_dim)
    return Launch(
        _merge_attn_states_kernel,
        (triton.cdiv(num_tokens * num_heads, block_rows),),
        {
            "num_tokens": num_tokens,
            **strides("token head", out_a=out_a, out_b=out_b),
            "stride_out_token": num_heads * head_dim,
            "stride_out_head": head_dim,
            **strides("head token", lse_a=lse_a, lse_b=lse_b),
            "stride_lse_head": num_tokens,
            "stride_lse_token": 1,
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_ROWS": block_rows,
            "BLOCK_DIM": block_dim,
        },
        num_warps=num_warps(2 * block_rows * block_dim),
    )
