"""Numba kernel of the causal convolution, for sequences that append to a ring."""

from __future__ import annotations

import numpy as np
import torch

from ...recurrent.metadata import RecurrentBatch
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LOG2_E


@nb.device_function
def _convolve(x, weight, bias, conv, out, total, ids, sizes):
    """Convolve this thread's channels of all sequences; set rows of no sequence to 0."""
    offsets, read_slots, write_slots, cursors = ids
    num_tokens, num_seqs, channels, width, x_stride, channel_stride, tap_stride, slot_stride, has_bias, has_silu = sizes
    begin, end = nb.share(channels)
    before, zero = width - 1, np.float32(0)
    for seq in range(num_seqs):
        first, length = np.int64(offsets[seq]), np.int64(offsets[seq + 1] - offsets[seq])
        read, write = np.int64(read_slots[seq]), np.int64(write_slots[seq]) * slot_stride
        history = read * slot_stride + np.int64(cursors[seq]) * channels
        for token in range(length):
            for c in range(begin, end):
                total[c] = nb.load(bias, c) if has_bias else zero
            for tap in range(width):
                row = token + tap
                if row >= before:
                    at = (first + row - before) * x_stride
                    for c in range(begin, end):
                        total[c] += nb.load(x, at + c) * nb.load(weight, c * channel_stride + tap * tap_stride)
                elif read >= 0:
                    at = history + row * channels
                    for c in range(begin, end):
                        total[c] += nb.load(conv, at + c) * nb.load(weight, c * channel_stride + tap * tap_stride)
            to = (first + token) * channels
            for c in range(begin, end):
                value = total[c]
                if has_silu:
                    value = value / (np.float32(1) + nb.exp2(np.float32(-LOG2_E) * value))
                nb.store(out, to + c, value)
        kept = write + before * channels
        if read >= 0 and read == np.int64(write_slots[seq]):
            kept += np.int64(cursors[seq]) * channels
        elif length > 0:
            for row in range(before):
                for c in range(begin, end):
                    at = row * channels + c
                    nb.store(conv, write + at, nb.load(conv, history + at) if read >= 0 else 0.0)
        for token in range(length):
            for c in range(begin, end):
                nb.store(conv, kept + token * channels + c, nb.load(x, (first + token) * x_stride + c))
    for token in range(np.int64(offsets[num_seqs]), num_tokens):
        for c in range(begin, end):
            nb.store(out, token * channels + c, 0.0)


@nb.Kernel
def _causal_conv1d(arguments):
    values = nb.unpack(arguments, 21)
    is_bf16, x, weight, bias, conv, out, total = values[1:8]
    ids = nb.int32s(values[8]), nb.int32s(values[9]), nb.int32s(values[10]), nb.int32s(values[11])
    sizes = (*values[12:20], bias != 0, values[20] != 0)
    total = nb.floats(total)
    if is_bf16:
        tensors = nb.bfloats(x), nb.bfloats(weight), nb.bfloats(bias), nb.bfloats(conv), nb.bfloats(out)
        _convolve(*tensors, total, ids, sizes)
    else:
        tensors = nb.floats(x), nb.floats(weight), nb.floats(bias), nb.floats(conv), nb.floats(out)
        _convolve(*tensors, total, ids, sizes)


def launch_for(
    x: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, batch: RecurrentBatch, activation: str | None
) -> NumbaLaunch:
    """Return a launch; bias is contiguous."""
    (num_tokens, channels), width = x.shape, weight.shape[1]
    channel_stride, tap_stride = weight.stride()
    arguments = (
        *(x.dtype == torch.bfloat16, "x_ptr", "weight_ptr", "bias_ptr", "conv_ptr", "out_ptr", SCRATCH),
        *("cu_seqlens_q_ptr", "read_slots_ptr", "write_slots_ptr", "cursors_ptr"),
        *(num_tokens, batch.starts.numel(), channels, width, x.stride(0), channel_stride, tap_stride, conv.stride(0)),
        activation is not None,
    )
    return NumbaLaunch(_causal_conv1d.address, num_tokens * channels * width, arguments, scratch_size=channels)
