"""Numba kernel of weighted sums of snapshots of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch

_LOG2E = 1.4426950408889634


@nb.device_function
def _score(rows, start, query, size, eps):
    total = np.float32(0)
    for i in range(size):
        total += nb.load(rows, start + i) * query[i]
    return total * nb.inverse_rms(rows, start, size, eps)


@nb.device_function
def _mix(rows, output, weights, x, scratch, has_output, sizes):
    """Mix a thread's tokens. scratch: the query, the sum of rows and the scores."""
    num_rows, num_tokens, size, num_snapshots, row_stride, token_stride, output_stride, eps, norm_eps = sizes
    score_norm, score, norm = weights
    log2e = np.float32(_LOG2E)
    mixed, scores = size, 2 * size  # places in scratch
    for i in range(size):
        scratch[i] = nb.load(score_norm, i) * nb.load(score, i)
    first, end = nb.share(num_tokens)
    for token in range(first, end):
        stream = (num_rows - 1) * row_stride + token * token_stride
        if has_output:
            for i in range(size):
                value = nb.load(rows, stream + i) + nb.load(output, token * output_stride + i)
                nb.store(rows, stream + i, value)
        largest = _score(rows, stream, scratch, size, eps)
        scratch[scores + num_snapshots] = largest
        for row in range(num_snapshots):
            value = _score(rows, row * row_stride + token * token_stride, scratch, size, eps)
            scratch[scores + row] = value
            largest = max(largest, value)
        total = np.float32(0)
        for i in range(size):
            scratch[mixed + i] = np.float32(0)
        for row in range(num_snapshots + 1):
            start = stream
            if row < num_snapshots:
                start = row * row_stride + token * token_stride
            weight = nb.exp2((scratch[scores + row] - largest) * log2e)
            total += weight
            for i in range(size):
                scratch[mixed + i] += weight * nb.load(rows, start + i)
        squares = np.float32(0)
        for i in range(size):
            scratch[mixed + i] /= total
            squares += scratch[mixed + i] * scratch[mixed + i]
        inverse = np.float32(1) / np.sqrt(squares / np.float32(size) + norm_eps)
        for i in range(size):
            nb.store(x, token * size + i, scratch[mixed + i] * inverse * nb.load(norm, i))


@nb.Kernel
def _mix_snapshots(arguments):
    values = nb.unpack(arguments, 20)
    _, is_bf16, has_bf16_weights, rows, output, score_norm, score, norm, x, scratch, scratch_size = values[:11]
    sizes = (*values[11:18], nb.as_float(values[18]), nb.as_float(values[19]))
    thread_scratch = nb.floats(scratch + nb.thread_index() * scratch_size * 4)
    wide = nb.floats(score_norm), nb.floats(score), nb.floats(norm)
    if not is_bf16:
        _mix(nb.floats(rows), nb.floats(output), wide, nb.floats(x), thread_scratch, output != 0, sizes)
    elif has_bf16_weights:
        narrow = nb.bfloats(score_norm), nb.bfloats(score), nb.bfloats(norm)
        _mix(nb.bfloats(rows), nb.bfloats(output), narrow, nb.bfloats(x), thread_scratch, output != 0, sizes)
    else:
        _mix(nb.bfloats(rows), nb.bfloats(output), wide, nb.bfloats(x), thread_scratch, output != 0, sizes)


def launch_for(
    rows: torch.Tensor,
    weight_dtype: torch.dtype,
    strides: Sequence[int],
    *,
    num_snapshots: int,
    eps: float,
    norm_eps: float,
    has_output: bool,
) -> NumbaLaunch:
    """Return a launch for tensors like `rows`; strides: of rows, of tokens and of the output's tokens."""
    num_rows, num_tokens, size = rows.shape
    scratch_size = 2 * size + num_rows
    output = "output_ptr" if has_output else 0
    tensors = output, "score_norm_ptr", "score_ptr", "norm_ptr", "x_ptr", SCRATCH
    sizes = num_rows, num_tokens, size, num_snapshots, *strides, nb.bits(eps), nb.bits(norm_eps)
    kinds = rows.dtype == torch.bfloat16, weight_dtype == torch.bfloat16
    work = num_tokens * size * (num_snapshots + 1)
    arguments = (*kinds, "rows_ptr", *tensors, scratch_size, *sizes)
    return NumbaLaunch(_mix_snapshots.address, work, arguments, scratch_size=scratch_size)
