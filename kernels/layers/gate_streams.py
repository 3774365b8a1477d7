"""Join a part's output into residual streams that keep apart, and make the next part's input by low-rank gates."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ..core.checks import FLOAT_DTYPES, check_eps, check_tensor
from ..core.compat import cdiv, dot, tl, triton
from ..core.device import takes_numba, use_triton
from ..core.errors import InvalidInputError
from ..core.launch import Compute, Launch, strides, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .linear import linear
from .streams import check_rows, check_streams, new_streams

# With more tokens, a library's products are faster than tiles of 16 tokens, the least of `dot`.
MAX_FUSED_TOKENS = 64
_BLOCK_T = 16
# The first launch splits columns and weights among programs, the last one the input's columns; see limits.md.
_SPLIT_SIZE, _BLOCK_D_BYTES, _BLOCK_W = 256, 256, 64
_BLOCK_C, _BLOCK_R = 32, 64


@triton.jit
def _join_gated_streams_kernel(
    streams_ptr,  # [num_tokens, COUNT, SIZE]
    output_ptr,  # [num_tokens, SIZE], or None
    gains_ptr,  # float32 [num_tokens, COUNT], or None
    norm_ptr,  # [COUNT * SIZE]
    down_ptr,  # [NUM_WEIGHTS, COUNT * SIZE]
    joined_ptr,  # [num_tokens, COUNT, SIZE], contiguous
    partial_ptr,  # float32 [num_tokens, COUNT * NUM_SPLITS, NUM_WEIGHTS + 1]
    num_tokens,
    stride_streams_token,
    stride_streams_stream,
    stride_output_token,
    stride_gains_token,
    stride_down_weight,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Join columns of a stream, and multiply them with weights: products before the norm, and squares behind them."""
    wait_for_inputs()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, is_first = tl.program_id(1), tl.program_id(2) == 0
    stream = part // NUM_SPLITS
    offs_w = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_token, is_weight = tokens < num_tokens, offs_w < NUM_WEIGHTS
    gain = tl.zeros([BLOCK_T], tl.float32)
    if output_ptr is not None:
        gain = tl.load(gains_ptr + tokens * stride_gains_token + stream, mask=is_token, other=0.0)
    products = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, SPLIT_SIZE, BLOCK_D):
        offs_d = part % NUM_SPLITS * SPLIT_SIZE + start + tl.arange(0, BLOCK_D)
        in_size = offs_d < SIZE
        mask = is_token[:, None] & in_size[None, :]
        streams_ptrs = streams_ptr + tokens[:, None] * stride_streams_token + stream * stride_streams_stream
        joined = tl.load(streams_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        if output_ptr is not None:
            output_ptrs = output_ptr + tokens[:, None] * stride_output_token + offs_d[None, :]
            joined += gain[:, None] * tl.load(output_ptrs, mask=mask, other=0.0).to(tl.float32)
        rounded = joined.to(joined_ptr.dtype.element_ty)
        joined_ptrs = joined_ptr + (tokens[:, None] * COUNT + stream) * SIZE + offs_d[None, :]
        tl.store(joined_ptrs, rounded, mask=mask & is_first)
        wide = rounded.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        weighted = wide * tl.load(norm_ptr + stream * SIZE + offs_d, mask=in_size, other=0.0).to(tl.float32)[None, :]
        down_ptrs = down_ptr + offs_w[None, :].to(tl.int64) * stride_down_weight + stream * SIZE + offs_d[:, None]
        down = tl.load(down_ptrs, mask=in_size[:, None] & is_weight[None, :], other=0.0)
        if down_ptr.dtype.element_ty == tl.bfloat16:
            products = dot(weighted.to(tl.bfloat16), down, products)
        else:  # streams without a norm may exceed the range of float16
            products = dot(weighted, down.to(tl.float32), products)
    rows = partial_ptr + (tokens * tl.num_programs(1) + part) * (NUM_WEIGHTS + 1)
    tl.store(rows[:, None] + offs_w[None, :], products, mask=is_token[:, None] & is_weight[None, :])
    tl.store(rows + NUM_WEIGHTS, squares, mask=is_token & is_first)


@triton.jit
def _sum_gated_streams_kernel(
    partial_ptr,  # float32 [num_tokens, COUNT * NUM_SPLITS, NUM_WEIGHTS + 1]
    roots_ptr,  # float32 [num_tokens, COUNT]
    inner_ptr,  # [num_tokens, RANK]
    gains_ptr,  # float32 [num_tokens, NUM_WEIGHTS - RANK]
    eps,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Normalise and add one token's products: write the gates' inner numbers, the next gains and the streams' roots."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    offs_p, offs_s = tl.arange(0, PARTS_PADDED), tl.arange(0, SPLITS_PADDED)
    offs_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_part, is_weight = offs_p < COUNT * NUM_SPLITS, offs_w < NUM_WEIGHTS
    token_ptr = partial_ptr + token * (COUNT * NUM_SPLITS) * (NUM_WEIGHTS + 1)
    # Squares of all parts of the part's stream.
    parts = (offs_p // NUM_SPLITS * NUM_SPLITS)[:, None] + offs_s[None, :]
    square_mask = is_part[:, None] & (offs_s < NUM_SPLITS)[None, :]
    squares = tl.load(token_ptr + parts * (NUM_WEIGHTS + 1) + NUM_WEIGHTS, mask=square_mask, other=0.0)
    roots = 1.0 / tl.sqrt(tl.sum(squares, 1) / SIZE + eps)
    if tl.program_id(1) == 0:
        is_first = is_part & (offs_p % NUM_SPLITS == 0)
        tl.store(roots_ptr + token * COUNT + offs_p // NUM_SPLITS, roots, mask=is_first)
    product_ptrs = token_ptr + offs_p[:, None] * (NUM_WEIGHTS + 1) + offs_w[None, :]
    products = tl.load(product_ptrs, mask=is_part[:, None] & is_weight[None, :], other=0.0)
    sums = tl.sum(tl.where(is_part[:, None], products * roots[:, None], 0.0), 0) / COUNT
    sigmoids = 1.0 / (1.0 + tl.exp(-sums))
    inner = (sums * sigmoids).to(inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + token * RANK + offs_w, inner, mask=offs_w < RANK)
    gain_ptrs = gains_ptr + token * (NUM_WEIGHTS - RANK) + offs_w - RANK
    tl.store(gain_ptrs, 2.0 * sigmoids, mask=(offs_w >= RANK) & is_weight)


@triton.jit
def _gate_streams_kernel(
    joined_ptr,  # [num_tokens, COUNT, SIZE], contiguous
    roots_ptr,  # float32 [num_tokens, COUNT]
    norm_ptr,  # [COUNT * SIZE]
    inner_ptr,  # [num_tokens, RANK]
    up_ptr,  # [COUNT * SIZE, RANK]
    x_ptr,  # [num_tokens, SIZE], contiguous
    num_tokens,
    stride_up_channel,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write columns of the mean of normalised streams times their gates."""
    wait_for_inputs()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, in_size = tokens < num_tokens, offs_c < SIZE
    mask = is_token[:, None] & in_size[None, :]
    x = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for stream in range(COUNT):
        logits = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        channels = stream * SIZE + offs_c
        for start in range(0, RANK, BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R)
            in_rank = offs_r < RANK
            inner_ptrs = inner_ptr + tokens[:, None] * RANK + offs_r[None, :]
            inner = tl.load(inner_ptrs, mask=is_token[:, None] & in_rank[None, :], other=0.0)
            up_ptrs = up_ptr + channels[None, :].to(tl.int64) * stride_up_channel + offs_r[:, None]
            up = tl.load(up_ptrs, mask=in_rank[:, None] & in_size[None, :], other=0.0)
            logits = dot(inner, up, logits)
        root = tl.load(roots_ptr + tokens * COUNT + stream, mask=is_token, other=0.0)
        row_ptrs = joined_ptr + (tokens[:, None] * COUNT + stream) * SIZE + offs_c[None, :]
        joined = tl.load(row_ptrs, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + channels, mask=in_size, other=0.0).to(tl.float32)
        x += joined * root[:, None] * weight[None, :] / (1.0 + tl.exp(-logits))
    x_ptrs = x_ptr + tokens[:, None] * SIZE + offs_c[None, :]
    tl.store(x_ptrs, (x / COUNT).to(x_ptr.dtype.element_ty), mask=mask)


def _new_results(
    streams: torch.Tensor, down: torch.Tensor, up: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    next_gains = torch.empty(len(streams), len(down) - up.shape[1], dtype=torch.float32, device=streams.device)
    return *new_streams(streams), next_gains


@operation(_new_results, results="Tensor x, Tensor joined, Tensor next_gains")
def gate_streams(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    norm_weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> Run[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Join a part's output into N residual streams, and make the next part's input of them by low-rank gates.

    New stream i is gain_i * output + stream_i, rounded to its dtype, and n_i is its RMS norm. The input is
    mean_i(sigmoid(up silu(down n / N))_i * n_i), and the next gains are 2 sigmoid(w_i n / N), where n are all n_i side
    by side, and w the last N rows of `down` (the gated residual of Qwen4-Exp; Qwen, 2026). Sums are float32. Operands
    of products, and the gates' inner numbers, are rounded to the dtype of streams.

    Up to 64 tokens take three launches on a GPU; more tokens take a library's products.

    Args:
        streams: [num_tokens, N, size], float32, float16 or bfloat16, last dimension contiguous; N up to 8.
        output: [num_tokens, size], dtype of streams, last dimension contiguous; None joins nothing.
        gains: float32 [num_tokens, N], last dimension contiguous: the call before returned it. None without an output.
        norm_weight: [N * size], any float dtype, contiguous.
        down: [rank + N, N * size], or [rank, N * size] for no next gains; dtype of streams, last dimension contiguous.
        up: [N * size, rank], dtype of streams, last dimension contiguous.
        eps: added to mean squares; at least 0.

    Returns:
        (input [num_tokens, size], new streams like `streams`, next gains float32 [num_tokens, N or 0]).

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    eps = check_eps(eps)
    _check(streams, output, gains, norm_weight, down, up)
    if streams.numel() and use_triton(streams) and len(streams) <= MAX_FUSED_TOKENS:
        compute = _fused(streams, output, gains, down, up, eps)
    else:
        compute = _by_products(streams, output, gains, norm_weight, up, eps)

    def run(
        streams: torch.Tensor,
        output: torch.Tensor | None,
        gains: torch.Tensor | None,
        norm_weight: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, joined, next_gains = _new_results(streams, down, up)
        tensors = {"streams_ptr": streams, "output_ptr": output, "gains_ptr": gains}
        tensors |= {"norm_ptr": norm_weight, "down_ptr": down, "up_ptr": up}
        compute({**tensors, "x_ptr": x, "joined_ptr": joined, "next_gains_ptr": next_gains})
        return x, joined, next_gains

    return run


def _fused(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    eps: float,
) -> Compute:
    """Return a function that computes by three launches."""
    num_tokens, count, size = streams.shape
    num_weights, rank = len(down), up.shape[1]
    num_splits, num_chunks = cdiv(size, _SPLIT_SIZE), cdiv(num_weights, _BLOCK_W)
    num_blocks, num_parts = cdiv(num_tokens, _BLOCK_T), count * num_splits
    sizes = {"COUNT": count, "SIZE": size}
    split = {"NUM_SPLITS": num_splits, "NUM_WEIGHTS": num_weights, "BLOCK_W": _BLOCK_W}
    join = Launch(
        _join_gated_streams_kernel,
        (num_blocks, num_parts, num_chunks),
        {
            "num_tokens": num_tokens,
            **strides("token stream", streams=streams),
            **strides("token", output=output, gains=gains),
            **strides("weight", down=down),
            **sizes,
            **split,
            "SPLIT_SIZE": _SPLIT_SIZE,
            "BLOCK_T": _BLOCK_T,
            "BLOCK_D": _BLOCK_D_BYTES // streams.element_size(),
        },
        num_warps=4,
    )
    add = Launch(
        _sum_gated_streams_kernel,
        (num_tokens, num_chunks),
        {
            "eps": eps,
            **sizes,
            **split,
            "RANK": rank,
            "PARTS_PADDED": triton.next_power_of_2(num_parts),
            "SPLITS_PADDED": triton.next_power_of_2(num_splits),
        },
        num_warps=4,
    )
    gate = Launch(
        _gate_streams_kernel,
        (num_blocks, cdiv(size, _BLOCK_C)),
        {
            "num_tokens": num_tokens,
            **strides("channel", up=up),
            **sizes,
            "RANK": rank,
            "BLOCK_T": _BLOCK_T,
            "BLOCK_C": _BLOCK_C,
            "BLOCK_R": _BLOCK_R,
        },
        num_warps=4,
    )

    def compute(tensors: dict[str, Any]) -> None:
        streams = tensors["streams_ptr"]
        scratch = {
            "partial_ptr": streams.new_empty(num_tokens, num_parts, num_weights + 1, dtype=torch.float32),
            "roots_ptr": streams.new_empty(num_tokens, count, dtype=torch.float32),
            "inner_ptr": streams.new_empty(num_tokens, rank),
        }
        tensors |= scratch
        join(tensors)
        add({**tensors, "gains_ptr": tensors["next_gains_ptr"]})
        gate(tensors)

    return compute


def _by_products(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    norm_weight: torch.Tensor,
    up: torch.Tensor,
    eps: float,
) -> Compute:
    """Return a function that multiplies as `linear` does, with numba kernels before and behind on a CPU."""
    count, rank = streams.shape[1], up.shape[1]
    kernels: Any = None
    if streams.numel() and takes_numba(streams, output, weights=[norm_weight]):
        from ..cpu.layers import gate_streams as numba_kernels

        kernels = numba_kernels.launches_for(streams, output, gains, norm_weight, eps)

    def compute(tensors: dict[str, Any]) -> None:
        joined, x = tensors["joined_ptr"], tensors["x_ptr"]
        normed = torch.empty_like(joined)  # [T, N, size]
        if kernels is None:
            streams, output, gains = tensors["streams_ptr"], tensors["output_ptr"], tensors["gains_ptr"]
            joined.copy_(definition.join_streams(streams, output, gains, compute=torch.float32))
            weight = tensors["norm_ptr"].view(count, -1)
            normed.copy_(definition.rms_norm(joined, weight, eps, compute=torch.float32))
        else:
            kernels.join({**tensors, "normed_ptr": normed})
        sums = linear(normed.flatten(1), tensors["down_ptr"]) / count  # [T, rank + N]
        inner = functional.silu(sums[:, :rank])
        logits = linear(inner, tensors["up_ptr"])  # [T, N * size]
        if kernels is None:
            gates = logits.float().sigmoid().view(normed.shape)
            x.copy_(gates.mul_(normed).mean(1))
        else:
            kernels.gate({"logits_ptr": logits, "normed_ptr": normed, "x_ptr": x})
        torch.mul(sums[:, rank:].float().sigmoid(), 2, out=tensors["next_gains_ptr"])

    return compute


def _check(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    norm_weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
) -> None:
    """Raise InvalidInputError unless the arguments fit together."""
    check_streams(streams, output, "gains", gains)
    num_tokens, count, size = streams.shape
    dtype, device = (streams.dtype,), streams.device
    if gains is not None:
        check_tensor("gains", gains, (num_tokens, count), (torch.float32,), device)
    check_tensor("norm_weight", norm_weight, (count * size,), FLOAT_DTYPES, device)
    check_tensor("up", up, (count * size, "rank"), dtype, device)
    rank = up.shape[1]
    check_tensor("down", down, ("rank or rank + N", count * size), dtype, device)
    if rank == 0 or len(down) not in (rank, rank + count):
        expected = f"{max(rank, 1)} or {max(rank, 1) + count}"
        raise InvalidInputError(f"down: {len(down)} rows, expected {expected} for rank {rank} and {count} streams")
    check_rows(streams=streams, output=output, gains=gains, norm_weight=norm_weight, down=down, up=up)
