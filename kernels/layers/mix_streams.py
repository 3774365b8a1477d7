"""Join a part's output into several residual streams, and mix the streams into the next part's normalised input."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import FLOAT_DTYPES, check_eps, check_tensor
from ..core.compat import cdiv, dot, tl, triton
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_float, as_int
from ..core.launch import Compute, Launch, nothing, num_warps, strides, wait_for_inputs
from ..core.operation import Run, by_definition, operation
from . import definition
from .streams import check_rows, check_streams, new_streams

# Tokens of a program, the least of `dot`, and columns of a stream: programs share the weights; see limits.md.
_BLOCK_T, _BLOCK_D = 16, 128


@triton.jit
def _join_streams_kernel(
    streams_ptr,  # [num_tokens, COUNT, SIZE]
    output_ptr,  # [num_tokens, SIZE], or None
    joins_ptr,  # float32 [num_tokens, COUNT or COUNT + COUNT * COUNT], or None
    fn_ptr,  # float32 [NUM_WEIGHTS, COUNT * SIZE]
    joined_ptr,  # [num_tokens, COUNT, SIZE], contiguous
    partial_ptr,  # float32 [num_tokens, cdiv(SIZE, BLOCK_D), PADDED]
    num_tokens,
    stride_streams_token,
    stride_streams_stream,
    stride_output_token,
    stride_joins_token,
    stride_fn_weight,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,  # at least NUM_WEIGHTS + 1
    MIXES: tl.constexpr,  # whether joins has shares of streams
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write BLOCK_D columns of the joined streams, and sums over them: products with `fn`, and squares behind them."""
    wait_for_inputs()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_w = tl.arange(0, PADDED)
    is_token, in_size = tokens < num_tokens, offs_d < SIZE
    mask = is_token[:, None] & in_size[None, :]
    streams_ptrs = streams_ptr + tokens[:, None] * stride_streams_token + offs_d[None, :]
    joins_ptrs = joins_ptr
    output = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if output_ptr is not None:
        joins_ptrs += tokens * stride_joins_token
        output_ptrs = output_ptr + tokens[:, None] * stride_output_token + offs_d[None, :]
        output = tl.load(output_ptrs, mask=mask, other=0.0).to(tl.float32)
    products = tl.zeros([BLOCK_T, PADDED], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for stream in range(COUNT):  # unrolled, loads of all streams would take 567 registers more than there are
        joined = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        if output_ptr is not None:
            gain = tl.load(joins_ptrs + stream, mask=is_token, other=0.0)
            joined = gain[:, None] * output
        if MIXES:
            for old in tl.static_range(COUNT):
                share = tl.load(joins_ptrs + COUNT + old * COUNT + stream, mask=is_token, other=0.0)
                old_ptrs = streams_ptrs + old * stride_streams_stream
                joined += share[:, None] * tl.load(old_ptrs, mask=mask, other=0.0).to(tl.float32)
        else:
            joined += tl.load(streams_ptrs + stream * stride_streams_stream, mask=mask, other=0.0).to(tl.float32)
        rounded = joined.to(joined_ptr.dtype.element_ty)
        joined_ptrs = joined_ptr + (tokens[:, None] * COUNT + stream) * SIZE + offs_d[None, :]
        tl.store(joined_ptrs, rounded, mask=mask)
        wide = rounded.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        fn_ptrs = fn_ptr + offs_w[None, :] * stride_fn_weight + stream * SIZE + offs_d[:, None]
        fn = tl.load(fn_ptrs, mask=in_size[:, None] & (offs_w < NUM_WEIGHTS)[None, :], other=0.0)
        products = dot(wide, fn, products)
    sums = tl.where((offs_w == NUM_WEIGHTS)[None, :], squares[:, None], products)
    partial_ptrs = partial_ptr + (tokens[:, None] * tl.num_programs(1) + tl.program_id(1)) * PADDED + offs_w[None, :]
    tl.store(partial_ptrs, sums, mask=is_token[:, None])


@triton.jit
def _collapse_streams_kernel(
    joined_ptr,  # [num_tokens, COUNT, SIZE], contiguous
    partial_ptr,  # float32 [num_tokens, NUM_SPLITS, PADDED]
    base_ptr,  # float32 [NUM_WEIGHTS]
    scale_ptr,  # float32 [1, 2 or 3]
    norm_ptr,  # [SIZE]
    weights_ptr,  # float32 [num_tokens, COUNT], or None
    x_ptr,  # [num_tokens, SIZE], contiguous
    joins_ptr,  # float32 [num_tokens, NUM_WEIGHTS - COUNT], or with weights [num_tokens, NUM_WEIGHTS]; contiguous
    stride_weights_token,
    eps,
    norm_eps,
    magnitude,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    NUM_ITERATIONS: tl.constexpr,  # 0 if streams do not mix
    BLOCK_SIZE: tl.constexpr,
):
    """Make one token's weights from its sums; write its next joins and the RMS norm of its weighted streams.

    With weights of the call before, the token's own are for the next one, and stand before the next joins.
    """
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    offs_s, offs_w = tl.arange(0, SPLITS_PADDED), tl.arange(0, PADDED)
    is_split = offs_s < NUM_SPLITS
    partial_ptrs = partial_ptr + (token * NUM_SPLITS + offs_s) * PADDED
    sums = tl.sum(tl.load(partial_ptrs[:, None] + offs_w[None, :], mask=is_split[:, None], other=0.0), 0)
    squares = tl.sum(tl.where(offs_w == NUM_WEIGHTS, sums, 0.0), 0)
    root = 1.0 / tl.sqrt(squares / (COUNT * SIZE) + norm_eps)

    # Weights of the input, and gains of the output.
    is_weight, is_input = offs_w < NUM_WEIGHTS, offs_w < COUNT
    section = tl.where(is_input, 0, 1)
    is_gain = (offs_w >= COUNT) & (offs_w < 2 * COUNT) & is_weight
    factors = tl.load(scale_ptr + section, mask=is_input | is_gain, other=0.0)
    logits = sums * root * factors + tl.load(base_ptr + offs_w, mask=is_weight, other=0.0)
    sigmoids = 1.0 / (1.0 + tl.exp(-logits))
    gains = magnitude * sigmoids
    if NUM_ITERATIONS == 0:
        gains += eps
    token_joins_ptr = joins_ptr + token * (NUM_WEIGHTS - COUNT)
    if weights_ptr is not None:
        tl.store(joins_ptr + token * NUM_WEIGHTS + offs_w, sigmoids + eps, mask=is_input)
        token_joins_ptr = joins_ptr + token * NUM_WEIGHTS + COUNT
    tl.store(token_joins_ptr + offs_w - COUNT, gains, mask=is_gain)

    # Shares of old streams (rows) in new ones (columns): Sinkhorn's iterations let rows and columns sum to 1.
    if NUM_ITERATIONS > 0:
        offs_n = tl.arange(0, COUNT_PADDED)
        is_share = (offs_n < COUNT)[:, None] & (offs_n < COUNT)[None, :]
        places = 2 * COUNT + offs_n[:, None] * COUNT + offs_n[None, :]
        share_ptrs = partial_ptrs[:, None, None] + places[None, :, :]
        shares = tl.sum(tl.load(share_ptrs, mask=is_split[:, None, None] & is_share[None, :, :], other=0.0), 0)
        shares = shares * root * tl.load(scale_ptr + 2) + tl.load(base_ptr + places, mask=is_share, other=0.0)
        shares = tl.where(is_share, shares, float("-inf"))
        largest = tl.where(offs_n < COUNT, tl.max(shares, 1), 0.0)
        shares = tl.exp(shares - largest[:, None])
        totals = tl.where(offs_n < COUNT, tl.sum(shares, 1), 1.0)
        shares = tl.where(is_share, shares / totals[:, None] + eps, 0.0)
        shares = shares / (tl.sum(shares, 0) + eps)[None, :]
        for _ in range(NUM_ITERATIONS - 1):
            shares = shares / (tl.sum(shares, 1) + eps)[:, None]
            shares = shares / (tl.sum(shares, 0) + eps)[None, :]
        tl.store(token_joins_ptr + places - COUNT, shares, mask=is_share)

    # The next input.
    offs_d = tl.arange(0, BLOCK_SIZE)
    in_size = offs_d < SIZE
    x = tl.zeros([BLOCK_SIZE], tl.float32)
    for stream in tl.static_range(COUNT):
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token * stride_weights_token + stream)
        else:
            weight = tl.sum(tl.where(offs_w == stream, sigmoids, 0.0), 0) + eps
        row_ptr = joined_ptr + (token * COUNT + stream) * SIZE
        x += weight * tl.load(row_ptr + offs_d, mask=in_size, other=0.0).to(tl.float32)
    variance = tl.sum(x * x, 0) / SIZE
    normed = x / tl.sqrt(variance + norm_eps) * tl.load(norm_ptr + offs_d, mask=in_size, other=0.0).to(tl.float32)
    tl.store(x_ptr + token * SIZE + offs_d, normed.to(x_ptr.dtype.element_ty), mask=in_size)


