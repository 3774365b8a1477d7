"""Numba kernels of gated residual streams, before and behind their products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch


@nb.device_function
def _join_rows(streams, output, gains, norm, joined, normed, has_output, sizes):
    """Join a token's output into each stream, and normalise the stream."""
    num_tokens, count, size, token_stride, stream_stride, output_stride, gains_stride, eps = sizes
    first, end = nb.share(num_tokens * count)
    for row in range(first, end):
        token, stream = row // count, row % count
        start, to, weight = token * token_stride + stream * stream_stride, row * size, stream * size
        if has_output:
            gain, begin = gains[token * gains_stride + stream], token * output_stride
            for i in range(size):
                nb.store(joined, to + i, nb.load(streams, start + i) + gain * nb.load(output, begin + i))
        else:
            for i in range(size):
                nb.store(joined, to + i, nb.load(streams, start + i))
        inverse = nb.inverse_rms(joined, to, size, eps)
        for i in range(size):
            nb.store(normed, to + i, nb.load(joined, to + i) * inverse * nb.load(norm, weight + i))


@nb.Kernel
def _join(arguments):
    values = nb.unpack(arguments, 18)
    _, is_bf16, has_bf16_norm, streams, output, gains, norm, joined, normed, has_output = values[:10]
    sizes = (*values[10:17], nb.as_float(values[17]))
    if not is_bf16:
        _join_rows(
            nb.floats(streams), nb.floats(output), nb.floats(gains), nb.floats(norm), nb.floats(joined),
            nb.floats(normed), has_output, sizes,
        )  # fmt: skip
    elif has_bf16_norm:
        _join_rows(
            nb.bfloats(streams), nb.bfloats(output), nb.floats(gains), nb.bfloats(norm), nb.bfloats(joined),
            nb.bfloats(normed), has_output, sizes,
        )  # fmt: skip
    else:
        _join_rows(
            nb.bfloats(streams), nb.bfloats(output), nb.floats(gains), nb.floats(norm), nb.bfloats(joined),
            nb.bfloats(normed), has_output, sizes,
        )  # fmt: skip


@nb.device_function
def _gate_rows(logits, normed, x, sums, num_tokens, count, size):
    """Write the mean of normalised streams times the sigmoids of their logits."""
    minus_log2e = np.float32(-1.4426950408889634)
    first, end = nb.share(num_tokens * size)
    while first < end:
        token = first // size
        begin, stop = first - token * size, min(end - token * size, size)
        for i in range(begin, stop):
            sums[i] = np.float32(0)
        for stream in range(count):
            start = (token * count + stream) * size
            for i in range(begin, stop):
                gate = np.float32(1) / (np.float32(1) + nb.exp2(nb.load(logits, start + i) * minus_log2e))
                sums[i] += gate * nb.load(normed, start + i)
        for i in range(begin, stop):
            nb.store(x, token * size + i, sums[i] / np.float32(count))
        first = token * size + stop


@nb.Kernel
def _gate(arguments):
    _, is_bf16, logits, normed, x, scratch, num_tokens, count, size = nb.unpack(arguments, 9)
    sums = nb.floats(scratch + nb.thread_index() * size * 4)
    if is_bf16:
        _gate_rows(nb.bfloats(logits), nb.bfloats(normed), nb.bfloats(x), sums, num_tokens, count, size)
    else:
        _gate_rows(nb.floats(logits), nb.floats(normed), nb.floats(x), sums, num_tokens, count, size)


class Launches(NamedTuple):
    """The launches before and behind the products."""

    join: NumbaLaunch
    gate: NumbaLaunch


def launches_for(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
) -> Launches:
    """Return the launches for tensors like these. Logits, and what the launches write, are contiguous."""
    num_tokens, count, size = streams.shape
    is_bf16, has_bf16_norm = streams.dtype == torch.bfloat16, norm_weight.dtype == torch.bfloat16
    has_output = output is not None and gains is not None
    strides = [streams.stride(0), streams.stride(1), 0, 0]
    if output is not None and gains is not None:
        strides[2:] = output.stride(0), gains.stride(0)
    tensors = "streams_ptr", "output_ptr", "gains_ptr", "norm_ptr", "joined_ptr", "normed_ptr"
    join = NumbaLaunch(
        _join.address,
        streams.numel(),
        (is_bf16, has_bf16_norm, *tensors, has_output, num_tokens, count, size, *strides, nb.bits(eps)),
    )
    gate = NumbaLaunch(
        _gate.address,
        streams.numel() * 8,
        (is_bf16, "logits_ptr", "normed_ptr", "x_ptr", SCRATCH, num_tokens, count, size),
        scratch_size=size,
    )
    return Launches(join, gate)
