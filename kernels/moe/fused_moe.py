"""Fused mixture of experts: two grouped products around a gated activation, and the sum over each token's experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..core.checks import check_contiguous, check_is_tensor, check_shape, check_strided_out, check_tensor
from ..core.compat import tl, triton
from ..core.custom_ops import Arguments
from ..core.device import device_of, takes_numba, use_triton
from ..core.errors import InvalidInputError, as_bool, as_int, shown
from ..core.launch import Launch, wait_for_inputs
from ..core.operation import Run, like_the_first, operation
from ..layers.activation import ACTIVATIONS, PLAIN_ACTIVATIONS, check_activation
from . import definition, plain_experts
from .config import MoeShape, MoeTiles, moe_tiles, takes_gemv
from .gemm import expert_gemm
from .gemv import moe_gemv
from .moe_align_block_size import (
    MoeAlignment,
    check_expert_map,
    expert_rows,
    moe_align_block_size,
    num_mapped,
)
from .route_and_align import MAX_FUSED_TOKENS
from .weights import ExpertLinear, MoeCall, check_operands


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
    """Add one token's weighted parts, always in the same order.

    Parts of experts that other ranks hold were never written and are not read. A NaN weight makes the row NaN, even if
    its id names no expert.
    """
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < HIDDEN_SIZE
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    # Unroll, so that all loads start before the first addition.
    for k in tl.static_range(TOP_K):
        entry = token * TOP_K + k
        is_here = expert_rows(tl.load(ids_ptr + entry), expert_map_ptr, num_mapped, NUM_EXPERTS) >= 0
        weight = tl.load(weights_ptr + entry)
        part = tl.load(parts_ptr + entry * HIDDEN_SIZE + offs, mask=mask & is_here, other=0.0)
        total += tl.where(weight == weight, part.to(tl.float32), weight)
    tl.store(out_ptr + token * stride_out_token + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def _decode(arguments: Arguments) -> None:
    aligned = arguments.get("aligned")
    if aligned is not None:
        arguments["aligned"] = MoeAlignment(*aligned)


@operation(
    lambda hidden_states, **_: like_the_first(hidden_states),
    arguments={"aligned": "Tensor[]? aligned=None"},
    decode=_decode,
)
def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    aligned: MoeAlignment | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zeros: torch.Tensor | None = None,
    w2_zeros: torch.Tensor | None = None,
    w1_tensor_scale: torch.Tensor | None = None,
    w2_tensor_scale: torch.Tensor | None = None,
) -> Run[torch.Tensor]:
    """Run each token through its experts and return the weighted sum.

    For expert e: w2[e] @ act(gate, up) + w2_bias[e] with (gate, up) = w1[e] @ x + w1_bias[e]. Sums are float32. The
    activation and each weighted part are rounded to the dtype of hidden_states; so is the input of an activation
    without gate. Results have the same bits in every run.

    Args:
        hidden_states: [num_tokens, hidden_size], float32, float16 or bfloat16, last dimension contiguous.
        w1: [num_experts, 2 * intermediate_size, hidden_size], gate rows then up rows, last dimension contiguous; half
            as many rows without gate.
        w2: [num_experts, hidden_size, intermediate_size], last dimension contiguous.
        topk_weights: float32 [num_tokens, top_k], contiguous. A NaN makes its token's row NaN, and no other row.
        topk_ids: int32 [num_tokens, top_k], contiguous. An id that names no expert contributes nothing. Shared experts
            are the last rows of w1 and w2, and every token names them, see `route_tokens`.
        activation: "silu", "gelu" or "gelu_tanh" (its tanh approximation) of the gate, times up. "swiglu_oai" is
            min(gate, 7) sigmoid(1.702 min(gate, 7)) (1 + up) with up clamped to [-7, 7] (gpt-oss, OpenAI, 2025).
            "situ" is 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25) (Kimi K3, Moonshot AI, 2026), "silu_10"
            silu(min(gate, 10)) up with up clamped to [-10, 10] (GLM-5.3, Z.ai, 2026).
            "relu2" is max(up, 0)^2 (So et al., 2021) for experts without gate rows.
        expert_map: int32 [num_global_experts], contiguous: row of each expert in w1 and w2, or -1 if another rank holds
            it. Such an expert costs nothing and contributes nothing, so the sum of the ranks' results is the full
            result. None if ids are rows.
        out: like hidden_states, last dimension contiguous; None makes one.
        w1_bias: [num_experts, 2 * intermediate_size] in the order of w1's rows, dtype of hidden_states or float32,
            contiguous.
        w2_bias: [num_experts, hidden_size], dtype of hidden_states or float32, contiguous.
        interleaved: whether w1's gate and up rows alternate.
        aligned: result of `route_and_align` or `moe_align_block_size` for these ids and this expert_map, with the block
            size that `moe_block_size` returns; None makes one.
        w1_scale, w2_scale: scales of quantised weights, any strides: one per expert [num_experts], per row
            [num_experts, rows], or per group [num_experts, rows / group_n, columns / group_k]; see below.
        w1_zeros, w2_zeros: int8 in the shape of the scales, the code of 0; None for 0 (int8) or 8 (int4). Other formats
            take none.
        w1_tensor_scale, w2_tensor_scale: float32 [num_experts], a factor for an expert's weights; None for 1.

    Quantised weights:

    - float8_e4m3fn: float32 scales, groups of 128 x 128 (the last ones may be smaller). Activations are rounded to e4m3
      with a scale for every 128 values of a token.
    - int8, or uint8 with two 4-bit codes a byte, the first in the low bits: scales of any float dtype, groups of one
      row and a multiple of 32 columns.
    - int32 [num_experts, rows, 16 * ceil(columns / 128)], 4-bit codes as `pack_codes` orders them: int4 with scales as
      for bytes; MXFP4 with uint8 or float8_e8m0fnu scales, 2^(byte - 127), for 32 columns; NVFP4 with float8_e4m3fn
      scales for 16 columns, none negative. Either both w1 and w2 are words, or neither is. Scales that span fewer than
      128 columns are applied in the dtype of hidden_states and must be in its range. A scale's read is fastest if rows
      are neighbours in memory.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or `aligned` has another block size.
        UnsupportedError: the activation or the group size is not supported, or an argument requires a gradient.
    """
    if aligned is not None and not isinstance(aligned, MoeAlignment):
        raise InvalidInputError(f"aligned: {shown(aligned)}, expected a MoeAlignment")
    gate_up = ExpertLinear(w1, w1_bias, w1_scale, w1_zeros, w1_tensor_scale)
    down = ExpertLinear(w2, w2_bias, w2_scale, w2_zeros, w2_tensor_scale)
    check_is_tensor("hidden_states", hidden_states)
    check_activation(activation, ACTIVATIONS + PLAIN_ACTIVATIONS)
    is_gated = activation not in PLAIN_ACTIVATIONS
    interleaved = as_bool("interleaved", interleaved)
    check_operands(hidden_states, gate_up, down, topk_weights, topk_ids, is_gated=is_gated)
    check_expert_map(expert_map, hidden_states.device)
    check_strided_out(out, hidden_states.shape, hidden_states)
    if hidden_states.numel() == 0:
        compute: Callable[[MoeCall, MoeAlignment | None], object] = _do_nothing
    elif use_triton(hidden_states):
        compute = _bind_triton(hidden_states, down, topk_ids, expert_map, aligned, is_gated)
    else:
        compute = _bind_cpu(hidden_states, gate_up, down, topk_ids)

    def run(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        aligned: MoeAlignment | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_zeros: torch.Tensor | None = None,
        w2_zeros: torch.Tensor | None = None,
        w1_tensor_scale: torch.Tensor | None = None,
        w2_tensor_scale: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        gate_up = ExpertLinear(w1, w1_bias, w1_scale, w1_zeros, w1_tensor_scale)
        down = ExpertLinear(w2, w2_bias, w2_scale, w2_zeros, w2_tensor_scale)
        routes = topk_weights, topk_ids, expert_map
        compute(MoeCall(hidden_states, gate_up, down, *routes, out, activation, interleaved), aligned)
        return out

    return run


def _do_nothing(_call: MoeCall, _aligned: MoeAlignment | None) -> None:
    """Do nothing: the launch for an output without elements."""


def _bind_cpu(
    hidden_states: torch.Tensor, gate_up: ExpertLinear, down: ExpertLinear, topk_ids: torch.Tensor
) -> Callable[[MoeCall, MoeAlignment | None], object]:
    is_plain = (gate_up.format, down.format) == ("", "")
    if is_plain and takes_numba(hidden_states):
        return plain_experts.bind(gate_up, down, topk_ids)
    return _by_definition


def _by_definition(call: MoeCall, _: MoeAlignment | None) -> None:
    result = definition.sum_of_experts(
        call.hidden_states,
        partial(definition.grouped_product, call.gate_up, compute=torch.float32),
        partial(definition.grouped_product, call.down, compute=torch.float32),
        call.topk_weights,
        call.topk_ids,
        len(call.gate_up.w),
        activation=call.activation,
        expert_map=call.expert_map,
        interleaved=call.interleaved,
        compute=torch.float32,
    )
    call.out.copy_(result)


def has_invariant_rows(gate_up: ExpertLinear, down: ExpertLinear) -> bool:
    """Return whether numba kernels multiply these experts so that a row's bits do not depend on other rows."""
    if (gate_up.format, down.format) != ("", ""):
        return False
    if not takes_numba(gate_up.w, down.w):
        return False
    from ..cpu.layers.linear import takes_rows

    return takes_rows(gate_up.w) and takes_rows(down.w)