def _new_results(
    streams: torch.Tensor, base: torch.Tensor, weights: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, ...]:
    num_joins = len(base)
    if weights is None:
        num_joins -= streams.shape[1]
    joins = torch.empty(len(streams), num_joins, dtype=torch.float32, device=streams.device)
    return *new_streams(streams), joins


@operation(_new_results, results="Tensor x, Tensor joined, Tensor next_joins")
def mix_streams(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    joins: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    magnitude: float = 2.0,
    num_iterations: int = 0,
) -> Run[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Join a part's output into N residual streams, and make the next part's normalised input of them.

    New stream n is gain_n * output + sum_o share_on * stream_o, rounded to its dtype. `fn` times the new streams,
    divided by their root mean square, gives logits. With `scale` and `base`, the first N logits give weights
    sigmoid + eps of the streams in the input, which is then RMS-normalised. The others give the next joins: N gains
    magnitude * sigmoid, then N * N shares, a softmax over new streams after Sinkhorn's iterations (manifold-constrained
    hyper-connections; Xie et al., 2026). Without shares a new stream is gain * output + stream, and eps is added to
    gains (independent hyper-connections of HY-V4; Tencent, 2026). All is float32.

    With `weights`, the input has these weights, and those of the logits are returned for the next call (single-pass
    hyper-connections of DeepSeek-V4.1; DeepSeek-AI, 2026).

    Args:
        streams: [num_tokens, N, size], float32, float16 or bfloat16, last dimension contiguous; N up to 8.
        output: [num_tokens, size], dtype of streams, last dimension contiguous; None joins nothing.
        joins: float32 [num_tokens, N] or [num_tokens, N + N * N], last dimension contiguous: the call before returned
            it. None without an output.
        fn: float32 [num_weights, N * size], last dimension contiguous. num_weights is N (no next joins), 2 N, or
            2 N + N * N.
        base: float32 [num_weights], contiguous.
        scale: float32 [1], [2] or [3], contiguous: one factor for the logits of each kind.
        norm_weight: [size], any float dtype, contiguous.
        weights: float32 [num_tokens, N], last dimension contiguous: weights of the streams in the input; None for those
            of the logits.
        eps: added to weights and to sums of shares; at least 0.
        norm_eps: added to mean squares; at least 0.
        magnitude: limit of gains.
        num_iterations: iterations of Sinkhorn's, at least 1 with N * N shares; 0 without.

    Returns:
        (input [num_tokens, size], new streams like `streams`, next joins float32 [num_tokens, num_weights - N]). With
        `weights`, N columns with the next weights stand before the next joins.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    eps, norm_eps = check_eps(eps), check_eps(norm_eps)
    magnitude, num_iterations = as_float("magnitude", magnitude, 0.0, 1e30), as_int("num_iterations", num_iterations, 0)
    _check(streams, output, joins, fn, base, scale, norm_weight, weights, num_iterations)
    options = {"eps": eps, "norm_eps": norm_eps, "magnitude": magnitude}
    num_tokens, count, size = streams.shape
    if not use_triton(streams):
        return by_definition(definition.mix_streams, streams.dtype, 2, **options, num_iterations=num_iterations)
    num_splits = cdiv(size, _BLOCK_D)
    padded = max(16, triton.next_power_of_2(len(base) + 1)) if streams.numel() else 0
    join: Compute = nothing
    collapse: Compute = nothing
    if streams.numel():
        sizes = {"COUNT": count, "SIZE": size, "NUM_WEIGHTS": len(base), "PADDED": padded}
        join = Launch(
            _join_streams_kernel,
            (cdiv(num_tokens, _BLOCK_T), num_splits),
            {
                "num_tokens": num_tokens,
                **strides("token stream", streams=streams),
                **strides("token", output=output, joins=joins),
                **strides("weight", fn=fn),
                **sizes,
                "MIXES": joins is not None and joins.shape[1] > count,
                "BLOCK_T": _BLOCK_T,
                "BLOCK_D": _BLOCK_D,
            },
            num_warps=4,
            num_stages=1,
        )
        block_size = triton.next_power_of_2(size)
        collapse = Launch(
            _collapse_streams_kernel,
            (num_tokens,),
            {
                **options,
                **sizes,
                **strides("token", weights=weights),
                "COUNT_PADDED": triton.next_power_of_2(count),
                "NUM_SPLITS": num_splits,
                "SPLITS_PADDED": triton.next_power_of_2(num_splits),
                "NUM_ITERATIONS": num_iterations,
                "BLOCK_SIZE": block_size,
            },
            num_warps=num_warps(block_size),
        )

    def run(
        streams: torch.Tensor,
        output: torch.Tensor | None,
        joins: torch.Tensor | None,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm_weight: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, joined, next_joins = _new_results(streams, base, weights)
        partial = torch.empty(len(streams), num_splits, padded, dtype=torch.float32, device=streams.device)
        tensors = {"fn_ptr": fn, "base_ptr": base, "scale_ptr": scale, "norm_ptr": norm_weight}
        tensors |= {"joined_ptr": joined, "partial_ptr": partial}
        join({**tensors, "streams_ptr": streams, "output_ptr": output, "joins_ptr": joins})
        collapse({**tensors, "weights_ptr": weights, "x_ptr": x, "joins_ptr": next_joins})
        return x, joined, next_joins

    return run


def _check(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    joins: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    weights: torch.Tensor | None,
    num_iterations: int,
) -> None:
    """Raise InvalidInputError unless the arguments fit together."""
    check_streams(streams, output, "joins", joins)
    num_tokens, count, size = streams.shape
    float32, device = (torch.float32,), streams.device
    if joins is not None:
        check_tensor("joins", joins, (num_tokens, "N or N + N * N"), float32, device)
        if joins.shape[1] not in (count, count + count * count):
            expected = f"{count} or {count + count * count}"
            raise InvalidInputError(f"joins: {joins.shape[1]} columns, expected {expected} for {count} streams")
    check_tensor("base", base, ("num_weights",), float32, device)
    kinds = [count, 2 * count, (2 + count) * count]
    if len(base) not in kinds:
        raise InvalidInputError(f"base: {len(base)} weights, expected one of {kinds} for {count} streams")
    num_kinds = kinds.index(len(base)) + 1
    if (num_kinds == 3) != (num_iterations > 0):
        expected = "at least 1" if num_kinds == 3 else "0"
        raise InvalidInputError(f"num_iterations: {num_iterations}, expected {expected} with {len(base)} weights")
    check_tensor("fn", fn, (len(base), count * size), float32, device)
    check_tensor("scale", scale, (num_kinds,), float32, device)
    check_tensor("norm_weight", norm_weight, (size,), FLOAT_DTYPES, device)
    if weights is not None:
        check_tensor("weights", weights, (num_tokens, count), float32, device)
    check_rows(streams=streams, output=output, joins=joins, fn=fn)
    check_rows(base=base, scale=scale, norm_weight=norm_weight, weights=weights)
