"""The short causal convolution before a recurrent layer's scan. A slot keeps the inputs before a step."""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.custom_ops import in_fields
from ..core.device import takes_numba, use_triton
from ..core.errors import InvalidInputError, shown
from ..core.launch import Compute, Launch, strides, wait_for_inputs
from ..core.operation import Run, by_definition, like_the_first, operation
from . import definition
from .metadata import RecurrentBatch, RecurrentState, check_step, check_weights
from .row_functions import sequence_of, silu

# Rows of a program, and elements of its tile: a thread of 4 warps takes 16 bytes of a 16-bit dtype.
BLOCK_ROWS = 16
TILE_SIZE = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "max_append"])
def _causal_conv1d_kernel(
    x_ptr,  # [num_tokens, CHANNELS]
    weight_ptr,  # [CHANNELS, WIDTH]
    bias_ptr,  # [CHANNELS], or None
    conv_ptr,  # [num_slots, WIDTH - 1 + L, CHANNELS]
    out_ptr,  # [num_tokens, CHANNELS]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    starts_ptr,  # [num_seqs], like the next five arguments
    read_slots_ptr,
    write_slots_ptr,
    cursors_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    num_tokens,
    num_seqs,
    max_append,
    stride_x_token,
    stride_weight_channel,
    stride_weight_tap,
    stride_conv_slot,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Convolve up to BLOCK_ROWS tokens of one sequence a program. Set rows of no sequence to 0.

    A sequence's inputs are WIDTH - 1 earlier ones and its tokens. Every tap loads its own inputs. One program stores
    each input that the slots keep.
    """
    wait_for_inputs()
    BEFORE: tl.constexpr = WIDTH - 1
    program = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    mask_c = (channels < CHANNELS)[None, :]
    seq = sequence_of(program, cu_seqlens_q_ptr, num_seqs, BLOCK_ROWS, 1)
    begin = tl.load(cu_seqlens_q_ptr + seq)
    rows = (program - begin // BLOCK_ROWS - seq) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = begin.to(tl.int64) + rows[:, None]
    out_ptrs = out_ptr + tokens * CHANNELS + channels[None, :]
    if seq == num_seqs:
        zero = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zero, (tokens < num_tokens) & mask_c)
        return
    length = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    read_slot = tl.load(read_slots_ptr + seq).to(tl.int64)
    write_slot = tl.load(write_slots_ptr + seq).to(tl.int64)
    cursor = tl.load(cursors_ptr + seq)
    read_ptr = conv_ptr + read_slot * stride_conv_slot + channels[None, :]
    write_ptr = conv_ptr + write_slot * stride_conv_slot + channels[None, :]
    # The first input that the written slot keeps, and its row in the slot.
    is_scan, in_place = length > max_append, read_slot == write_slot
    first_kept = tl.where(is_scan, length, tl.where(in_place, BEFORE, 0))
    first_row = tl.where(is_scan, 0, tl.where(in_place, BEFORE + cursor, 0))
    snapshot_slot = tl.where(is_scan, tl.load(snapshot_slots_ptr + seq), -1).to(tl.int64)
    first_of_snapshot = tl.load(snapshot_lens_ptr + seq) - tl.load(starts_ptr + seq)
    snapshot_ptr = conv_ptr + snapshot_slot * stride_conv_slot + channels[None, :]

    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    mask = (rows < length)[:, None] & mask_c
    for tap in tl.static_range(WIDTH):
        inputs = rows[:, None] + tap
        is_before = inputs < BEFORE
        before = tl.load(read_ptr + (cursor + inputs) * CHANNELS, mask & is_before & (read_slot >= 0), other=0.0)
        x_ptrs = x_ptr + (tokens + tap - BEFORE) * stride_x_token + channels[None, :]
        value = tl.where(is_before, before, tl.load(x_ptrs, mask & (inputs >= BEFORE), other=0.0))
        weight_ptrs = weight_ptr + channels * stride_weight_channel + tap * stride_weight_tap
        weight = tl.load(weight_ptrs, channels < CHANNELS, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * weight[None, :]
        is_stored = mask & ((tap == BEFORE) | (rows[:, None] == 0))
        ptrs = write_ptr + (first_row + inputs - first_kept) * CHANNELS
        tl.store(ptrs, value, is_stored & (inputs >= first_kept))
        kept = inputs - first_of_snapshot
        is_stored = is_stored & (snapshot_slot >= 0) & (kept >= 0) & (kept < BEFORE)
        tl.store(snapshot_ptr + kept * CHANNELS, value, is_stored)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, channels < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = silu(total)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask)


def conv_tile(longest: int) -> tuple[int, int]:
    """Return rows and channels of a program, by the tokens of the longest sequence."""
    rows = 1 if longest <= 1 else BLOCK_ROWS
    return rows, TILE_SIZE // rows


@operation(like_the_first, mutates=("conv",), **in_fields(state=RecurrentState, batch=RecurrentBatch))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    activation: str | None = "silu",
) -> Run[torch.Tensor]:
    """Convolve each channel of each sequence with its W taps: out[t] = sum_j weight[:, j] x[t - W + 1 + j] + bias.

    Inputs before the step come from `state.conv` of the read slot, and are 0 for a sequence without a slot to read. The
    step's inputs go to the written slot, see `kernels.recurrent.metadata`. The result is computed in float32 and
    rounded once.

    Args:
        x: [num_tokens, channels], float32, float16 or bfloat16, last dimension contiguous.
        weight: [channels, W], any of the dtypes of x and any strides; the last tap is the token's own. Loads are widest
            if the taps of neighbouring channels lie side by side.
        bias: [channels] or None.
        state: its `conv` is read and written, in the dtype of x.
        batch: the sequences of x. Its values are checked on a CPU.
        activation: "silu" or None.

    Returns:
        Like x, contiguous.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_step(state, batch, x)
    check_tensor("x", x, ("num_tokens", "channels"), FLOAT_DTYPES)
    check_last_dim_contiguous("x", x)
    check_tensor("weight", weight, (x.shape[1], "W"), FLOAT_DTYPES, x.device)
    if bias is not None:
        check_weights(x.device, (x.shape[1],), bias=bias)
    if activation not in ("silu", None):
        raise InvalidInputError(f"activation: {shown(activation)}, expected 'silu' or None")
    batch.check(x.shape[0], state.conv.shape[0], state.check_conv(x, weight.shape[1]))
    if use_triton(x):
        return _bind(x, weight, state, batch, activation)
    appends = batch.max_seqlen_q <= batch.max_append
    if appends and takes_numba(x, weight, bias):
        from ..cpu.recurrent import causal_conv1d as numba_conv1d

        return _run(numba_conv1d.launch_for(x, weight, state.conv, batch, activation))
    return by_definition(definition.causal_conv1d, x.dtype)


def _bind(
    x: torch.Tensor, weight: torch.Tensor, state: RecurrentState, batch: RecurrentBatch, activation: str | None
) -> Run[torch.Tensor]:
    (num_tokens, channels), num_seqs = x.shape, batch.starts.numel()
    rows, columns = conv_tile(batch.max_seqlen_q)
    grid = num_tokens // rows + num_seqs + 1, triton.cdiv(channels, columns)
    arguments = {
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "max_append": batch.max_append,
        **strides("token", x=x),
        **strides("channel tap", weight=weight),
        **strides("slot", conv=state.conv),
        "CHANNELS": channels,
        "WIDTH": weight.shape[1],
        "SILU": activation is not None,
        "BLOCK_ROWS": rows,
        "BLOCK_CHANNELS": columns,
    }
    return _run(Launch(_causal_conv1d_kernel, grid, arguments))


def _run(compute: Compute) -> Run[torch.Tensor]:
    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: RecurrentState,
        batch: RecurrentBatch,
        **_: object,
    ) -> torch.Tensor:
        out = like_the_first(x)
        if bias is not None:
            bias = bias.contiguous()
        tensors = {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "conv_ptr": state.conv, "out_ptr": out}
        if x.numel():
            compute(tensors | batch.pointers())
        return out

    return run