def _bind_triton(
    hidden_states: torch.Tensor,
    down: ExpertLinear,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    aligned: MoeAlignment | None,
    is_gated: bool,
) -> Callable[[MoeCall, MoeAlignment | None], object]:
    num_tokens, top_k = topk_ids.shape
    tiles = _chosen_tiles(num_tokens, top_k, down, hidden_states.dtype, expert_map, is_gated)
    if tiles is not None and aligned is not None:
        _check_aligned(aligned, topk_ids, tiles.gate_up.block_m, len(down.w))
    bound: Any = None

    def compute(call: MoeCall, aligned: MoeAlignment | None) -> None:
        nonlocal bound
        if tiles is None:
            bound = moe_gemv(call, bound)
        else:
            bound = _grouped(call, aligned, tiles, bound)

    return compute


def _grouped(
    call: MoeCall, aligned: MoeAlignment | None, tiles: MoeTiles, bound: tuple[Any, ...] | None
) -> tuple[Any, ...]:
    """Run two grouped products and the sum into `call.out`.

    bound: result of an earlier call, see `Operation.bind`.
    """
    x, ids, (num_experts, hidden_size, _) = call.hidden_states, call.topk_ids, call.down.w.shape
    first, second, third, align = bound or (None, None, None, None)
    if aligned is None:
        sizes = tiles.gate_up.block_m, num_experts
        align = align or moe_align_block_size.bind(ids, *sizes, expert_map=call.expert_map)
        aligned = align(ids, *sizes, expert_map=call.expert_map)
    is_plain = call.activation in PLAIN_ACTIVATIONS
    activation = "" if is_plain else call.activation
    activated = x.new_empty((ids.numel(), call.intermediate_size))
    first = expert_gemm(
        x,
        call.gate_up,
        activated,
        aligned,
        tiles.gate_up,
        activation=activation,
        interleaved=call.interleaved,
        entries_per_row=ids.shape[1],
        bound=first,
    )
    if is_plain:
        activated.relu_().square_()
    parts, weights = x.new_empty((ids.numel(), hidden_size)), call.topk_weights
    second = expert_gemm(activated, call.down, parts, aligned, tiles.down, entry_weights=weights, bound=second)
    third = moe_sum(parts, weights, ids, num_experts, call.expert_map, call.out, third)
    return first, second, third, align


