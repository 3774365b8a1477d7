"""Checks and results that the operations over residual streams share."""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from ..core.errors import InvalidInputError

MAX_STREAMS = 8


def check_streams(
    streams: torch.Tensor, output: torch.Tensor | None, factors_name: str, factors: torch.Tensor | None
) -> None:
    """Raise InvalidInputError unless there are 1 to 8 streams, and an output to join with factors, or neither."""
    check_tensor("streams", streams, ("num_tokens", "N", "size"), FLOAT_DTYPES)
    num_tokens, count, size = streams.shape
    if not 1 <= count <= MAX_STREAMS:
        raise InvalidInputError(f"streams: {count} streams, expected 1 to {MAX_STREAMS}")
    if (output is None) != (factors is None):
        raise InvalidInputError(f"output, {factors_name}: one is None, expected both or none")
    if output is not None:
        check_tensor("output", output, (num_tokens, size), (streams.dtype,), streams.device)


def check_rows(**tensors: torch.Tensor | None) -> None:
    """Raise InvalidInputError unless the last axis of each tensor has stride 1."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_last_dim_contiguous(name, tensor)


def new_streams(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the next part's input, [num_tokens, size], and for new streams; both are contiguous."""
    num_tokens, _, size = streams.shape
    return streams.new_empty(num_tokens, size), streams.new_empty(streams.shape)
