"""The sum over each token's experts, the last step of the fused MoE."""

from __future__ import annotations

import torch

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.launch import Launch
from paged.kernels.moe.alignment import num_mapped
from paged.kernels.moe.moe_align_block_size import expert_rows


@triton.jit
def _moe_sum_kernel(
    parts_ptr,  # [num_tokens, TOP_K, HIDDEN_SIZE], contiguous
    weights_ptr,  # [num_tokens, TOP_K] float32
    ids_ptr,  # [num_tokens, TOP_K] int32
    expert_map_ptr,  # [num_mapped], or None
    out_ptr,  # [num_tokens, HIDDEN_SIZE]
    num_mapped,
    stride_out_token,
    HIDDEN_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One token's weighted parts, always added in the same order. Parts of experts that other ranks hold were never
    written and are not read; a NaN weight makes the row NaN even where it names no expert."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < HIDDEN_SIZE
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    # Unrolled, so that all parts are on their way before the first is added.
    for k in tl.static_range(TOP_K):
        entry = token * TOP_K + k
        is_here = expert_rows(tl.load(ids_ptr + entry), expert_map_ptr, num_mapped, NUM_EXPERTS) >= 0
        weight = tl.load(weights_ptr + entry)
        part = tl.load(parts_ptr + entry * HIDDEN_SIZE + offs, mask=mask & is_here, other=0.0)
        total += tl.where(weight == weight, part.to(tl.float32), weight)
    tl.store(out_ptr + token * stride_out_token + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def moe_sum(
    parts: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    launch: Launch | None = None,
) -> Launch:
    """out[token] = sum of its parts [num_tokens * top_k, hidden_size], which carry their weights already.

    launch: what an earlier call returned whose tensors had the same signatures, of as many experts.
    """
    if launch is None:
        num_tokens, top_k = topk_ids.shape
        hidden_size = out.shape[1]
        block_size = min(triton.next_power_of_2(hidden_size), 1024)
        launch = Launch(
            _moe_sum_kernel,
            (num_tokens, triton.cdiv(hidden_size, block_size)),
            {
                "num_mapped": num_mapped(expert_map),
                "stride_out_token": out.stride(0),
                "HIDDEN_SIZE": hidden_size,
                "NUM_EXPERTS": num_experts,
                "TOP_K": top_k,
                "BLOCK_SIZE": block_size,
            },
            num_warps=4,
        )
    tensors = {"parts_ptr": parts, "weights_ptr": topk_weights, "ids_ptr": topk_ids}
    launch({**tensors, "expert_map_ptr": expert_map, "out_ptr": out})
    return launch