def moe_sum(
    parts: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    launch: Launch | None = None,
) -> Launch:
    """Add up each token's parts: out[token] = sum of its rows of [num_tokens * top_k, hidden_size], already weighted.

    launch: result of an earlier call with the same number of experts and tensors of the same signatures.
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


def moe_block_size(
    num_tokens: int,
    top_k: int,
    w2: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    is_gated: bool = True,
) -> int | None:
    """Return the block size of the alignment that `fused_moe` takes for this many tokens; None if it takes none.

    dtype: dtype of hidden_states; None for the dtype of w2.
    is_gated: whether w1 has gate rows.
    """
    if torch.compiler.is_dynamo_compiling():  # a graph must not depend on the number of tokens
        return None
    check_shape("w2", w2, ("num_experts", "hidden_size", "intermediate_size"))
    num_tokens, top_k = as_int("num_tokens", num_tokens), as_int("top_k", top_k, 1)
    if num_tokens == 0 or not use_triton(w2):
        return None
    down = ExpertLinear(w2, scale=w2_scale)
    tiles = _chosen_tiles(num_tokens, top_k, down, dtype or w2.dtype, expert_map, is_gated)
    if tiles is None:
        return None
    return tiles.gate_up.block_m


def token_counts(
    max_tokens: int,
    top_k: int,
    w2: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    is_gated: bool = True,
) -> list[int]:
    """Return the smallest number of tokens, 1 to max_tokens, for each path of `fused_moe` and its routing, rising."""
    counts: dict[object, int] = {}
    down = ExpertLinear(w2, scale=w2_scale)
    for count in range(1, max_tokens + 1):
        tiles = _chosen_tiles(count, top_k, down, dtype or w2.dtype, expert_map, is_gated)
        counts.setdefault((tiles, count > MAX_FUSED_TOKENS), count)
    return list(counts.values())


def _chosen_tiles(
    num_tokens: int,
    top_k: int,
    down: ExpertLinear,
    dtype: torch.dtype,
    expert_map: torch.Tensor | None,
    is_gated: bool,
) -> MoeTiles | None:
    """Return the tiles, or None for matrix-vector products."""
    num_experts, hidden_size, _ = down.w.shape
    # Entries spread over all experts, but a rank may hold only some of the experts.
    num_routed = num_experts
    if expert_map is not None:
        num_routed = expert_map.numel()
    packed = down.format if down.is_packed else ""
    shape = MoeShape(num_tokens * top_k, num_routed, hidden_size, down.columns, dtype.itemsize, packed)
    if is_gated and takes_gemv(shape, is_quantized=bool(down.format)):
        return None
    return moe_tiles(shape, dtype, device_of(down.w.device))


def _check_aligned(aligned: MoeAlignment, topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    num_entries, device = topk_ids.numel(), topk_ids.device
    num_blocks = definition.max_num_blocks(num_entries, block_size, num_experts)
    sizes = (num_blocks * block_size, num_blocks, 1)
    for name, tensor, size in zip(aligned._fields, aligned, sizes, strict=True):
        check_tensor(f"aligned.{name}", tensor, (size,), (torch.int32,), device)
        check_contiguous(f"aligned.{name}", tensor)
